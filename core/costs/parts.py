"""What a stage's plugins ask for: passes beside the update, models beside the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.supervised_stages import PreferenceStage
from posttrain.core.contracts import (
    AdvantageEstimator,
    KlController,
    PolicyLoss,
    PreferenceLoss,
)
from posttrain.core.plugin_manager import PluginManager


@dataclass(frozen=True, slots=True)
class RlParts:
    """Forward passes of the policy and the reference in a step, and what the stage holds.

    `old_logprobs` is one of the policy's passes; `corrects` tells of a rollout correction, and
    `compares` of updates that leave out groups whose responses are worth the same.
    """

    policy_passes: int
    old_logprobs: bool
    corrects: bool
    compares: bool
    reference_passes: int
    has_reference: bool
    reward_models: int
    greedy_baseline: bool
    pretraining_rows: int
    trust_region: Any | None  # Any: the config of a loss that takes steps of its own

    @property
    def forward_passes(self) -> int:
        """All forward passes over the batch, with the vocabulary, beside the update's own."""
        return self.policy_passes + self.reference_passes


def parts_of(stage: RlStage, manager: PluginManager) -> RlParts:
    """As the learner and the RL loop decide: what is read is computed, and nothing else."""
    losses = [manager.build(PolicyLoss, t.name, t.fields()) for t in stage.loss_terms]
    controller: KlController[Any] = manager.build(
        KlController, stage.kl.controller.name, stage.kl.controller.fields()
    )
    estimator: AdvantageEstimator[Any] = manager.build(
        AdvantageEstimator, stage.advantage.name, stage.advantage.fields()
    )
    reads, section = estimator.required_columns(), stage.rollout_correction
    has_kl = controller.coefficient() > 0
    corrects = section.plugin.name != "none" or bool(section.plugin.fields().get("reject"))
    owner = next((loss for loss in losses if loss.owns_update), None)
    prepares = stage.top_entropy < 1 or any(loss.needs_prepare() for loss in losses)
    several = stage.epochs * stage.num_mini_batches > 1
    old = (
        several
        or corrects
        or prepares
        or owner is not None
        or (has_kl and stage.kl.place == "reward")
        or bool(reads & {"old_logprobs", "is_weight", "ref_logprobs"})
    ) and not section.bypass_old
    # Before every update but the first, whose policy is the old one.
    again = (stage.epochs * stage.num_mini_batches - 1) / stage.num_mini_batches if prepares else 0
    phases = any(loss.wants_phase_kl() for loss in losses)
    others = stage.entropy_coef > 0 or has_kl or prepares
    return RlParts(
        old_logprobs=old,
        corrects=corrects,
        compares=estimator.smallest_group() > 1 and not others and _leaves_out(stage, losses),
        policy_passes=int(old) + round(again) + int(phases) + int("sum_pi_squared" in reads),
        reference_passes=int(has_kl),
        has_reference=has_kl,
        reward_models=sum(reward.name == "reward_model" for reward in stage.rewards),
        greedy_baseline="baseline_reward" in reads,
        pretraining_rows=stage.ptx.batch_size if any(t.source == "ptx" for t in losses) else 0,
        trust_region=None if owner is None else owner.config,
    )


def _leaves_out(stage: RlStage, losses: Sequence[PolicyLoss[Any]]) -> bool:
    """Whether rows whose advantages are 0 come to the update and are not computed there.

    The sampler `dynamic` draws other groups in their place.
    """
    averages = (term.aggregator or stage.aggregator for term in stage.loss_terms)
    return (
        stage.skip_idle_rows
        and stage.sampler.name != "dynamic"
        and all(loss.idle_at_zero for loss in losses)
        and not any(average.fields().get("counts") == "micro" for average in averages)
    )


def has_reference(stage: PreferenceStage, manager: PluginManager) -> bool:
    """Whether a loss of the stage is relative to a frozen copy of its input model."""
    losses = (manager.find("preference_loss", term.name).cls for term in stage.loss_terms)
    relative = [issubclass(loss, PreferenceLoss) and loss.needs_reference for loss in losses]
    return not stage.reference_free and any(relative)
