"""What a home keeps of a sweep, so that it goes on where it was: `HOME/sweeps/NAME/record.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from posttrain.core.errors import RunError
from posttrain.core.runtime.files import WrongContent, read_json, write_text

Status = Literal["waiting", "running", "finished", "failed", "stopped", "pruned"]
FILE = "record.json"


class BranchRecord(BaseModel):
    """A branch as far as it got. `computed` has the seconds of the stages it really ran, `right`
    the answers to held-out problems by step while it trained: `0110...`, 1 for a right one.
    """

    variant: str
    seed: int
    run_id: str = ""
    status: Status = "waiting"
    reason: str = ""
    step: int = 0
    computed: dict[str, float] = Field(default_factory=dict)
    reused: list[str] = Field(default_factory=list)
    right: dict[int, str] = Field(default_factory=dict)
    problems: str = ""


class TrialRecord(BaseModel):
    """What a search tried, and what came out."""

    settings: dict[str, Any]  # Any: YAML values
    value: float | None = None
    done: bool = False
    pruned: bool = False
    curve: dict[int, float] = Field(default_factory=dict)


class SweepRecord(BaseModel):
    """Branches by their keys, and the trials of a search in order."""

    branches: dict[str, BranchRecord] = Field(default_factory=dict)
    trials: list[TrialRecord] = Field(default_factory=list)
    mlflow_run_id: str = ""


def sweep_folder(home: Path, name: str) -> Path:
    """Where a home keeps what belongs to sweeps of a config of this name."""
    return home / "sweeps" / name


def read_record(folder: Path) -> SweepRecord:
    """The record in `folder`, empty where there is none; raises `RunError` for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return SweepRecord()
    try:
        return SweepRecord.model_validate(read_json(path, dict[str, Any]))
    except (WrongContent, ValueError) as error:
        raise RunError(
            f"{path} is not what a sweep wrote ({error}): move it away; the stages that are done "
            "are not computed again"
        ) from error


def write_record(folder: Path, record: SweepRecord) -> None:
    """Put the record in its place, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, record.model_dump_json(indent=1))
