"""Which stages Prefect may try again, and after what: none that takes an optimizer step."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State, TaskRun

REPEATABLE = frozenset({"evaluate", "transform", "register"})
"""Kinds of stages that read, measure and write what they made at their end, in one piece."""
RETRIES = 2
DELAY_S = 5.0


def options_for(kind: str) -> dict[str, Any]:
    """Options of the task that runs a stage of that kind."""
    if kind not in REPEATABLE:
        return {"retries": 0}
    return {
        "retries": RETRIES,
        "retry_delay_seconds": DELAY_S,
        "retry_condition_fn": after_a_lost_connection,
    }


def after_a_lost_connection(task: Any, run: TaskRun, state: State[Any]) -> bool:
    """Whether the task failed because something that it talked to could not be reached."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and lost_connection(error)


def lost_connection(error: BaseException) -> bool:
    """Whether a lost connection, or one that timed out, is behind `error`."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ConnectionError | TimeoutError):
            return True
        found = found.__cause__ or found.__context__
    return False
