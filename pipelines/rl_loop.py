"""What each phase of an RL step does, and the state that lives from step to step.

Over 300 lines by a little: each phase is one short method, and who reads a step reads one page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import (
    AdvantageEstimator,
    KlController,
    KlEstimator,
    RolloutEngine,
)
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.evaluation import evaluate_policy
from posttrain.core.group_filter import drop_groups
from posttrain.core.reference_kl import kl_of_batch
from posttrain.core.resampling import resample
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.rollout.sync_check import SyncCheck
from posttrain.core.rollout.weight_sync import send_policy
from posttrain.core.runtime.device import peak_memory_gb
from posttrain.core.runtime.heap import StepHeap
from posttrain.core.runtime.seeding import generator
from posttrain.core.scorer import Scorer
from posttrain.core.scoring import advantage_metrics, subtract_kl
from posttrain.core.tracking.tables import sample_rows
from posttrain.core.tracking.traces import traced_responses
from posttrain.core.training.checkpoint import LoopState, save_checkpoint
from posttrain.core.training.learner import Learner
from posttrain.core.training.retention import is_due, step_folder, trim
from posttrain.core.training.step_record import StepTensors
from posttrain.core.training.step_tensors import rollout_tensors, weight_tensors
from posttrain.core.training.updates import UpdateResult
from posttrain.core.training.value_phase import ValuePhase
from posttrain.core.types import Problem
from posttrain.pipelines.alarms import step_alarms
from posttrain.pipelines.evidence import evidence_of
from posttrain.pipelines.rollouts import Rollout, Rollouts, rollouts_due
from posttrain.pipelines.stages.context import EVAL_IMPROVED, StageContext, evaluation_table
from posttrain.pipelines.tracked import tracked_rows

TRACES = 2
"""Responses of a step that become traces, of the steps that have any."""


@dataclass
class RlLoop:
    """One RL stage in progress; `pipelines/stages/rl.py` builds it, `pipelines/rl.py` drives it."""

    context: StageContext
    stage: RlStage
    learner: Learner
    engine: RolloutEngine[Any]
    tokenizer: ChatTokenizer
    rollouts: Rollouts
    scorer: Scorer
    estimator: AdvantageEstimator[Any]
    kl: KlEstimator[Any]
    controller: KlController[Any]
    held_out: Sequence[Problem]
    episodes: EpisodeRunner | None = None
    critic: ValuePhase | None = None
    sync_check: SyncCheck | None = None
    first_step: int = 1
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    _step_began: float = 0.0
    _trained_on: RolloutBatch | None = None
    _heap: StepHeap = field(default_factory=StepHeap)

    @property
    def max_staleness(self) -> int:
        """Steps whose rollouts are sampled ahead of their update."""
        return self.stage.max_staleness

    @property
    def evaluates_before_first_step(self) -> bool:
        """Whether the curve starts with the model as it came in."""
        return self.stage.evaluate_every > 0 and self.first_step == 1

    def remaining_steps(self) -> range:
        """Steps still to do, 1-based."""
        return range(self.first_step, self.stage.steps + 1)

    def evaluation_is_due(self, step: int) -> bool:
        """Every `evaluate_every` steps, and after the last, so that the curve has both ends."""
        every = self.stage.evaluate_every
        return every > 0 and (step % every == 0 or step == self.stage.steps)

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether the state after `step` is kept."""
        keep = self.context.run.keep
        return is_due(step, self.stage.steps, self.stage.checkpoint_every, keep)

    def rollouts_due(self, step: int) -> range:
        """Steps whose rollouts start when `step` does: its own, or those of steps ahead."""
        stage = self.stage
        return rollouts_due(step, self.first_step, stage.steps, stage.max_staleness)

    def begin_step(self, step: int) -> None:
        """Start the clock of a step."""
        self.context.check()
        self.metrics, self._trained_on = {}, None
        self._step_began = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Record everything that was measured in this step."""
        self.metrics |= step_alarms(
            self.context,
            self.stage,
            self.controller,
            step,
            self.metrics,
            self.history,
            self.evaluations,
        )
        self._record(step)
        phases = sum(v for k, v in self.metrics.items() if k.startswith("time/"))
        if self.stage.max_staleness:  # sampled beside an earlier update: this step only waited
            phases -= self.metrics["time/rollout_s"]
        seconds = time.perf_counter() - self._step_began
        self.metrics |= {
            "time/step_s": seconds,
            # What the orchestration costs beside the phases themselves.
            "time/overhead_ms": 1000 * (seconds - phases),
            "memory/peak_gb": peak_memory_gb(),
        }
        self.context.log_step(step, self.metrics)
        self.history.append({"step": float(step), **self.metrics})

    def _record(self, step: int) -> None:
        """Hand the step to whoever records it, or compares it with what was recorded."""
        sink = self.context.steps
        if sink is None or not sink.wants(step):
            return
        with self._timed("record_s"):
            critic = None if self.critic is None else self.critic.stored
            weights = weight_tensors(self.learner.stored, critic, step)
            sink.put(step, StepTensors(rollout_tensors(self._trained_on), weights), self.metrics)

    def rollout(self, step: int) -> Rollout:
        """Sample the groups of `step`; changes nothing of the step that trains meanwhile."""
        return self.rollouts.sample(step)

    @contextmanager
    def waiting_for_rollouts(self) -> Iterator[None]:
        """Count the time that a step stands still for rollouts sampled beside it."""
        before = self.metrics.get("time/rollout_wait_s", 0.0)
        with self._timed("rollout_wait_s"):
            yield
        self.metrics["time/rollout_wait_s"] += before

    def take(self, rollout: Rollout) -> bool:
        """Make `rollout` the one this step trains on; False when there is nothing to train on."""
        self.rollouts.take(rollout.step)
        self.metrics |= rollout.metrics | rollout.staleness()
        if rollout.batch is None:
            rollout.forget_products()
            self.metrics |= {"train/updates": 0.0, "train/skipped_empty": 1.0}
        return rollout.batch is not None

    def score_rewards(self, rollout: Rollout) -> Rollout:
        """Fill the reward columns."""
        self.context.check()
        batch = rollout.rows
        with self._timed("score_s"):
            scored, found = self.scorer.score(batch)
        self.metrics |= found
        return rollout.with_rows(scored)

    def compute_advantages(self, rollout: Rollout) -> Rollout:
        """Fill `advantages`; with KL in the reward, after it has been subtracted."""
        coef, batch = self.controller.coefficient(), rollout.rows
        with self._timed("advantage_s"):
            batch, dropped = drop_groups(batch, self.stage.drop_groups)
            batch = self._fill_columns(rollout.with_rows(batch), coef)
            batch.require(self.estimator.required_columns(), f"advantage '{self.estimator.name}'")
            estimate = self.estimator.estimate(batch)
            ready = batch.with_columns(advantages=estimate.advantages)
            if estimate.returns is not None:
                ready = ready.with_columns(returns=estimate.returns)
            if self.stage.resample is not None:
                section, seed = self.stage.resample, self.learner.settings.seed
                draw = generator(seed, "resample", rollout.step)
                ready = resample(ready, section.method, section.power, draw)
        self.metrics |= {**advantage_metrics(ready), **estimate.metrics, **dropped, "kl/coef": coef}
        return rollout.with_rows(ready)

    def _fill_columns(self, rollout: Rollout, kl_coef: float) -> RolloutBatch:
        """What the estimator reads beside rewards, and the KL penalty on the rewards."""
        batch, learner, check = rollout.rows, self.learner, self.context.check
        needed = self.estimator.required_columns()
        in_reward = self.stage.kl.place == "reward" and kl_coef > 0
        if in_reward or needed & {"old_logprobs", "is_weight", "ref_logprobs"}:
            batch = learner.with_old_logprobs(batch, check, rollout.products)
        if in_reward:
            batch = batch.with_columns(ref_logprobs=learner.reference_logprobs(batch, check))
            self.metrics |= kl_of_batch(batch, self.kl)
            batch = subtract_kl(batch, self.kl, kl_coef)
        if "is_weight" in needed:
            batch, found = learner.objective.correct(batch)
            self.metrics |= found
        if "sum_pi_squared" in needed:
            batch = batch.with_columns(sum_pi_squared=learner.sum_pi_squared(batch, check))
        if "agent_id" in needed:  # one policy speaks in every row
            batch = batch.with_columns(agent_id=torch.zeros(len(batch), dtype=torch.int64))
        if "baseline_reward" in needed:
            limit = self.stage.generation.max_response_length
            with self.rollouts.using_engine():
                greedy = self.scorer.greedy(self.engine, batch, limit, self.episodes)
            batch = batch.with_columns(baseline_reward=greedy)
        if self.critic is not None:
            batch = self.critic.with_values(batch, check)
        return batch

    def update_policy(self, rollout: Rollout) -> None:
        """Take the optimizer steps, and record the samples they were made of."""
        self.context.check()
        batch, step = rollout.rows, rollout.step
        self._trained_on = batch
        self._show_samples(batch, step)
        in_loss = self.stage.kl.place == "loss"
        coef, result = self.controller.coefficient() if in_loss else 0.0, None
        with self._timed("update_s"):
            if self.critic is not None:
                self.metrics |= self.critic.update(batch, step, self.context.check)
            if self.critic is None or not self.critic.pretraining:
                result = self._update_policy(rollout, coef)
            else:
                self.metrics |= self.learner.mismatch(batch, self.context.check)
            rollout.forget_products()
            self._heap.step_done()
        if result is not None:
            self._keep_evidence(batch, step, coef, result)
        trained = float(batch.mask.sum()) * self.learner.settings.epochs
        self.metrics["throughput/update_tokens_per_s"] = trained / self.metrics["time/update_s"]

    def _show_samples(self, batch: RolloutBatch, step: int) -> None:
        tracker, every = self.context.tracker, self.context.run.keep.traces_every
        tracker.log_table("samples", step, sample_rows(batch, self.scorer.names))
        if every and (step == 1 or step % every == 0):
            tracker.log_traces(traced_responses(batch, step, self.scorer.names, TRACES))

    def _update_policy(self, rollout: Rollout, kl_coef: float) -> UpdateResult:
        """The learner's part of an update with `kl_coef` in its loss, and what is told of it."""
        kl, batch, step = self.stage.kl, rollout.rows, rollout.step
        result = self.learner.update(batch, step, kl_coef, self.context.check, rollout.products)
        found = result.metrics
        if kl.place == "loss" and "kl/ref_k1" in found:
            per_token = found["kl/ref_k1"]
            self.metrics["kl/ref_sequence"] = per_token * self.metrics["resp_len/mean"]
            self.metrics["kl/ref_token"] = per_token
        self.metrics |= found
        if "kl/ref_sequence" in self.metrics:
            self.controller.update(
                self.metrics["kl/ref_token"], self.metrics["kl/ref_sequence"], len(batch)
            )
        if kl.refresh_every and step % kl.refresh_every == 0:
            self.learner.refresh_reference()
        return result

    def _keep_evidence(
        self, batch: RolloutBatch, step: int, kl_coef: float, result: UpdateResult
    ) -> None:
        """Hand what the update read to whoever keeps it for people."""
        keeper, names = self.context.evidence, tuple(self.scorer.names)
        if keeper is not None:
            keeper.put(evidence_of(batch, step, kl_coef, result, names, self.tokenizer))

    def sync_weights(self, step: int) -> None:
        """Give the engine the policy of version `step`."""
        with self._timed("sync_s"):
            send_policy(self.engine, self.learner.model, policy_version=step)
        self.check_sync(f"the sync of step {step}")

    def check_sync(self, event: str) -> None:
        """Stop the run unless the engine has the learner's weights."""
        if self.sync_check is not None and self.sync_check.is_due():
            with self._timed("sync_check_s"):
                self.metrics |= self.sync_check.after(event)

    def evaluate(self, step: int) -> None:
        """Greedy held-out accuracy of the policy after `step` steps; the cheap part of it."""
        greedy_only = self.context.run.evaluation.model_copy(update={"num_samples": 0})
        with self._timed("evaluate_s"):
            result = evaluate_policy(
                self.engine,
                self.tokenizer,
                self.context.task,
                self.held_out,
                greedy_only,
                self.context.run.seed,
                lambda done: self.context.check(),
                self.episodes,
            )
        found = {k: v for k, v in result.metrics.items() if k.startswith("eval/")}
        best = max((row["eval/greedy_accuracy"] for row in self.evaluations), default=math.inf)
        if found["eval/greedy_accuracy"] > best:
            self.context.announce(EVAL_IMPROVED, {"step": step, "before": best, **found})
        self.evaluations.append({"step": float(step), **found})
        self.context.tracker.log_table("held_out", step, evaluation_table(result, limit=50))
        followed = tracked_rows(self.context.checkpoints, step, result.rows)
        self.context.tracker.log_table("held_out_over_time", None, followed)
        if step == 0:
            self.context.log_step(0, found)
            self.history.append({"step": 0.0, **found})
        else:
            self.metrics |= found

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint, then drop older ones."""
        folder = step_folder(self.context.checkpoints, step)
        terms = self.learner.objective.terms
        state = LoopState(
            step,
            self.controller.state(),
            self.history,
            estimator=self.estimator.state(),
            losses={term.loss.name: term.loss.state() for term in terms},
            critic={} if self.critic is None else self.critic.state(),
            sampler=self.rollouts.sampler.state(),
            prompts=self.rollouts.prompts.position,
            rollouts=self.rollouts.state(),
            rewards=self.scorer.shaping.state(),
        )
        critic = None if self.critic is None else self.critic.stored
        refreshed = self.learner.reference if self.stage.kl.refresh_every else None
        save_checkpoint(folder, self.learner.stored, state, critic=critic, reference=refreshed)
        trim(folder.parent, self.context.run.keep)
        self.context.saved_checkpoint(step, folder)

    def resume(self, folder: Path, state: LoopState) -> None:
        """Stand where the checkpoint in `folder` stood."""
        self.controller.load_state(state.controller)
        self.estimator.load_state(state.estimator)
        for term in self.learner.objective.terms:
            term.loss.load_state(state.losses.get(term.loss.name, {}))
        if self.critic is not None:
            self.critic.load_state(state.critic)
        self.rollouts.sampler.load_state(state.sampler)
        self.rollouts.prompts.position = state.prompts
        self.rollouts.load_state(state.rollouts)
        self.scorer.shaping.load_state(state.rewards)
        self.first_step = state.step + 1
        self.history = list(state.history)
        self.evaluations = [row for row in self.history if "eval/greedy_accuracy" in row]
        self.sync_weights(state.step)
        self.context.reporter.say(
            f"{self.context.name}: continues after step {state.step} ({folder})"
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.metrics[f"time/{name}"] = time.perf_counter() - began
