"""What each phase of an RL step does, and the parts of a stage that live from step to step.

A phase takes a rollout, whose batch grows by some columns, and returns what it made with its
metrics. It keeps nothing else: `recording.py` records, `rollouts.py` owns what was sampled ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import (
    AdvantageEstimator,
    AdvantageTransform,
    KlController,
    KlEstimator,
    PromptGroup,
    RolloutEngine,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.evaluation.accuracy import Evaluation, evaluate_policy
from posttrain.core.evaluation.sampled import SampledEvaluation, sample_policy
from posttrain.core.rewards.scoring import Scorer, advantage_metrics
from posttrain.core.rewards.shaping import kl_of_batch, subtract_kl
from posttrain.core.rollout.weight_sync import send_policy
from posttrain.core.runtime.heap import StepHeap
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.training.checkpoint import (
    CRITIC,
    PRM,
    REFERENCE,
    Checkpoints,
    LoopState,
    load_checkpoint,
    optimizers_in,
    save_checkpoint,
    step_of,
)
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.critic import ValuePhase
from posttrain.core.training.groups import drop_groups, resample
from posttrain.core.training.implicit_prm import ProcessRewards
from posttrain.core.training.optim import StoredOptimizer
from posttrain.core.training.sync_check import SyncCheck
from posttrain.core.training.teachers import transformed
from posttrain.core.training.updates import PolicyLearner, UpdateResult
from posttrain.pipelines.rl.recording import Metrics, Recorder, Update
from posttrain.pipelines.rl.rollouts import Rollout, Rollouts, rollouts_due
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import Episodes


class Stateful(Protocol):
    """A part of a stage that keeps something from step to step."""

    def state(self) -> Mapping[str, Any]:  # Any: JSON
        """What a checkpoint must keep."""

    def load_state(self, state: Any) -> None:  # Any: what `state` gave
        """Continue from `state`."""


def load_parts(parts: Mapping[str, Stateful], state: LoopState, *, forked: bool) -> None:
    """Let each part go on from a checkpoint; at a fork, one that is new begins as it is."""
    for name, part in parts.items():
        if name in state.parts or not forked:
            part.load_state(state.parts[name])


@dataclass
class RlLoop:
    """One RL stage in progress; `pipelines/stages/rl.py` builds it, `flow.py` drives it."""

    context: StageContext
    stage: RlStage
    learner: PolicyLearner
    columns: ColumnFiller
    engine: RolloutEngine[Any]
    tokenizer: ChatTokenizer
    rollouts: Rollouts
    scorer: Scorer
    estimator: AdvantageEstimator[Any]
    transforms: Sequence[AdvantageTransform[Any]]
    kl: KlEstimator[Any]
    controller: KlController[Any]
    held_out: Sequence[PromptGroup]
    recorder: Recorder
    checkpoints: Checkpoints
    episodes: Episodes | None = None
    critic: ValuePhase | None = None
    prm: ProcessRewards | None = None
    sync_check: SyncCheck | None = None
    first_step: int = 1
    _heap: StepHeap = field(default_factory=StepHeap)

    # -- which steps there are, and what is due in them ---------------------------------------

    @property
    def steps_ahead(self) -> int:
        """Steps whose rollouts are sampled ahead of their update."""
        return self.stage.steps_ahead

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

    def sampled_evaluation_is_due(self, step: int) -> bool:
        """The same of sampled answers; step 0 is before the first step."""
        section = self.stage.sampled_evaluation
        return section is not None and (step % section.every == 0 or step == self.stage.steps)

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether the state after `step` is kept."""
        return self.checkpoints.is_due(step)

    def rollouts_due(self, step: int) -> range:
        """Steps whose rollouts start when `step` does: its own, or those of steps ahead."""
        stage = self.stage
        return rollouts_due(step, self.first_step, stage.steps, stage.steps_ahead)

    # -- the phases of a step -----------------------------------------------------------------

    def take(self, rollout: Rollout) -> tuple[bool, Metrics]:
        """Start training on `rollout`; False when it has nothing to train on."""
        self.rollouts.take(rollout.step)
        metrics = rollout.metrics | rollout.staleness()
        if rollout.batch is None:
            rollout.forget_products()
            metrics |= {"train/updates": 0.0, "train/skipped_empty": 1.0}
        return rollout.batch is not None, metrics

    def score_rewards(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Fill the reward columns."""
        self.context.check()
        scored, metrics = self.scorer.score(rollout.rows)
        if rollout.given:  # rewards and lengths of the policy's answers would jump
            metrics = {"tokens/given": float(scored.response_mask.sum())}
        return rollout.with_rows(scored), metrics

    def compute_advantages(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Fill `advantages`; with KL in the reward, after it has been subtracted."""
        kl_coef, needed = self.controller.coefficient(), set(self.estimator.required_columns())
        needed |= {name for each in self.transforms for name in each.required_columns()}
        in_reward = self.stage.kl.place == "reward" and kl_coef > 0
        if self.prm is not None:
            needed.add("ref_logprobs")
        if in_reward:
            needed |= {"old_logprobs", "ref_logprobs"}
        batch, metrics = drop_groups(rollout.rows, self.stage.drop_groups)
        batch, found = self.columns.fill(batch, needed, rollout.products)
        metrics |= found
        if in_reward:
            metrics |= (kl := kl_of_batch(batch, self.kl))
            rollout = replace(rollout, reference_kl=(kl["kl/ref_token"], kl["kl/ref_sequence"]))
            batch = subtract_kl(batch, self.kl, kl_coef)
        batch = self._fill_for_estimator(batch, needed)
        batch.require(self.estimator.required_columns(), f"advantage '{self.estimator.name}'")
        estimate = transformed(self.estimator.estimate(batch), self.transforms, batch)
        ready = batch.with_columns(advantages=estimate.advantages)
        if estimate.returns is not None:
            ready = ready.with_columns(returns=estimate.returns)
        if self.stage.resample is not None:
            section, seed = self.stage.resample, self.learner.settings.seed
            draw = generator(seed, "resample", rollout.step)
            ready = resample(ready, section.method, section.power, draw)
        metrics |= {**advantage_metrics(ready), **estimate.metrics, "kl/coef": kl_coef}
        return rollout.with_rows(ready), metrics

    def _fill_for_estimator(self, batch: RolloutBatch, needed: set[str]) -> RolloutBatch:
        """The columns that neither rewards nor the policy's log-probs give."""
        if "agent_id" in needed:  # one policy writes every row
            batch = batch.with_columns(agent_id=torch.zeros(len(batch), dtype=torch.int64))
        if "baseline_reward" in needed:
            limit = self.stage.generation.max_response_length
            with self.rollouts.using_engine():
                greedy = self.scorer.greedy(self.engine, batch, limit, self.episodes)
            batch = batch.with_columns(baseline_reward=greedy)
        if self.critic is not None:
            batch = self.critic.with_values(batch)
        if self.prm is not None:
            batch = batch.with_columns(process_rewards=self.prm.rewards(batch))
        return batch

    def update_policy(self, rollout: Rollout) -> tuple[Update, Metrics]:
        """Take the optimizer steps of the critic, of the process reward model and, unless the
        critic trains alone, of the policy.
        """
        batch, step, products = rollout.rows, rollout.step, rollout.products
        self.context.check()
        metrics = {} if self.critic is None else self.critic.update(batch, step)
        metrics |= {} if self.prm is None else self.prm.update(batch, step)
        if self.critic is not None and self.critic.pretraining:
            metrics |= self.columns.mismatch(batch)
            update = Update(rollout, batch)
        else:
            kl_coef = self.controller.coefficient() if self.stage.kl.place == "loss" else 0.0
            ready = self.columns.fill_for_update(batch, step, kl_coef, products)
            result = self.learner.update(ready.batch, step, kl_coef, products)
            metrics |= ready.metrics | result.metrics | ready.pending_mismatch(result)
            metrics |= self._control_kl(rollout, result)
            update = Update(rollout, ready.batch, kl_coef, result)
        rollout.forget_products()
        self._heap.step_done()
        return update, metrics

    def _control_kl(self, rollout: Rollout, result: UpdateResult) -> Metrics:
        """Adapt the KL coefficient to the KL of this step; refresh the reference when due."""
        kl, metrics, reference_kl = self.stage.kl, dict[str, float](), rollout.reference_kl
        if kl.place == "loss" and "kl/ref_k1" in result.metrics:
            per_token = result.metrics["kl/ref_k1"]
            reference_kl = (per_token, per_token * rollout.mean_length)
            metrics = {"kl/ref_token": reference_kl[0], "kl/ref_sequence": reference_kl[1]}
        if reference_kl is not None:
            self.controller.update(*reference_kl, len(rollout.rows))
        if kl.refresh_every and rollout.step % kl.refresh_every == 0:
            self.learner.refresh_reference()
        return metrics

    def sync_weights(self, step: int) -> tuple[None, Metrics]:
        """Give the engine the policy of version `step`."""
        with self.rollouts.using_engine():
            if (source := self.learner.source) is not None:
                self.engine.sync_from(source, policy_version=step)
            else:
                send_policy(self.engine, self.learner.model, policy_version=step)
        return None, {}

    def check_sync(self, event: str) -> tuple[None, Metrics]:
        """Stop the run unless the engine has the learner's weights."""
        if self.sync_check is None or not self.sync_check.is_due():
            return None, {}
        began = perf_counter()
        with self.rollouts.using_engine():
            metrics = self.sync_check.after(event)
        return None, metrics | {"time/sync_check_s": perf_counter() - began}

    def evaluate(self) -> tuple[Evaluation, Metrics]:
        """Greedy held-out accuracy of the engine's policy; the cheap part of an evaluation."""
        greedy_only = self.context.run.evaluation.model_copy(update={"num_samples": 0})
        with self.rollouts.using_engine():
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
        return result, {k: v for k, v in result.metrics.items() if k.startswith("eval/")}

    def evaluate_sampled(self, step: int) -> tuple[SampledEvaluation, Metrics]:
        """avg@k and pass@k of the engine's policy, whose draws depend on seed, step and weights."""
        section, run = self.stage.sampled_evaluation, self.context.run
        assert section is not None
        seed = derive_seed(run.seed, self.context.name, "sampled_evaluation", step)
        with self.rollouts.using_engine():
            result = sample_policy(
                self.engine,
                self.tokenizer,
                self.context.task,
                self.held_out,
                section,
                run.evaluation,
                seed,
                lambda done: self.context.check(),
                self.episodes,
            )
        return result, {}

    # -- state --------------------------------------------------------------------------------

    def _stateful(self) -> dict[str, Stateful]:
        """Every part that keeps something from step to step, by its name in checkpoints.

        Weights and optimizers are kept apart from these, as tensors.
        """
        parts: dict[str, Stateful] = {
            "controller": self.controller,
            "estimator": self.estimator,
            "rollouts": self.rollouts,
            "reward_shaping": self.scorer.shaping,
        }
        parts |= self.learner.objective.stateful()
        if self.critic is not None:
            parts["critic"] = self.critic
        return parts

    def _optimizers(self) -> dict[str, StoredOptimizer]:
        """What moves next to the policy, by its place in checkpoints."""
        found = {
            CRITIC: None if self.critic is None else self.critic.stored,
            REFERENCE: self.learner.stored_reference,
            PRM: None if self.prm is None else self.prm.stored,
        }
        return {place: stored for place, stored in found.items() if stored is not None}

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint, then drop older ones."""
        parts = {name: part.state() for name, part in self._stateful().items()}
        state = LoopState(step, parts, self.recorder.history)

        def save(folder: Path) -> None:
            save_checkpoint(folder, self.learner.stored, state, self._optimizers())

        self.context.saved_checkpoint(step, self.checkpoints.write(step, save))

    def resume(self, folder: Path) -> None:
        """Continue where the checkpoint in `folder` was written."""
        forked = self.context.begins_fork_at(step_of(folder))
        others = self._optimizers()
        if forked and REFERENCE not in optimizers_in(folder):
            others.pop(REFERENCE, None)  # it begins to move with the fork, from the input model
        state = load_checkpoint(folder, self.learner.stored, others)
        load_parts(self._stateful(), state, forked=forked)
        self.recorder.continue_from(state.history)
        self.first_step = state.step + 1
        self.sync_weights(state.step)
        self.check_sync(f"the sync of step {state.step}")
        self.context.reporter.say(
            f"{self.context.name}: continues after step {state.step} ({folder})"
        )
