"""One reporter for several: the terminal, the run's log file, Prefect."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.core.runtime.report import Reporter
from posttrain.pipelines.logged import LogReporter


class Reporters:
    """Tells each of `each`, in order."""

    def __init__(self, each: Sequence[Reporter]) -> None:
        self.each = list(each)

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        for one in self.each:
            one.stage_started(stage, kind, total_steps)

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        for one in self.each:
            one.step_done(stage, step, metrics)

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        for one in self.each:
            one.stage_finished(stage, status, seconds, metrics)

    def say(self, text: str) -> None:
        for one in self.each:
            one.say(text)

    def warn(self, text: str) -> None:
        for one in self.each:
            one.warn(text)


class FileReporter(LogReporter):
    """Lines with their time, appended to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        logger = logging.Logger(f"posttrain.log.{path.stem}")  # of its own: of no other's tree
        logger.addHandler(self._handler)
        super().__init__(logger)

    def close(self) -> None:
        self._handler.close()
