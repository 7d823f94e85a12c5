"""The variants of a comparison, built from the run's own config and what was asked for.

An `--algorithm` is its preset on the run's rollouts and rewards: the preset's sampling and rewards
are ignored, since both have happened. The other options change one place of the run's own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.analysis.frozen import Variant
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.spec import Spec
from posttrain.core.contracts import (
    AdvantageEstimator,
    AdvantageTransform,
    Algorithm,
    KlController,
    KlEstimator,
)
from posttrain.core.errors import ConfigError
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.rl.build import build_objective
from posttrain.pipelines.stage.inputs import StageInputs

OWN = "as run"
# Of a stage, what makes its loss: an algorithm sets these again. The rest is the run's.
_LOSS_FIELDS = (
    "advantage",
    "advantage_transform",
    "distillation",
    "policy_loss",
    "aggregator",
    "kl",
    "entropy_coef",
    "entropy_aggregator",
    "entropy_controller",
    "top_entropy",
    "rollout_correction",
    "critic",
    "implicit_prm",
)
_OF_TEACHERS = ("teachers", "teacher_routing", "teacher_missing")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for: specs of plugins by kind, and (low, high) of clips.

    `without_kl` leaves the KL terms out of every variant, the run's own included.
    """

    algorithms: Sequence[Spec] = ()
    losses: Sequence[Spec] = ()
    aggregators: Sequence[Spec] = ()
    clips: Sequence[tuple[float, float]] = ()
    without_kl: bool = False
    advantages: Sequence[Spec] = ()

    @property
    def any(self) -> bool:
        """Whether a variant was named."""
        named = (self.algorithms, self.losses, self.aggregators, self.clips, self.advantages)
        return any(named)


@dataclass(slots=True)
class BuiltVariants:
    """The run's own variant first; `notes` are what a reader must know of them."""

    variants: list[Variant] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse_clip(text: str) -> tuple[float, float]:
    """`0.2:0.28` as the distances of the clip's bounds below and above 1."""
    low, sign, high = text.partition(":")
    try:
        return float(low), float(high if sign else low)
    except ValueError:
        raise ConfigError(
            f"--clip '{text}' must be LOW:HIGH, two numbers such as 0.2:0.28 (the ratio is kept "
            "between 1 - LOW and 1 + HIGH)"
        ) from None


def build_variants(run: PastRun, stage: str, wanted: Wanted, kl_coef: float) -> BuiltVariants:
    """Every variant asked for next to the run's own; `kl_coef` is the one of its loss at that step.

    Raises `ConfigError` for an unknown plugin, a bad field, a combination that no stage may have,
    or a variant that is asked for twice.
    """
    own, raw = run.rl_stage(stage), run.raw_stage(stage)
    bare = {name: value for name, value in raw.items() if name not in _LOSS_FIELDS}
    # Label, option, and the stage's values.
    asked: list[tuple[str, str, dict[str, Any]]] = []  # Any: YAML values
    for spec in wanted.algorithms:
        values = bare | {"algorithm": run.component(spec)}
        if not _has_teacher(run, spec):
            values = {name: what for name, what in values.items() if name not in _OF_TEACHERS}
        asked.append((f"algorithm {spec.text}", f"--algorithm '{spec.text}'", values))
    for name, specs, place in (
        ("loss", wanted.losses, "policy_loss"),
        ("aggregation", wanted.aggregators, "aggregator"),
        ("advantage", wanted.advantages, "advantage"),
    ):
        for spec in specs:
            values = raw | {place: run.component(spec)}
            asked.append((f"{name} {spec.text}", f"--{name} '{spec.text}'", values))
    for low, high in wanted.clips:
        what = f"clip {low:g}:{high:g}"
        loss = _clipped(raw, low, high, f"--{what}")
        asked.append((what, f"--{what}", raw | {"policy_loss": loss}))
    labels = [label for label, _, _ in asked]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"'{twice}' is asked for twice; give each variant once")
    configs = {OWN: run.resolved}
    configs |= {label: _resolved(run, stage, values, what) for label, what, values in asked}
    built = BuiltVariants()
    for label, resolved in configs.items():
        there = run.stage_inputs(stage, resolved, {})
        built.variants.append(_variant(label, there, own, kl_coef, wanted.without_kl))
        built.notes += _notes(label, there, built.variants[-1])
        if own.reward_whiten != "none" and not built.variants[-1].keeps_token_rewards:
            built.notes.append(f"{label}: its rewards are not whitened, as the run's were")
    return built


