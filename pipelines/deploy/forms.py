"""What a deployed run is asked for: the form on Prefect's pages, checked before a run starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Override = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*=")]
ConfigName = Annotated[str, StringConstraints(min_length=1)]


class RunRequest(BaseModel):
    """A pipeline to run: the same run as `posttrain run CONFIGS --set OVERRIDES --home HOME`."""

    model_config = ConfigDict(extra="forbid")

    configs: list[ConfigName] = Field(
        min_length=1,
        title="Configs",
        description="Names of shipped configs (quickstart, recipes/dapo) or paths of YAML files "
        "where the run happens, merged from left to right.",
    )
    overrides: list[Override] = Field(
        default=[],
        title="Overrides",
        description="Values to replace, each like stages.rl.steps=3.",
    )
    seed: int | None = Field(
        default=None, ge=0, title="Seed", description="Seed of the run; empty: the config's own."
    )
    home: str | None = Field(
        default=None,
        title="Home",
        description="Folder for artifacts and checkpoints where the run happens; empty: "
        "POSTTRAIN_HOME of the worker, else .posttrain.",
    )
    fresh: bool = Field(
        default=False,
        title="Fresh",
        description="Start again instead of continuing an interrupted run.",
    )
    no_cache: bool = Field(
        default=False,
        title="No cache",
        description="Compute every stage, also those already computed.",
    )

    def paths(self) -> list[Path]:
        return [Path(name).expanduser() for name in self.configs]

    def all_overrides(self) -> list[str]:
        """Overrides of the config; the seed is the last word."""
        return [*self.overrides, *([] if self.seed is None else [f"seed={self.seed}"])]

    def home_folder(self) -> Path:
        chosen = self.home or os.environ.get("POSTTRAIN_HOME") or ".posttrain"
        return Path(chosen).expanduser().resolve()


class EvaluateRequest(RunRequest):
    """A model to measure on the held-out problems of a config's task; nothing is trained."""

    model: str | None = Field(
        default=None,
        title="Model",
        description="A model directory or hub name; empty: the config's base model.",
    )
    stage: str = Field(
        default="evaluate",
        pattern=r"^[A-Za-z0-9_]+$",
        title="Stage",
        description="Name of the stage in tables and in MLflow.",
    )

    def all_overrides(self) -> list[str]:
        """The config's stages give way to a single one that evaluates the base model."""
        stages = json.dumps({self.stage: {"kind": "evaluate", "inputs": {"model": "base"}}})
        model = [] if self.model is None else [f"model.source={json.dumps(self.model)}"]
        return [f"stages={stages}", *model, *super().all_overrides()]
