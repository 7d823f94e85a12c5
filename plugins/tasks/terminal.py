"""Task folders in Harbor's form, for the environment `terminal`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Task
from posttrain.core.data.task_folders import FOLDER, TaskFolder, task_folders
from posttrain.core.errors import DataError
from posttrain.core.math.splits import held_out_keys, too_few
from posttrain.core.store.manifests import combine_digests, tree_digests
from posttrain.core.types import Problem, Split, Verdict

NAMED = 3


class TerminalTaskConfig(PluginConfig):
    """Settings of `terminal`. Paths are relative to the working directory."""

    path: Path = Field(description="a folder of task folders, or one task folder")
    unsupported: Literal["refuse", "skip", "ignore"] = Field(
        default="refuse",
        description="tasks whose Dockerfile does more than place files on a Debian-like image: "
        "refuse: an error that names them; skip: leave them out; ignore: use them without what "
        "those lines would do",
    )
    held_out_permille: int = Field(
        default=100, ge=1, le=999, description="of 1000 tasks, how many are never trained on"
    )


class TerminalTask(Task[TerminalTaskConfig]):
    """Problem = one task folder: the prompt is its instruction.md, its tests judge the episode.

    correct = the reward that tests/test.sh gives, within [0, 1].
    Source: the task format of Harbor (Terminal-Bench 2).
    """

    name = "terminal"
    Config = TerminalTaskConfig
    by_environment = True

    def __init__(self, config: TerminalTaskConfig) -> None:
        super().__init__(config)
        self._tasks = self._usable(task_folders(config.path, "task.path"))
        held_out = held_out_keys((t.name for t in self._tasks), config.held_out_permille / 1000)
        self._splits: dict[Split, list[TaskFolder]] = {
            "train": [task for task in self._tasks if task.name not in held_out],
            "held_out": [task for task in self._tasks if task.name in held_out],
        }

    def _usable(self, tasks: list[TaskFolder]) -> list[TaskFolder]:
        refused = [task for task in tasks if task.unsupported]
        if not refused or self.config.unsupported == "ignore":
            return tasks
        if self.config.unsupported == "refuse" or len(refused) == len(tasks):
            shown = "; ".join(f"{t.name}: `{t.unsupported[0][:80]}`" for t in refused[:NAMED])
            more = f"; and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
            raise DataError(
                f"{len(refused)} of {len(tasks)} tasks in '{self.config.path}' need a container, "
                f"which the sandbox cannot stand in for ({shown}{more}): set task.unsupported: "
                "skip to leave them out, or ignore to use them without these lines"
            )
        return [task for task in tasks if not task.unsupported]

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` distinct problems of `split` in an order decided by `seed`."""
        tasks = self._splits[split]
        if len(tasks) < count:
            fix = "add task folders, or ask for fewer problems"
            raise too_few(self.name, split, count, len(tasks), fix)
        chosen = random.Random(f"terminal|{split}|{seed}").sample(tasks, count)
        return [
            Problem(task.name, task.instruction, "", "", {FOLDER: str(task.path)})
            for task in chosen
        ]

    def available(self, split: Split) -> int | None:
        """Every task of `split`."""
        return len(self._splits[split])

    def fingerprint(self) -> str:
        """Digest of all files of all its tasks."""
        folders = ((task.name, tree_digests(task.path)) for task in self._tasks)
        return combine_digests({name: combine_digests(files) for name, files in folders})

    def verify(self, problem: Problem, text: str) -> Verdict:
        """Nothing is right without its environment."""
        return Verdict(0.0, None)

    def source(self) -> str:
        return str(self.config.path)
