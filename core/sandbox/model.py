"""What a sandbox is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from posttrain.core.sandbox.levels import Level

Status = Literal["ok", "nonzero", "timeout", "killed", "error"]


class SandboxLimits(BaseModel):
    """Limits of one run. Memory counts per process (address space) and in sum (resident)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wall_s: float = Field(default=10.0, gt=0, description="seconds by the clock")
    cpu_s: int = Field(default=5, ge=1, description="CPU seconds, per process")
    memory_mib: int = Field(default=512, ge=64, description="MiB, per process and in sum")
    processes: int = Field(default=16, ge=1, description="processes and threads at once")
    file_mib: int = Field(default=16, ge=1, description="MiB of one file")
    scratch_mib: int = Field(default=32, ge=1, description="MiB in the scratch folder")
    open_files: int = Field(default=64, ge=16, description="descriptors of one process")
    output_kib: int = Field(default=256, ge=1, description="KiB of stdout, and as much of stderr")


class SandboxSettings(BaseModel):
    """Which isolation is wanted, and the user's word where it may be weak."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["auto", "bubblewrap", "namespaces", "rlimits"] = Field(
        default="auto", description="auto: the strongest that works here"
    )
    min_level: Level = Field(default="namespaces", description="refuse to run below this one")
    allow_weak: bool = Field(
        default=False,
        description="your word that a level below the strongest here, or one that does not hide "
        "files, will do",
    )
    python: str | None = Field(
        default=None, description="interpreter of the programs; null = the system's python3"
    )

    @model_validator(mode="after")
    def _weakness_is_wanted(self) -> SandboxSettings:
        if "rlimits" in (self.level, self.min_level) and not self.allow_weak:
            raise ValueError(
                "the level rlimits hides no files from the program: set allow_weak: true if you "
                "trust the programs that far, or choose namespaces or bubblewrap"
            )
        return self


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How one program ended.

    `ok`: exit code 0. `nonzero`: another exit code, or a signal of its own. `timeout`: the wall
    clock. `killed`: `reason` is `memory`, `cpu` or `output`. `error`: the sandbox itself failed,
    `reason` says how, and nothing is known of the program. A signal is minus its number in
    `exit_code`. Output beyond the limit is cut. What was written to the scratch folder is gone.
    """

    status: Status
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    level: Level
    reason: str = ""
