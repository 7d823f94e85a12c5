"""What is recorded of an RL stage: timings, metrics, alarms, tables, traces, evidence, history."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from posttrain.core.analysis.alarm_samples import StepSamples
from posttrain.core.analysis.alarms import Raised, Seen, judge, look_at, raised_in, with_samples
from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import KlController
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError
from posttrain.core.evaluation.accuracy import EvaluatedProblem, Evaluation
from posttrain.core.evaluation.sampled import SampledEvaluation
from posttrain.core.models.device import peak_memory_gb
from posttrain.core.runtime.files import WrongContent, read_json, write_text
from posttrain.core.tracking.metric_names import ALARM
from posttrain.core.tracking.mlflow_run import traced_responses
from posttrain.core.tracking.tables import sample_rows
from posttrain.core.training.critic import ValuePhase
from posttrain.core.training.finite import FiniteGuard
from posttrain.core.training.implicit_prm import ProcessRewards
from posttrain.core.training.step_record import (
    CRITIC,
    POLICY,
    PRM,
    StepTensors,
    rollout_tensors,
    weight_tensors,
)
from posttrain.core.training.updates import PolicyLearner, UpdateResult
from posttrain.pipelines.rl.rollouts import Rollout
from posttrain.pipelines.stage.context import EVAL_IMPROVED, StageContext, evaluation_table

Metrics = dict[str, float]
P = ParamSpec("P")
T = TypeVar("T")

TIMERS = {
    "score_rewards": "time/score_s",
    "compute_advantages": "time/advantage_s",
    "update_policy": "time/update_s",
    "sync_weights": "time/sync_s",
    "evaluate": "time/evaluate_s",
    "evaluate_sampled": "time/evaluate_sampled_s",
}
"""The metric of each phase that is timed."""
TRACES = 2
"""Responses of a step that become traces, of the steps that have any."""
TRACKED_FILE = "tracked.json"
"""Among the checkpoints of the stage, so that a stage that continues shows earlier answers too."""
TRACKED_PROMPTS, TRACKED_LENGTH = 12, 2000
"""How many prompts are followed over a stage, and characters of an answer that are shown."""
ALARM_RAISED = "posttrain.alarm.raised"
TAG = "posttrain.alarm."


@dataclass(frozen=True, slots=True)
class Update:
    """What an update was made of: the rollout, its batch with every column that the loss read.

    `kl_coef` is that of the KL term in the loss, 0 where there is none. `result` is None where
    only the critic was trained.
    """

    rollout: Rollout
    batch: RolloutBatch
    kl_coef: float = 0.0
    result: UpdateResult | None = None


@dataclass
class Recorder:
    """Records one RL stage, step by step, and keeps its history.

    `metrics` are those of the present step. Only this class and the report at the end read them.
    """

    context: StageContext
    stage: RlStage
    tokenizer: ChatTokenizer
    learner: PolicyLearner
    critic: ValuePhase | None
    controller: KlController[Any]
    reward_names: Sequence[str]
    prm: ProcessRewards | None = None
    history: list[Metrics] = field(default_factory=list)
    evaluations: list[Metrics] = field(default_factory=list)
    sampled: list[Metrics] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    _step_began: float = 0.0
    _at_k: Metrics = field(default_factory=dict)
    _raised: dict[str, str] = field(default_factory=dict)
    _trained_on: RolloutBatch | None = None
    _samples: StepSamples = field(default_factory=lambda: StepSamples(0))

    def continue_from(self, history: Sequence[Metrics]) -> None:
        """Have the history of the steps before a checkpoint."""
        self.history = list(history)
        self.evaluations = [row for row in self.history if "eval/greedy_accuracy" in row]
        self.sampled = [row for row in self.history if "eval/sampled_problems" in row]

    def begin_step(self, step: int) -> None:
        """Start the clock of a step."""
        self.context.check()
        self.metrics, self._at_k, self._trained_on = {}, {}, None
        self._samples = StepSamples(step)
        self._step_began = time.perf_counter()

    def run(self, phase: Callable[P, tuple[T, Metrics]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a phase of the step; time it, record its metrics, return what it made."""
        began = time.perf_counter()
        made, metrics = phase(*args, **kwargs)
        timer = TIMERS.get(phase.__name__)
        if timer is not None:
            self.metrics[timer] = time.perf_counter() - began
        self.metrics |= metrics
        return made

    @contextmanager
    def waiting_for_rollouts(self) -> Iterator[None]:
        """Count the time that a step stands still for rollouts sampled during an update."""
        began = time.perf_counter()
        yield
        before = self.metrics.get("time/rollout_wait_s", 0.0)
        self.metrics["time/rollout_wait_s"] = before + time.perf_counter() - began

    def updated(self, update: Update) -> None:
        """Record the samples of an update and, for `inspect` and `compare`, all that it read.

        Raises `RunError` where numbers that are not finite end the stage.
        """
        self._require_finite(update)
        rollout, tracker, every = update.rollout, self.context.tracker, self._traces_every
        batch, step = rollout.rows, rollout.step
        self._trained_on = batch
        trained = float(batch.mask.sum()) * self.learner.settings.epochs
        self.metrics["throughput/update_tokens_per_s"] = trained / self.metrics["time/update_s"]
        rows = sample_rows(batch, self.reward_names)
        tracker.log_table("samples", step, rows)
        self._samples = _step_samples(step, rows, update)
        if every and (step == 1 or step % every == 0):
            tracker.log_traces(traced_responses(batch, step, self.reward_names, TRACES))
        if self.context.evidence is not None and update.result is not None:
            self.context.evidence.put(self._evidence(update, update.result))

    def _require_finite(self, update: Update) -> None:
        """End the stage, with the step's metrics recorded, if the update was not of numbers."""
        step, warn, name = update.rollout.step, self.context.warn, self.context.name
        keys = [problem.key for problem in update.batch.problems]
        judged = [(FiniteGuard(name, self.stage.optimizer, warn), self.learner.stored)]
        if self.critic is not None and self.stage.critic is not None:
            section, place = self.stage.critic.optimizer, "critic.optimizer"
            guard = FiniteGuard(name, section, warn, place, "value/non_finite")
            judged.append((guard, self.critic.stored))
        if self.prm is not None and self.stage.implicit_prm is not None:
            section, place = self.stage.implicit_prm.optimizer, "implicit_prm.optimizer"
            guard = FiniteGuard(name, section, warn, place, "prm/non_finite")
            judged.append((guard, self.prm.stored))
        for guard, stored in judged:
            if guard.metric in self.metrics:
                failure = guard.judge(step, stored.take_non_finite(), self.history, keys)
                if failure is not None:
                    self.context.log_step(step, self.metrics)
                    raise failure

    @property
    def _traces_every(self) -> int:
        return self.context.run.keep.traces_every

    def _evidence(self, update: Update, result: UpdateResult) -> StepEvidence:
        """What the update read of its batch, and the text of each token id of the responses."""
        ids = torch.unique(update.batch.response_ids).tolist()
        return StepEvidence(
            step=update.rollout.step,
            batch=update.batch.with_columns(old_logprobs=result.old_logprobs),
            seen_logprobs=result.seen.logprobs,
            seen_entropy=result.seen.entropy,
            seen_by=result.seen_by,
            seen_divergence=result.seen.divergence,
            seen_slope=result.seen.slope,
            seen_gap=result.seen.gap,
            kl_coef=update.kl_coef,
            component_names=tuple(self.reward_names),
            token_texts={token: self.tokenizer.token_text(token) for token in ids},
        )

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Record held-out accuracy after `step` steps; 0 is the model as it came in."""
        found = {k: v for k, v in result.metrics.items() if k.startswith("eval/")}
        best = max((row["eval/greedy_accuracy"] for row in self.evaluations), default=math.inf)
        if found["eval/greedy_accuracy"] > best:
            self.context.announce(EVAL_IMPROVED, {"step": step, "before": best, **found})
        self.evaluations.append({"step": float(step), **found})
        self.context.evaluated(step, result)
        self.context.tracker.log_table("held_out", step, evaluation_table(result, limit=50))
        followed = tracked_rows(self.context.checkpoints, step, result.rows)
        self.context.tracker.log_table("held_out_over_time", None, followed)
        if step == 0:
            self.context.log_step(0, found)
            self.history.append({"step": 0.0, **found})

    def evaluated_sampled(self, step: int, result: SampledEvaluation) -> None:
        """Record avg@k and pass@k after `step` steps, and the answers.

        Apart from the step's own metrics: they are many, and a step has a limit.
        """
        self._at_k = result.metrics
        self.sampled.append({"step": float(step), **self._at_k})
        self.context.tracker.log_step(step, self._at_k)
        self.context.tracker.log_table("held_out_sampled", step, result.table())
        if step > 0:
            return
        if self.history:  # from the greedy evaluation
            self.history[0] |= self._at_k
        else:
            self.history.append({"step": 0.0, **self._at_k})

    def end_step(self, step: int) -> None:
        """Record everything that was measured in this step."""
        self.metrics |= self._alarms(step)
        self._record_tensors(step)
        phases = sum(v for k, v in self.metrics.items() if k.startswith("time/"))
        if self.stage.steps_ahead:  # sampled during an earlier update: this step only waited
            phases -= self.metrics["time/rollout_s"]
        seconds = time.perf_counter() - self._step_began
        self.metrics |= {
            "time/step_s": seconds,
            # What the orchestration costs in addition to the phases.
            "time/overhead_ms": 1000 * (seconds - phases),
            "memory/peak_gb": peak_memory_gb(),
        }
        self.context.log_step(step, self.metrics)
        self.metrics |= self._at_k
        self.history.append({"step": float(step), **self.metrics})

    def _record_tensors(self, step: int) -> None:
        """Give the step's tensors to whoever records them, or compares them with a record."""
        sink = self.context.steps
        if sink is None or not sink.wants(step):
            return
        began = time.perf_counter()
        trained = {POLICY: self.learner.stored}
        if self.critic is not None:
            trained[CRITIC] = self.critic.stored
        if self.prm is not None:
            trained[PRM] = self.prm.stored
        weights = weight_tensors(trained, step)
        sink.put(step, StepTensors(rollout_tensors(self._trained_on), weights), self.metrics)
        self.metrics["time/record_s"] = time.perf_counter() - began

    def _alarms(self, step: int) -> Metrics:
        """`alarm/NAME` 1 of each alarm that goes off.

        Silent alarms have no metric: a dozen zeros would take the place of others. An alarm is
        raised at the first step of the stage at which it goes off, also before an interruption.
        """
        seen = Seen(
            {**self.metrics, "step": float(step)},
            self.history,
            self.evaluations,
            self.sampled,
            self._kl_target,
            self.stage.mismatch_alarm,
        )
        alarms = judge(seen, self.context.run.alarms)
        texts = {name: text for name, text in alarms.items() if text}
        for name, text in texts.items():
            if not any(row.get(ALARM + name) for row in self.history):
                shown = look_at(name, self._samples, self._microscope(step))
                self._raised[name] = f"{text}. Look at {shown}"
                raise_alarm(self.context, name, step, self._raised[name])
        return {ALARM + name: 1.0 for name in texts}

    @property
    def _kl_target(self) -> tuple[str, float] | None:
        target = self.controller.target()
        return None if target is None else (f"kl/ref_{target[0]}", target[1])

    def _microscope(self, step: int) -> str:
        """The command that shows the step token by token, if steps are kept for it."""
        if self.context.evidence is None:
            return ""
        run = self.context.run_id[:12] or "RUN"
        return f"posttrain inspect {run} --stage {self.context.name} --step {step}"

    def raised(self) -> list[Raised]:
        """All alarms of the stage so far, those before an interruption too."""
        limits, history = self.context.run.alarms, self.history
        found = raised_in(history, limits, self._kl_target, self.stage.mismatch_alarm)
        again = [with_samples(alarm, self._microscope(alarm.steps[0])) for alarm in found]
        return [replace(a, text=self._raised.get(a.name, a.text)) for a in again]


