"""What an environment answers to the turns of many episodes, one after another or many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from posttrain.core.contracts import Environment, Observation, Tool, Turn

Step = tuple[object, Turn]
"""A state of the environment, and what the policy said in it."""
POLL_S = 0.2
MOST_THREADS = 2048


class Answers(Protocol):
    """Whoever makes an environment's steps."""

    def to(self, steps: Sequence[Step]) -> list[Observation]:
        """The answer to each of `steps`, in order."""


class AnswersHere:
    """Answers of this process, in as many threads as the environment and its tools allow.

    With tools that are not known (None) one after another. `check` is called while threads are
    waited for, and may raise.
    """

    def __init__(
        self,
        environment: Environment[Any],
        tools: Sequence[Tool[Any]] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.environment, self.tools = environment, tuple(tools or ())
        self.at_once = 1
        if tools is not None:
            self.at_once = min([environment.at_once, *(tool.at_once for tool in tools)])
        self._check = check

    def to(self, steps: Sequence[Step]) -> list[Observation]:
        """As in `Answers`. Raises the error of the first step that has one."""
        step = self.environment.step
        if min(self.at_once, len(steps)) <= 1:
            return [step(state, turn) for state, turn in steps]
        threads = ThreadPoolExecutor(min(self.at_once, len(steps), MOST_THREADS), "turns")
        try:
            waiting: set[Future[Observation]]
            answers = [threads.submit(step, state, turn) for state, turn in steps]
            waiting = set(answers)
            while waiting:
                self._check()
                done, waiting = wait(waiting, POLL_S, FIRST_EXCEPTION)
                if any(answer.exception() for answer in done):
                    break
            failed = next((a for a in answers if a.done() and a.exception()), None)
            return [failed.result()] if failed else [answer.result() for answer in answers]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
