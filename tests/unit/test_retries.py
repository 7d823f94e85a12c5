"""Only a lost connection is worth another try, and only of stages that take no optimizer step."""

from __future__ import annotations

import pytest

from posttrain.core.config.schema import BUILT_IN
from posttrain.core.errors import RunError
from posttrain.pipelines.run.flow import lost_connection, options_for


def test_no_stage_that_trains_or_asks_or_promotes_is_tried_again() -> None:
    again = {kind for kind, cls in BUILT_IN.items() if cls.repeatable}
    assert again == {"evaluate", "benchmark", "record_teacher", "transform", "register"}
    assert not any(BUILT_IN[kind].takes_steps for kind in again)
    assert options_for(True)["retries"] == 2
    assert options_for(False)["retries"] == 0


def wrapped(cause: Exception) -> Exception:
    """As the tracker tells of what went wrong below it."""
    try:
        raise RunError("could not record a step in MLflow") from cause
    except RunError as error:
        return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionRefusedError("refused"), True),
        (TimeoutError("no answer"), True),
        (wrapped(ConnectionResetError("reset")), True),
        (wrapped(ValueError("no such model")), False),
        (RunError("a prompt is too long"), False),
        (FileNotFoundError("gone"), False),
    ],
)
def test_what_is_behind_the_error_decides(error: Exception, again: bool) -> None:
    assert lost_connection(error) is again
