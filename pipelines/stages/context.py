"""What a stage is given and what it returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from posttrain.core.artifacts import Artifact, ArtifactKind
from posttrain.core.config.base import Component, StageBase
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import Plugin, Task
from posttrain.core.data.problems import (
    check_disjoint,
    held_out_problems,
    problems_digest,
    read_problems,
    repeat_problems,
    training_problems,
)
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.evaluation import Evaluation
from posttrain.core.models.loading import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.prompts import PromptEncoder
from posttrain.core.runtime.report import Reporter
from posttrain.core.tracking.mlflow_stage import StageTracker
from posttrain.core.types import Problem
from posttrain.pipelines.engines import EnginePool

PluginT = TypeVar("PluginT", bound=Plugin[Any])


PROBLEMS_FILE = "problems.jsonl"
"""The problems in an artifact of kind `dataset`."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage made: files below its folder, by kind, and its final metrics."""

    made: Mapping[ArtifactKind, Path]
    metrics: Mapping[str, float]
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class StageContext:
    """Everything a stage may use. `out` is its private folder, `check` raises when told to stop."""

    run: RunConfig
    name: str
    stage: StageBase
    inputs: Mapping[str, Artifact]
    out: Path
    checkpoints: Path
    manager: PluginManager
    task: Task[Any]
    runtime: ModelRuntime
    engines: EnginePool
    tracker: StageTracker
    mlflow_uri: str
    reporter: Reporter
    warn: Callable[[str], None]
    check: Callable[[], None]

    @property
    def model_dir(self) -> Path:
        """Directory of the model this stage reads."""
        return self.inputs["model"].path

    def build(self, contract: type[PluginT], component: Component) -> PluginT:
        """The plugin that a component of the config names."""
        return self.manager.build(contract, component.name, component.fields())

    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the model this stage reads."""
        return ChatTokenizer.load(self.model_dir, self.run.model.system_prompt)

    def started(self, total_steps: int) -> None:
        """Tell the person watching that the stage begins."""
        self.reporter.stage_started(self.name, self.stage.kind, total_steps)  # type: ignore[attr-defined]

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics, show them, and tell the listeners."""
        self.tracker.log_step(step, metrics)
        self.reporter.step_done(self.name, step, metrics)
        self.manager.hooks.hook.posttrain_on_step_end(
            stage=self.name, step=step, metrics=dict(metrics)
        )

    def training_problems(self, count: int) -> list[Problem]:
        """Training problems for this stage, disjoint from the held-out ones, recorded in MLflow."""
        made = self.inputs.get("dataset")
        if made is None:
            problems = training_problems(self.task, count, self.run.seed, self.name)
        else:
            pool = read_problems(made.path / PROBLEMS_FILE)
            problems = repeat_problems(pool, count, self.run.seed, self.name)
        check_disjoint(problems, self.held_out_problems(self.run.evaluation, record=False))
        self.record_dataset("train", problems)
        return problems

    def held_out_problems(
        self, section: EvaluationSection, *, record: bool = True
    ) -> list[Problem]:
        """The run's held-out problems."""
        problems = held_out_problems(self.task, section.num_problems, self.run.seed)
        if record:
            self.record_dataset("held_out", problems)
        return problems

    def record_dataset(self, split: str, problems: Sequence[Problem]) -> None:
        """Show the problems in MLflow, with their digest, where they come from and its digest."""
        made = self.inputs.get("dataset") if split == "train" else None
        self.tracker.log_dataset(
            name=f"{self.task.name}-{split}",
            context=split,
            digest=problems_digest(problems),
            num_rows=len(problems),
            source=self.task.source() if made is None else f"stage {made.stage}: {made.uri}",
            of=self.task.fingerprint() if made is None else made.digest,
        )

    def check_lengths(
        self, tokenizer: PromptEncoder, problems: Sequence[Problem], max_response_length: int
    ) -> None:
        """Raise `DataError` for a prompt that leaves no room for a response."""
        limit = self.run.model.max_model_len
        for problem in problems:
            length = len(tokenizer.encode_prompt(problem))
            if length + max_response_length > limit:
                raise DataError(
                    f"the prompt {problem.prompt[:60]!r}... has {length} tokens; with "
                    f"{max_response_length} for the response it exceeds model.max_model_len "
                    f"{limit}: raise it, shorten the response, or drop the prompt"
                )


def write_evaluation(folder: Path, evaluation: Evaluation, step: int | None = None) -> Path:
    """Write an evaluation's metrics and rows; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(evaluation.metrics, indent=2))
    with (folder / "rows.jsonl").open("w") as stream:
        for row in evaluation.rows:
            values = asdict(row) | {"sampled_accuracy": row.sampled_accuracy}
            stream.write(json.dumps(values) + "\n")
    return folder


def evaluation_table(evaluation: Evaluation, limit: int = 100) -> list[dict[str, object]]:
    """Rows for MLflow's table view."""
    return [
        {
            "prompt": row.problem.prompt,
            "answer": row.problem.answer,
            "response": row.greedy_text,
            "read": row.parsed,
            "correct": row.greedy_correct,
            "truncated": row.truncated,
            "sampled_accuracy": row.sampled_accuracy,
            "sampled_right": sum(verdict.correct >= 1 for verdict in row.sampled),
            "sampled": len(row.sampled),
        }
        for row in evaluation.rows[:limit]
    ]
