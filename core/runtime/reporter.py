"""What a run tells the person watching it. The terminal's version lives in `pipelines`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Reporter(Protocol):
    """Receives progress from stages; called from the main thread or from stage threads."""

    def stage_reached(self, stage: str) -> None:
        """A stage begins to read its models and data; one that is reused does not."""

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        """It has read them, and goes to work; `total_steps` is what `step_done` counts to."""

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (1-based) ended with these metrics."""

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """A stage ended as `ran`, `cached`, `resumed`, `failed` or `killed`."""

    def say(self, text: str) -> None:
        """A line worth reading."""

    def warn(self, text: str) -> None:
        """Something a person should look at."""


class SilentReporter:
    """Reports nothing."""

    def stage_reached(self, stage: str) -> None: ...
    def stage_started(self, stage: str, kind: str, total_steps: int) -> None: ...
    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None: ...
    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None: ...
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
