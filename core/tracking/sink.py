"""What a stage hands to the tracker while it runs, and a tracker that keeps none of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from posttrain.core.tracking.mlflow_run import TracedResponse


class StageSink(Protocol):
    """The part of `StageTracker` that stages use."""

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; a placeholder while it could not be made there yet."""

    def log_step(self, step: int, metrics: Mapping[str, float | None]) -> Sequence[str]:
        """What was measured at an optimizer step; returns the names that were too many."""

    def log_summary(self, metrics: Mapping[str, float | None], model_id: str = "") -> None:
        """Final values; of the model with that MLflow id too, where there is one."""

    def log_table(self, name: str, step: int | None, rows: Sequence[Mapping[str, object]]) -> None:
        """Rows to be shown as a table; without a step, in the place of the one before."""

    def log_traces(self, responses: Sequence[TracedResponse]) -> None:
        """Responses to be shown as traces."""

    def log_dataset(
        self, name: str, context: str, digest: str, num_rows: int, source: str, of: str = ""
    ) -> None:
        """A dataset that the stage reads."""

    def log_file(self, path: Path, folder: str = "") -> None:
        """A file to be kept with the stage."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Tags of the stage."""

    def share_view(self, name: str, state: str) -> None:
        """A layout of charts of the experiment."""


class NotTracked:
    """Keeps nothing: what is computed again is on record already."""

    run_id = ""

    def log_step(self, step: int, metrics: Mapping[str, float | None]) -> Sequence[str]:
        return ()

    def log_summary(self, metrics: Mapping[str, float | None], model_id: str = "") -> None: ...
    def log_table(
        self, name: str, step: int | None, rows: Sequence[Mapping[str, object]]
    ) -> None: ...
    def log_traces(self, responses: Sequence[TracedResponse]) -> None: ...
    def log_dataset(
        self, name: str, context: str, digest: str, num_rows: int, source: str, of: str = ""
    ) -> None: ...
    def log_file(self, path: Path, folder: str = "") -> None: ...
    def set_tags(self, tags: Mapping[str, str]) -> None: ...
    def share_view(self, name: str, state: str) -> None: ...
