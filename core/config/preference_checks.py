"""Preference losses and options that cannot work together, each with what to change.

The files of preferences are checked by `core.data.preference_files`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.core.config.base import TASK_DATA, Component
from posttrain.core.config.loading import LoadedConfig
from posttrain.core.config.preference_stages import (
    JudgedAnswersStage,
    PreferenceDataStage,
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager

# Fields that say how answers are sampled: without effect in addition to a file.
_SAMPLING = ("num_prompts", "num_generations", "pairs_per_prompt", "generation", "unfinished")
_SAMPLING_STEPS = (
    *("num_prompts", "num_generations", "num_continuations", "estimate", "max_steps"),
    "generation",
)
# Fields of a fixed set of pairs: without effect where each round makes its own.
_WITHOUT_ROUNDS = {
    "num_prompts": "set online.prompts_per_round",
    "num_generations": "set online.num_generations",
    "epochs": "set online.steps",
    "unfinished": "answers are ranked as online.ranked_by says",
    "held_out_fraction": "no pair is held out; measure with a stage of kind 'evaluate'",
    "max_length": "set generation.max_response_length",
    "evaluate_every": "no pair is held out; measure with a stage of kind 'evaluate'",
}
# Options of pairs, with the value that leaves them off.
_PAIR_OPTIONS: dict[str, object] = {
    "f_divergence": "reverse_kl",
    "ld_alpha": None,
    "wpo": False,
    "reference_free": False,
}


def check_preference(
    name: str, stage: PreferenceStage, loaded: LoadedConfig, manager: PluginManager
) -> list[str]:
    """What cannot work in a preference stage whose plugins are all known."""
    check = _Check(name, stage, loaded, manager)
    return [
        *check.trains("policy", stage.loss_terms),
        *check.one_kind_of_data(stage),
        *check.some_factor(stage),
        *check.pair_options(stage),
        *check.alpha(stage),
        *check.reads_scores(stage),
        *check.two_prompts(stage),
        *check.sampling(),
        *check.online(stage),
        *check.task_brings_pairs(stage.loss_terms[0]),
    ]


def check_reward_model(
    name: str, stage: RewardModelStage, loaded: LoadedConfig, manager: PluginManager
) -> list[str]:
    """What cannot work in a reward-model stage whose plugins are all known."""
    check = _Check(name, stage, loaded, manager)
    return [
        *check.trains("reward_model", (stage.preference_loss,)),
        *check.sampling(),
        *check.task_brings_pairs(stage.preference_loss),
    ]


def check_process_reward_model(
    name: str, stage: ProcessRewardModelStage, loaded: LoadedConfig
) -> list[str]:
    """What has no effect in a stage that scores steps."""
    return [] if stage.data is None else list(_without_effect(name, stage, loaded, _SAMPLING_STEPS))


def _without_effect(
    name: str, stage: JudgedAnswersStage, loaded: LoadedConfig, fields: Sequence[str]
) -> Iterator[str]:
    """Sampling settings in addition to data, where nothing is sampled."""
    for field in fields:
        if getattr(stage, field) != type(stage).model_fields[field].default:
            yield loaded.problem(
                f"stages.{name}.{field}",
                "says how answers are sampled, but `data` gives them; remove one of the two",
            )


class _Check:
    """One stage, with the loss plugins that there are."""

    def __init__(
        self, name: str, stage: PreferenceDataStage, loaded: LoadedConfig, manager: PluginManager
    ) -> None:
        self.name, self.stage, self.loaded, self.manager = name, stage, loaded, manager

    def line(self, place: str, text: str) -> str:
        return self.loaded.problem(f"stages.{self.name}.{place}", text)

    def loss(self, component: Component) -> Any:  # Any: the contract would import torch
        return self.manager.find("preference_loss", component.name).cls

    def losses_of_pairs(self, trains: str) -> list[str]:
        """Names of the losses that train this on pairs."""
        entries: list[Any] = [*self.manager.entries("preference_loss")]
        return [e.name for e in entries if trains in e.cls.trains and e.cls.data == "pairs"]

    def trains(self, what: str, terms: tuple[Component, ...]) -> Iterator[str]:
        """Losses that train something else than this stage does."""
        other = {"policy": "reward_model", "reward_model": "preference"}[what]
        for term in terms:
            if what not in self.loss(term).trains:
                trained = " and ".join(sorted(self.loss(term).trains)).replace("_", " ")
                yield self.line(
                    "preference_loss",
                    f"'{term.name}' trains a {trained}, not a {what.replace('_', ' ')}; use it in "
                    f"a stage of kind '{other}', or choose one of "
                    f"{self.losses_of_pairs(what)}",
                )

    def one_kind_of_data(self, stage: PreferenceStage) -> Iterator[str]:
        """A list of losses of which some read pairs and others labelled answers."""
        kinds = {term.name: self.loss(term).data for term in stage.loss_terms}
        if len(set(kinds.values())) > 1:
            reported = ", ".join(f"'{name}' reads {kind}" for name, kind in kinds.items())
            yield self.line(
                "preference_loss",
                f"all losses of a stage read one kind of data, but {reported}; keep those of "
                "one kind",
            )

    def some_factor(self, stage: PreferenceStage) -> Iterator[str]:
        if all(term.coef == 0 for term in stage.loss_terms):
            yield self.line(
                "preference_loss",
                "every loss has coef 0, so nothing can be learned; give one a coef other than 0",
            )

    def pair_options(self, stage: PreferenceStage) -> Iterator[str]:
        """Options of pairs in addition to a loss of labelled answers."""
        loss = stage.loss_terms[0]
        if self.loss(loss).data == "pairs":
            return
        for option, off in _PAIR_OPTIONS.items():
            if getattr(stage, option) != off:
                yield self.line(
                    option,
                    f"is for pairs, and '{loss.name}' reads labelled answers; set it to "
                    f"{'null' if off is None else str(off).lower()}, or choose one of "
                    f"{self.losses_of_pairs('policy')}",
                )

    def alpha(self, stage: PreferenceStage) -> Iterator[str]:
        """The coefficient of a divergence that is not there."""
        usual = PreferenceStage.model_fields["f_alpha"].default
        if stage.f_alpha != usual and stage.f_divergence != "alpha":
            yield self.line(
                "f_alpha",
                f"is the coefficient of f_divergence: alpha, and that is {stage.f_divergence}; "
                "remove it, or set f_divergence: alpha",
            )

    def reads_scores(self, stage: PreferenceStage) -> Iterator[str]:
        """A divergence that no loss would notice; AlphaPO's scores are of bare log-probs."""
        read = any(
            self.loss(term).reads_scores and not term.fields().get("alpha_po")
            for term in stage.loss_terms
        )
        if stage.f_divergence != "reverse_kl" and not read:
            names = [term.name for term in stage.loss_terms]
            yield self.line(
                "f_divergence",
                f"maps log-ratios to scores, and {names} read bare log-probs; set it to "
                "reverse_kl, or choose a loss such as 'dpo'",
            )

    def two_prompts(self, stage: PreferenceStage) -> Iterator[str]:
        """A mini-batch too small for answers to other prompts."""
        for term in stage.loss_terms:
            if self.loss(term).needs_kl_completions and stage.batch_size < 2:
                yield self.line(
                    "batch_size",
                    f"'{term.name}' measures its reference point on answers to other prompts of "
                    "the mini-batch; use 2 or more",
                )

    def sampling(self) -> Iterator[str]:
        """Settings of answers that are sampled in addition to a file, and the other way round."""
        if self.stage.data is not None:
            yield from _without_effect(self.name, self.stage, self.loaded, _SAMPLING)
        if self.stage.data in (None, TASK_DATA) and self.stage.pairs_from_scores != "best_worst":
            yield self.line(
                "pairs_from_scores",
                "is for a file that gives each answer a score, and `data` names none; remove it",
            )

    def online(self, stage: PreferenceStage) -> Iterator[str]:
        """Settings that pairs of the current policy leave without effect, and losses of labels."""
        if stage.online is None:
            return
        if stage.data is not None:
            yield self.line(
                "online",
                "makes pairs of the policy's own answers, but `data` gives them; remove one of the "
                "two",
            )
        loss = stage.loss_terms[0]
        if self.loss(loss).data != "pairs":
            yield self.line(
                "online",
                f"makes pairs, and '{loss.name}' reads labelled answers; choose one of "
                f"{self.losses_of_pairs('policy')}",
            )
        for name, instead in _WITHOUT_ROUNDS.items():
            if getattr(stage, name) != type(stage).model_fields[name].default:
                yield self.line(name, f"has no effect with `online`; {instead}")

    def brings_none(self, task: str) -> bool:
        """Whether the task is there and has no preferences; one that is not is reported as such."""
        try:
            cls: Any = self.manager.find("task", task).cls  # Any: the contract would import torch
        except ConfigError:
            return False
        return not cls.gives_preferences

    def task_brings_pairs(self, leading: Component) -> Iterator[str]:
        """A task without preferences, or a loss that reads no pairs."""
        if self.stage.data != TASK_DATA:
            return
        task = self.loaded.config.task.name
        known: list[Any] = [*self.manager.entries("task")]
        fits = [entry.name for entry in known if entry.cls.gives_preferences]
        if self.brings_none(task):
            yield self.line(
                "data",
                f"task '{task}' brings no preferences; name a file of them, leave `data` out for "
                f"the model's own answers, or use one of the tasks {fits}",
            )
        if self.loss(leading).data != "pairs":
            yield self.line(
                "data",
                f"a task brings pairs, and '{leading.name}' reads labelled answers; choose one of "
                f"{self.losses_of_pairs('policy')}, or name a file",
            )
