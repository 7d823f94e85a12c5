"""No task: for pipelines whose stages all bring their own data."""

from __future__ import annotations

from posttrain.core.config.base import NO_TASK
from posttrain.core.contracts import NoConfig, Task
from posttrain.core.errors import DataError
from posttrain.core.types import Problem, Split, Verdict


class NoneTask(Task[NoConfig]):
    """Has no problems. It is the default, for instance of DPO on a file of preferences.

    verify(x, y) = 0.
    """

    name = NO_TASK
    Config = NoConfig

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Raises `DataError`: there are none."""
        raise DataError("the config names no task, so there are no problems: set `task`")

    def available(self, split: Split) -> int:
        return 0

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Nothing is right."""
        return Verdict(0.0, None)