def _has_teacher(run: PastRun, spec: Spec) -> bool:
    """Whether a preset learns from a teacher; True where it cannot be built, which shows later."""
    try:
        component = run.component(spec)
        preset = run.manager.build(Algorithm, str(component.pop("name")), component)
    except ConfigError:
        return True
    return bool({"advantage_transform", "distillation"} & preset.expand().keys())


def _resolved(run: PastRun, stage: str, values: dict[str, Any], what: str) -> ResolvedRun:
    """The config with the stage's `values`; a problem says which option made it. Any: YAML."""
    try:
        return run.with_stage(stage, values)
    except ConfigError as error:
        raise ConfigError(f"{what} does not fit stage '{stage}' of this run: {error}") from error


def _clipped(values: dict[str, Any], low: float, high: float, what: str) -> dict[str, object]:
    """The run's own loss with other bounds. Any: YAML values."""
    loss = values["policy_loss"]
    if isinstance(loss, list) or not {"clip_low", "clip_high"} <= set(loss):
        has = "several terms" if isinstance(loss, list) else f"'{loss['name']}', without them"
        raise ConfigError(
            f"{what} changes the fields clip_low and clip_high of the run's policy loss, which is "
            f"{has}; use --loss NAME,field=value instead"
        )
    return {**loss, "clip_low": low, "clip_high": high}


def _variant(
    label: str, there: StageInputs, own: RlStage, kl_coef: float, without_kl: bool
) -> Variant:
    stage = there.stage
    assert isinstance(stage, RlStage)
    objective = replace(build_objective(there, stage), distillation=None)
    coef = there.build(KlController, stage.kl.controller).coefficient()
    if stage.kl == own.kl and stage.kl.place == "loss":
        coef = kl_coef  # in force at that step, where a controller moves it
    if without_kl:
        objective, coef = replace(objective, kl=None), 0.0
    in_reward = stage.kl.place == "reward" and coef > 0
    same_rewards = stage.kl == own.kl and not without_kl
    bypasses = own.rollout_correction.bypass_old and not stage.rollout_correction.bypass_old
    return Variant(
        label,
        estimator=there.build(AdvantageEstimator, stage.advantage),
        transforms=tuple(there.build(AdvantageTransform, each) for each in stage.transforms),
        objective=objective,
        kl_coef=coef if stage.kl.place == "loss" else 0.0,
        keeps_token_rewards=same_rewards or not (in_reward or own.kl.place == "reward"),
        reward_kl=(there.build(KlEstimator, stage.kl.estimator), coef) if in_reward else None,
        keeps_correction=stage.rollout_correction == own.rollout_correction,
        loses_old_logprobs=bypasses,
    )


def _notes(label: str, there: StageInputs, variant: Variant) -> list[str]:
    """What of a variant this comparison cannot show."""
    stage = there.stage
    assert isinstance(stage, RlStage)
    notes = []
    if variant.estimator.state():
        notes.append(
            f"{label}: advantage '{variant.estimator.name}' keeps a running state, which here is "
            "that of a first step"
        )
    if any(term.name == "ptx" for term in stage.loss_terms):
        notes.append(f"{label}: its pre-training term reads no rollout and is left out")
    if stage.distillation is not None:
        notes.append(
            f"{label}: '{stage.distillation.name}' reads logits, which evidence does not have, and "
            "is left out"
        )
    if (observed := variant.objective.observed) is not None:
        notes.append(
            f"{label}: '{observed.loss.name}' reads tokens that the policy did not sample and is "
            "left out"
        )
    if variant.objective.entropy_controller is not None:
        notes.append(
            f"{label}: the coefficient of its entropy bonus moves from step to step, and here is "
            "that of a first step"
        )
    if variant.objective.has_bonus:
        notes.append(
            f"{label}: the entropy bonus is in the loss, but not in the weights of tokens: it does "
            "not act through the log-probs of those sampled"
        )
    if variant.objective.terms and variant.objective.terms[0].loss.owns_update:
        notes.append(
            f"{label}: '{variant.objective.terms[0].loss.name}' takes a step of its own from this "
            "gradient; the step is not compared"
        )
    return notes