def raise_alarm(context: StageContext, name: str, step: int, text: str) -> None:
    """Report an alarm that goes off for the first time.

    A warning now and in the run's summary, a tag on the stage's MLflow run, an event in Prefect.
    """
    context.warn(f"{context.name}: alarm {name}: step {step}: {text}")
    context.tracker.set_tags({TAG + name: f"step {step}: {text}"})
    context.announce(
        ALARM_RAISED, {"stage": context.name, "alarm": name, "step": step, "text": text}
    )


def _step_samples(step: int, rows: Sequence[dict[str, object]], update: Update) -> StepSamples:
    """The rows of a step's table, with length and mean entropy of each."""
    mask = update.batch.response_mask[: len(rows)].bool()
    entropies: list[float] = []
    if update.result is not None:
        seen = update.result.seen.entropy[: len(rows)].to(mask.device)
        entropies = torch.where(mask, seen, torch.nan).nanmean(dim=1).tolist()
    return StepSamples(step, rows, mask.sum(dim=1).tolist(), entropies)


def tracked_rows(
    folder: Path, step: int, evaluated: Sequence[EvaluatedProblem]
) -> list[dict[str, object]]:
    """A row per prompt: prompt, answer, and the response at each step evaluated so far.

    A right response begins with "✓", another with "✗". Evaluations at this step or later, from
    before an interruption, are dropped. Raises `ResourceError` where the file cannot be kept.
    """
    path, shown = folder / TRACKED_FILE, evaluated[:TRACKED_PROMPTS]
    known: dict[str, list[str]] = {}
    if path.is_file():
        with contextlib.suppress(WrongContent):  # people look at it, nothing is computed from it
            known = read_json(path, dict[str, list[str]])
    answers = {
        at: texts
        for at, texts in known.items()
        if at.isdecimal() and int(at) < step and len(texts) == len(shown)
    }
    answers[str(step)] = [
        f"{'✓' if row.greedy_correct >= 1 else '✗'} {row.greedy_text[:TRACKED_LENGTH]}"
        for row in shown
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(answers, ensure_ascii=False))
    except OSError as error:
        raise ResourceError(f"the answers to held-out prompts cannot be kept: {error}") from error
    rows: list[dict[str, object]] = []
    for index, row in enumerate(shown):
        over_time = {f"step {at}": texts[index] for at, texts in answers.items()}
        rows.append({"prompt": row.problem.prompt, "answer": row.problem.answer, **over_time})
    return rows
