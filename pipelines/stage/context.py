"""What a stage is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from posttrain.core.analysis.evidence import EvidenceKeeper
from posttrain.core.cluster.group import RankLost
from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import PromptGroup, RolloutEngine
from posttrain.core.data.lengths import LengthRule, fitting_prompts
from posttrain.core.data.problem_sets import held_out_problems, problems_digest, read_problems
from posttrain.core.data.problems import problem_to_json
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.evaluation.accuracy import Evaluation
from posttrain.core.rollout.prompts import PromptEncoder
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.approval import Answer
from posttrain.core.tracking.sink import StageSink
from posttrain.core.training.checkpoint import Checkpoints
from posttrain.core.training.step_record import StepRecorder, StepSink, problem_rows
from posttrain.core.types import Problem, Split
from posttrain.pipelines.stage.engines import EnginePool
from posttrain.pipelines.stage.inputs import PROBLEMS_FILE, StageInputs, load_tokenizer

CHECKPOINT_SAVED = "posttrain.checkpoint.saved"
EVAL_IMPROVED = "posttrain.eval.improved"


def _to_nobody(event: str, payload: Mapping[str, Any]) -> None:
    """Where no run is informed of what happens, as in a replay."""


def _nowhere(checkpoint: Path) -> None:
    """Where checkpoints stay on this machine."""


def _unseen(step: int, result: Evaluation) -> None:
    """Where nobody looks at evaluations while a stage trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext(StageInputs):
    """Everything a stage may use. `out` is its private folder.

    `push` gives a checkpoint to other machines, where there is a way. `evaluated` is called with
    each evaluation on held-out problems while the stage trains.

    `resume_from` is the checkpoint in `checkpoints` that it goes on from, whose files are whole;
    `steps` is given each optimizer step, if somebody wants to have it, `evidence` what each step of
    reinforcement learning was made of; `reported` are metrics that a warning named. `answer` is
    what a gate was answered, `rows` the new rows of a stage that is about them, `run_id` the id by
    which commands know the run.
    """

    out: Path
    checkpoints: Path
    resume_from: Path | None
    steps: StepSink | None
    engines: EnginePool
    tracker: StageSink
    mlflow_uri: str
    reporter: Reporter
    warn: Callable[[str], None]
    announce: Callable[[str, Mapping[str, Any]], None] = _to_nobody  # Any: JSON, an event's own
    answer: Answer | None = None
    rows: Sequence[Problem] = ()
    run_id: str = ""
    evidence: EvidenceKeeper | None = None
    push: Callable[[Path], None] = _nowhere
    evaluated: Callable[[int, Evaluation], None] = _unseen
    reported: set[str] = field(default_factory=set)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.run.seed

    @property
    def device(self) -> torch.device:
        """Where models go."""
        return self.runtime.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights."""
        return self.runtime.dtype

    def started(self, total_steps: int) -> None:
        """Tell the person watching that the stage has read its inputs and goes to work."""
        self.reporter.stage_started(self.name, self.stage.kind, total_steps)

    def progress(self, step: int) -> None:
        """Show how many steps are done."""
        self.reporter.step_done(self.name, step, {})

    def say(self, text: str) -> None:
        """Show a line, with the stage's name."""
        self.reporter.say(f"{self.name}: {text}")

    def log_table(self, name: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """As of the tracker."""
        self.tracker.log_table(name, step, rows)

    def log_summary(self, metrics: Mapping[str, float]) -> None:
        """As of the tracker."""
        self.tracker.log_summary(metrics)

    def log_file(self, path: Path, folder: str = "") -> None:
        """As of the tracker."""
        self.tracker.log_file(path, folder)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """As of the tracker."""
        self.tracker.set_tags(tags)

    def problems(self, split: Split, count: int) -> list[Problem]:
        """Problems of the task, recorded in MLflow."""
        if split == "train":
            return self.training_problems(count)
        problems = held_out_problems(self.task, count, self.run.seed)
        self.record_dataset("held_out", problems)
        return problems

    def read_problems(self, role: str = "dataset") -> list[Problem]:
        """The problems in an input of kind `dataset`."""
        return read_problems(self.inputs[role].path / PROBLEMS_FILE)

    def write_problems(self, problems: Sequence[Problem]) -> Path:
        """Write problems below `out` as a `dataset`; its folder. Raises `DataError` for none."""
        if not problems:
            raise DataError(f"stage '{self.name}' kept no problem, so there is nothing to learn")
        folder = self.out / "dataset"
        folder.mkdir(parents=True)
        with (folder / PROBLEMS_FILE).open("w", encoding="utf-8") as stream:
            for problem in problems:
                stream.write(json.dumps(problem_to_json(problem)) + "\n")
        return folder

    def tokenizer_of(self, role: str = "model") -> ChatTokenizer:
        """The tokenizer of an input model."""
        return load_tokenizer(self.inputs[role].path, self.run, self.manager)

    def engine(self, role: str = "model") -> AbstractContextManager[RolloutEngine[Any]]:
        """The run's rollout engine with the weights of an input model."""
        return self.engines.lease(self.inputs[role].path)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics, show them, and tell the listeners."""
        self._tell_left_out(step, self.tracker.log_step(step, metrics))
        self.reporter.step_done(self.name, step, metrics)
        self.manager.hooks.hook.posttrain_on_step_end(
            stage=self.name, step=step, metrics=dict(metrics)
        )

    def _tell_left_out(self, step: int, names: Sequence[str]) -> None:
        """Warn, once for each name, of metrics that a step has too many of to be recorded."""
        fresh = sorted(set(names) - self.reported)
        if fresh:
            self.reported.update(fresh)
            self.warn(
                f"{self.name}: step {step} has {len(names)} metrics more than the 100 that are "
                f"recorded; MLflow does not get {', '.join(fresh)}"
            )

    def keeper(self, total: int, checkpoint_every: int) -> Checkpoints:
        """When the stage, of `total` steps, writes checkpoints; its clock starts now."""
        keep = self.run.keep
        return Checkpoints(
            *(self.checkpoints, total, checkpoint_every, keep, self.warn),
            asked=lambda: bool(self._leaving()),
        )

    def _leaving(self) -> list[str]:
        """Nodes with ranks of this run that were asked to leave the cluster."""
        if self.run.cluster is None:
            return []
        from posttrain.core.cluster.on_ray.watch import leaving  # Ray is an extra

        return leaving()

    def saved_checkpoint(self, step: int, folder: Path | None) -> None:
        """Tell automations that the stage can go on from here; None = it was not written.

        Raises `RankLost` where nodes that have ranks were asked to leave: they are not waited for.
        """
        if folder is None:
            return
        self.push(folder)
        self.announce(CHECKPOINT_SAVED, {"step": step, "folder": str(folder)})
        if leaving := self._leaving():
            raise RankLost(
                f"{'nodes' if len(leaving) > 1 else 'a node'} of the learner's ranks were asked to "
                f"leave the cluster ({', '.join(leaving)}); a checkpoint was written after step "
                f"{step}"
            )

    def training_problems(self, count: int) -> list[Problem]:
        """As of `StageInputs`, recorded in MLflow."""
        problems = StageInputs.training_problems(self, count)
        self.record_dataset("train", problems)
        return problems

    def held_out_problems(self, section: EvaluationSection) -> list[Problem]:
        """The run's held-out problems, recorded in MLflow."""
        problems = self.held_out(section)
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
        if split == "train" and made is None and self.task.fingerprint():
            self.record_rows(problem_rows(problems))

    def record_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Record (place, sha256) of data rows that the stage trains on, if its steps are."""
        if isinstance(self.steps, StepRecorder):
            self.steps.rows(rows)

    def encode_prompts(
        self,
        encoder: PromptEncoder,
        problems: Sequence[Problem],
        max_response_length: int,
        group: Literal["data", "eval", "prompts"],
    ) -> list[PromptGroup]:
        """Each problem's prompt, cut or left out where it leaves no room for a response.

        How many were is in the metrics of `group`.
        """
        what = "held-out prompts" if group == "eval" else "prompts"
        rule = LengthRule.of(self.run.model, f"{what} with their response")
        prompts = [(problem, encoder.encode_prompt(problem)) for problem in problems]
        fitting = fitting_prompts(prompts, max_response_length, rule)
        self.report_lengths(rule, group)
        return [PromptGroup(problem, ids) for problem, ids in fitting]

    def report_lengths(self, rule: LengthRule, group: str = "data") -> None:
        """As of `StageInputs`, counted in metrics."""
        if warning := rule.check():
            self.warn(f"{self.name}: {warning}")
        self.tracker.log_step(0, rule.metrics(group))  # a stage that goes on has it already


def write_evaluation(folder: Path, evaluation: Evaluation) -> Path:
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
