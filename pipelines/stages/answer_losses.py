"""The losses that a step on given answers can be looked at under: the stage's own, and others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

from posttrain.core.analysis.answer_weights import (
    AnswerWeights,
    likelihood_weights,
    preference_weights,
    process_weights,
    reward_weights,
)
from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.microscope import Weigh
from posttrain.core.analysis.what_if import OWN, WhatIf, parse
from posttrain.core.config.preference_stages import (
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.contracts import PairLoss, PreferenceLoss
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.math.likelihood import TokenWeight
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.preference_objective import PreferenceObjective
from posttrain.pipelines.ranks.methods import preference_objective
from posttrain.pipelines.stage.inputs import StageInputs


class LossesOnAnswers(Protocol):
    """The losses of one kind of stage."""

    def own(self, evidence: StepEvidence) -> AnswerWeights:
        """A step under the stage's own loss."""

    def under(self, what: WhatIf) -> Weigh:
        """What weighs a step with the loss that `what` says; raises `ConfigError` for none."""

    def usual(self) -> Iterable[WhatIf]:
        """What most people ask first."""


def losses_on_answers(there: StageInputs) -> LossesOnAnswers:
    """The losses of a stage that learns from given answers."""
    stage = there.stage
    if isinstance(stage, SftStage):
        return _Likelihoods(stage.weighting)
    if isinstance(stage, PreferenceStage):
        return _Preferences(preference_objective(there, stage), there.manager)
    if isinstance(stage, RewardModelStage):
        return _Rewards(there.build(PairLoss, stage.preference_loss), there.manager)
    assert isinstance(stage, ProcessRewardModelStage), "no other stage keeps evidence"
    return _Process()


@dataclass(frozen=True, slots=True)
class _Likelihoods:
    weighting: TokenWeight

    def own(self, evidence: StepEvidence) -> AnswerWeights:
        return likelihood_weights(evidence, self.weighting)

    def under(self, what: WhatIf) -> Weigh:
        known: tuple[TokenWeight, ...] = get_args(TokenWeight)
        found = next((name for name in known if name == what.loss.name), None)
        if found is None or what.loss.fields or what.aggregator is not None:
            raise ConfigError(
                f"what-if '{what.text}': this stage's loss is the log-likelihood, of which the "
                f"weighting can be changed{nearest(what.loss.name, known)}; write one of "
                f"{list(known)}"
            )
        return lambda evidence: likelihood_weights(evidence, found).tokens

    def usual(self) -> Iterable[WhatIf]:
        return [parse(name) for name in get_args(TokenWeight) if name != self.weighting]


@dataclass(frozen=True, slots=True)
class _Preferences:
    objective: PreferenceObjective
    manager: PluginManager

    def own(self, evidence: StepEvidence) -> AnswerWeights:
        return preference_weights(evidence, self.objective)

    def under(self, what: WhatIf) -> Weigh:
        terms = self.objective.terms
        losses = [term.loss for term in terms]
        loss = _loss_under(what, losses, self.manager, "policy", self.objective.data)
        changed = replace(self.objective, terms=(replace(terms[0], loss=loss),))
        return lambda evidence: preference_weights(evidence, changed).tokens

    def usual(self) -> Iterable[WhatIf]:
        taken = {term.loss.name for term in self.objective.terms}
        return _others(taken, self.manager, "policy", self.objective.data)


@dataclass(frozen=True, slots=True)
class _Rewards:
    loss: PairLoss[Any]
    manager: PluginManager

    def own(self, evidence: StepEvidence) -> AnswerWeights:
        return reward_weights(evidence, self.loss)

    def under(self, what: WhatIf) -> Weigh:
        loss = _loss_under(what, [self.loss], self.manager, "reward_model", "pairs")
        assert isinstance(loss, PairLoss), "asked for among the losses of pairs"
        return lambda evidence: reward_weights(evidence, loss).tokens

    def usual(self) -> Iterable[WhatIf]:
        return _others({self.loss.name}, self.manager, "reward_model", "pairs")


class _Process:
    def own(self, evidence: StepEvidence) -> AnswerWeights:
        return process_weights(evidence)

    def under(self, what: WhatIf) -> Weigh:
        raise ConfigError(
            f"what-if '{what.text}': a process reward model has one loss, the cross entropy with "
            "the labels; leave --what-if out"
        )

    def usual(self) -> Iterable[WhatIf]:
        return ()


def _loss_under(
    what: WhatIf, own: list[PreferenceLoss[Any]], manager: PluginManager, trains: str, data: str
) -> PreferenceLoss[Any]:
    """The loss that `what` names, or the only one of `own` with other fields."""
    if what.aggregator is not None:
        raise ConfigError(
            f"what-if '{what.text}': a loss on preferences has no aggregator; leave @... out"
        )
    if what.loss.name == OWN:
        if len(own) > 1:
            names = [loss.name for loss in own]
            raise ConfigError(
                f"what-if '{what.text}': the stage's loss has {len(own)} terms, {names}, so it is "
                "not clear whose fields these are; name one loss"
            )
        fields = own[0].config.model_dump(mode="json") | what.loss.fields
        return manager.build(PreferenceLoss, own[0].name, fields)
    loss = manager.build(PreferenceLoss, what.loss.name, what.loss.fields)
    if trains not in loss.trains or loss.data != data:
        fitting = [what.text for what in _others(set(), manager, trains, data)]
        raise ConfigError(
            f"what-if '{what.text}': '{loss.name}' does not train a {trains} on {data}; "
            f"choose one of {fitting}"
        )
    return loss


def _others(taken: set[str], manager: PluginManager, trains: str, data: str) -> list[WhatIf]:
    """All losses of that kind but those `taken`, with their default settings."""
    entries: list[Any] = [*manager.entries(PreferenceLoss.kind)]  # Any: classes of the kind
    fitting = [e.name for e in entries if trains in e.cls.trains and e.cls.data == data]
    return [parse(name) for name in fitting if name not in taken]
