"""Combinations of plugins and settings that cannot work together, each with what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.config.base import Component
from posttrain.core.config.coefficients import is_always
from posttrain.core.config.given_answers_checks import check_given_answers
from posttrain.core.config.loading import LoadedConfig
from posttrain.core.config.positions import dotted
from posttrain.core.config.rl_stage import TOTAL, RlStage, reward_labels
from posttrain.core.config.sampled_evaluation import SampledEvaluationSection
from posttrain.core.config.sections import (
    EvaluationSection,
    GenerationSection,
    OptimizerBase,
    OptimizerSection,
)
from posttrain.core.config.teaching_checks import ADD_ONE, TeachingCheck
from posttrain.core.contracts import REWARD_COLUMNS, TEACHER_COLUMNS, PlayedEnvironment

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager

# Columns that every rl stage can fill before its update, whatever it is made of.
ALWAYS = frozenset(
    {
        "token_rewards",
        "scored",
        "rewards",
        "acc",
        "reward_components",
        "old_logprobs",
        "rollout_logprobs",
        "logprobs_now",
        "entropy",
        "advantages",
        "baseline_reward",
        "agent_id",
        "sum_pi_squared",
    }
)
# What an environment fills, of its episodes' turns.
OF_TURNS = frozenset({"turn_end", "turn_reward", "state_key", "obs_mask", "episode_id"})
WITH_TURNS = "the turns of an environment: add `environment` to the stage, or choose another plugin"
# What fills a column that is not always there.
FILLED_BY: dict[str, str] = {
    "values": "a critic: add `critic: {}`, or choose an advantage without one, such as 'grpo'",
    "process_rewards": "an implicit process reward model: add `implicit_prm: {}`, or choose "
    "another advantage",
    "bootstrap_value": "a critic: add `critic: {}`, or set bootstrap_truncated: false",
    "step_end": "a reward that scores steps: add one to `rewards`, or choose another advantage",
    "step_score": "a reward that scores steps: add one to `rewards`, or choose another advantage",
    "node_id": "a sampler that branches: choose one, or leave attribution and dedup_prefix alone",
    "ref_logprobs": "a reference policy: give `kl.controller` a coefficient above 0",
    "is_weight": "a rollout correction: set `rollout_correction.plugin`",
    **dict.fromkeys(OF_TURNS, WITH_TURNS),
    **dict.fromkeys(TEACHER_COLUMNS, f"a teacher, and this stage has none: {ADD_ONE}"),
}


def check_rl(
    name: str, stage: RlStage, loaded: LoadedConfig, manager: PluginManager
) -> Iterable[str]:
    """One line (file, line, place, problem, fix) for each impossible combination of a stage."""
    check = _Check(name, stage, loaded, manager)
    yield from check.loss_terms()
    yield from check.advantage()
    yield from check.rewards()
    yield from check.sampler()
    yield from check.critic()
    yield from check.implicit_prm()
    yield from check.kl()
    yield from check.entropy()
    yield from check.correction()
    yield from check.trust_region()
    yield from check.precision()
    yield from check.ranks()
    yield from check.sampling()
    yield from check.teaching.problems()
    coefficient = check.controller_coefficient()
    yield from check_given_answers(check.teaching, loaded, check.build, coefficient)


def check_precision(
    section: OptimizerBase, place: tuple[str | int, ...], loaded: LoadedConfig
) -> Iterable[str]:
    """Compact weights or moments, and autocast, where something else holds the weights."""
    autocast = loaded.config.model.dtype == "autocast"
    if autocast and isinstance(section, OptimizerSection) and section.rounding == "stochastic":
        yield loaded.problem(
            (*place, "rounding"),
            "stochastic is for bfloat16 weights, and model.dtype: autocast keeps float32 ones; set "
            "model.dtype: bfloat16",
        )
    if autocast and loaded.config.trains_elsewhere:
        yield loaded.problem(
            "model.dtype",
            f"ranks keep float32 weights and compute in bfloat16 with dtype: bfloat16 already "
            f"({dotted(place)}); set that in place of autocast",
        )
    if loaded.config.trains_elsewhere and isinstance(section, OptimizerSection):
        for name, default in (("moments", "float32"), ("rounding", "masters")):
            if getattr(section, name) != default:
                yield loaded.problem(
                    (*place, name),
                    f"ranks keep float32 weights and moments, in pieces; set {name}: {default}, or "
                    f"{loaded.config.train_here}",
                )


def check_other_optimizer(
    cls: type[Any], place: tuple[str | int, ...], loaded: LoadedConfig
) -> Iterable[str]:
    """An optimizer that cannot move weights in pieces, on ranks. `cls` is its plugin class."""
    config = loaded.config
    if config.trains_elsewhere and not cls.on_ranks:
        yield loaded.problem(
            place,
            f"optimizer '{cls.name}' does not say that it works on weights in pieces (`on_ranks`), "
            f"and limits.learner_ranks is {config.limits.learner_ranks}; {config.train_here}, or "
            "use adamw",
        )


def check_optimizer(
    section: OptimizerBase, place: tuple[str | int, ...], loaded: LoadedConfig
) -> Iterable[str]:
    """Warm-up in rollouts where there are none, and what `check_precision` finds."""
    yield from check_precision(section, place, loaded)
    if section.warmup_rollouts:
        yield loaded.problem(
            (*place, "warmup_rollouts"),
            f"this stage has no rollouts; use warmup_steps: {section.warmup_rollouts}",
        )


def check_generation(
    section: GenerationSection, place: tuple[str | int, ...], loaded: LoadedConfig
) -> Iterable[str]:
    """A temperature at which there is nothing to learn from."""
    if section.temperature == 0:
        yield loaded.problem(
            (*place, "temperature"),
            "at 0 all responses to a prompt are the same, so nothing can be learned; use a value "
            "above 0, such as 1.0",
        )


def check_room(
    section: GenerationSection | EvaluationSection,
    place: tuple[str | int, ...],
    loaded: LoadedConfig,
) -> Iterable[str]:
    """A response that leaves no token of the context to any prompt."""
    limit = loaded.config.model.max_model_len
    if section.max_response_length >= limit:
        yield loaded.problem(
            (*place, "max_response_length"),
            f"{section.max_response_length} tokens of response leave no room for a prompt in "
            f"model.max_model_len {limit}; raise that, or shorten the response",
        )


def check_sampled_evaluation(
    name: str, section: SampledEvaluationSection, loaded: LoadedConfig
) -> Iterable[str]:
    """More problems than the evaluation has, of which they are the first ones."""
    most = loaded.config.evaluation.num_problems
    if section.num_problems > most:
        yield loaded.problem(
            ("stages", name, "sampled_evaluation", "num_problems"),
            f"{section.num_problems} problems are more than the {most} of "
            f"evaluation.num_problems, whose first ones they are; raise that, or ask for {most}",
        )


class _Check:
    """The plugins of one stage, built, and its problems."""

    def __init__(
        self, name: str, stage: RlStage, loaded: LoadedConfig, manager: PluginManager
    ) -> None:
        self.name, self.stage, self.loaded, self.manager = name, stage, loaded, manager

        def build(kind: str, component: Component) -> Any:  # Any: a plugin of whatever kind
            config = manager.config(kind, component.name, component.fields())
            return manager.find(kind, component.name).cls(config)

        self.build: Callable[[str, Component], Any] = build
        self.losses = [build("policy_loss", term) for term in stage.loss_terms]
        # Those that count: with a complement of 1 the others have a factor of 0.
        alone = any(is_always(coef, 1) for coef in stage.complements)
        self.counted = [
            loss
            for term, loss in zip(stage.loss_terms, self.losses, strict=True)
            if not is_always(term.coef, 0) and (not alone or term.coef in stage.complements)
        ]
        self.estimator = build("advantage", stage.advantage)
        self.teaching = TeachingCheck(stage, loaded, self.losses, self.estimator, build, self.line)

    def line(self, field: str, text: str) -> str:
        return self.loaded.problem(f"stages.{self.name}.{field}", text)

    def columns(self) -> frozenset[str]:
        stage, found = self.stage, set(ALWAYS)
        if stage.critic is not None:
            found |= {"values", "returns", "bootstrap_value"}
        if self.has_reference():
            found.add("ref_logprobs")
        if stage.implicit_prm is not None:
            found.add("process_rewards")
        if any(self.build("reward", reward).gives_steps for reward in stage.rewards):
            found |= {"step_end", "step_score"}
        if stage.rollout_correction.plugin.name != "none":
            found |= {"is_weight", "correction_mask"}
        if stage.environment is not None:
            found |= OF_TURNS
        found |= self.teaching.columns()
        return frozenset(found | self.build("sampler", stage.sampler).adds_columns)

    def has_reference(self) -> bool:
        """Whether a reference is loaded: for a KL term, or for a loss that reads its log-probs."""
        reading = any("ref_logprobs" in loss.required_columns() for loss in self.losses)
        prm = self.stage.implicit_prm is not None
        return reading or prm or self.controller_coefficient() > 0

    def controller_coefficient(self) -> float:
        return float(self.build("kl_controller", self.stage.kl.controller).coefficient())

    def missing(self, field: str, who: str, needed: Iterable[str]) -> Iterable[str]:
        """A line for each needed column that nothing in this stage fills."""
        for column in sorted(set(needed) - self.columns()):
            filled_by = FILLED_BY.get(column, "nothing that this version has")
            yield self.line(field, f"{who} reads the column '{column}', filled by {filled_by}")

    def loss_terms(self) -> Iterable[str]:
        """Aggregators that a loss does not allow, missing columns, a loss that stands twice."""
        for term, loss in zip(self.stage.loss_terms, self.losses, strict=True):
            allowed = loss.allowed_aggregators()
            aggregator = term.aggregator or self.stage.aggregator
            if allowed is not None and aggregator.name not in allowed:
                yield self.line(
                    "aggregator",
                    f"policy loss '{loss.name}' gives one number per response, so it takes "
                    f"{sorted(allowed)}, not '{aggregator.name}'; change the aggregator, or set "
                    "allow_any_agg: true on the loss to weigh long responses more",
                )
            if loss.source == "rollout":
                who = f"policy loss '{loss.name}'"
                yield from self.missing("policy_loss", who, loss.required_columns())
        names = [loss.name for loss in self.losses]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield self.line(
                "policy_loss",
                f"'{name}' is listed {names.count(name)} times, but state and metrics of a term go "
                "by its name; keep one of them, with coef for its weight",
            )
        yield from self._complements()
        path = self.stage.ptx.path
        if path is not None and not Path(path).expanduser().is_file():
            yield self.line(
                "ptx.path",
                f"there is no file '{path}', expected JSON Lines with `prompt` and `completion`; "
                f"relative paths start at {Path.cwd()}",
            )
        if self.losses and all(loss.source != "rollout" for loss in self.losses):
            yield self.line(
                "policy_loss",
                "only reads tokens that the policy did not sample, so no reward has any effect; "
                "add a policy loss such as 'ppo_clip', or use an sft stage",
            )
        elif self.losses and all(loss.source != "rollout" for loss in self.counted):
            yield self.line(
                "policy_loss",
                "no loss that reads sampled tokens has a coefficient above 0, so no reward has any "
                "effect; give one a coef above 0, or use an sft stage",
            )
        observing = [loss.name for loss in self.losses if loss.source == "observations"]
        if observing and self.stage.environment is None:
            yield self.line(
                "policy_loss",
                f"'{observing[0]}' learns what an environment wrote, and this stage has none; add "
                f"`environment`, or remove '{observing[0]}'",
            )

    def _complements(self) -> Iterable[str]:
        """Coefficients whose rest goes to the other losses, where there are two or no others."""
        coefs = self.stage.complements
        if len(coefs) > 1:
            yield self.line(
                "policy_loss",
                f"{len(coefs)} coefficients have complement: true, and the other losses count 1 - "
                "one of them; keep one",
            )
        if coefs and all(term.coef in coefs for term in self.stage.loss_terms):
            yield self.line(
                "policy_loss",
                "complement: true is for the other policy losses, and there is none; add one such "
                "as 'ppo_clip', or remove complement",
            )

    def advantage(self) -> Iterable[str]:
        """Columns that the estimator misses, and groups too small for it."""
        who = f"advantage '{self.estimator.name}'"
        yield from self.missing("advantage", who, self.estimator.required_columns())
        if not self.estimator.takes_branches and self._may_branch():
            yield self.line(
                "advantage",
                f"{who} compares tokens at one position of each response, and a program's episode "
                "may have branches, with several tokens there; use another advantage such as "
                "'grpo', or another environment",
            )
        in_reward = self.stage.kl.place == "reward" and self.controller_coefficient() > 0
        if in_reward and not self.estimator.reads_token_rewards():
            yield self.line(
                "kl.place",
                f"{who} reads scores of its own, so a KL in the reward would be lost; use place: "
                "loss, or set kl.controller.coef to 0",
            )
        if self.stage.reward_whiten != "none" and not self.estimator.reads_token_rewards():
            yield self.line(
                "reward_whiten",
                f"{who} reads scores of its own, so whitened rewards would be lost; use "
                "reward_whiten: none",
            )
        if self.stage.reward_keep_mean and self.stage.reward_whiten != "batch":
            yield self.line(
                "reward_keep_mean",
                f"only whitening over the batch takes a mean away, and reward_whiten is "
                f"'{self.stage.reward_whiten}'; set one or the other",
            )
        for index, transform in enumerate(self.teaching.transforms):
            by = f"advantage_transform '{transform.name}'"
            place = "advantage_transform"
            if isinstance(self.stage.advantage_transform, tuple):
                place += f".{index}"
            yield from self.missing(place, by, transform.required_columns())
        smallest, size = self.estimator.smallest_group(), self.stage.num_generations
        if size < smallest:
            yield self.line(
                "num_generations",
                f"{who} compares the responses to a prompt, and a group of {size} has nothing to "
                f"compare; use num_generations: {smallest} or more, or an advantage for single "
                "responses such as 'reinforce_baseline'",
            )

    def _may_branch(self) -> bool:
        """Whether an episode may be several rows."""
        used = self.stage.environment
        if used is None:
            return False
        return issubclass(self.manager.find("environment", used.name).cls, PlayedEnvironment)

    def rewards(self) -> Iterable[str]:
        """Labels that occur twice, and rewards that change nothing in the update."""
        rewards = self.stage.rewards
        labels = [reward.label for reward in rewards]
        for index, label in enumerate(labels):
            if label in labels[:index] or label == TOTAL:
                why = "the sum of rewards" if label == TOTAL else "another reward"
                yield self.line(
                    f"rewards.{index}.label",
                    f"'{label}' is what records call {why}; choose another label",
                )
        yield from self._gates()
        built = [self.build("reward", reward) for reward in rewards]
        read = self._reward_columns_read()
        sampled = any(loss.source == "rollout" for loss in self.counted)
        if not rewards and (missing := sorted(read & REWARD_COLUMNS - {"acc"})):
            yield self.line(
                "rewards",
                f"there is none, and the update depends on {missing}; add one such as 'accuracy', "
                "or use advantage: zero",
            )
        if read & {"rewards", "token_rewards"} or not sampled:
            return
        reached, reader = self._rewards_reached(built, read)
        other = "an advantage that reads the sum of rewards, such as 'grpo'"
        if reader.startswith("policy loss"):
            other = "a policy loss that reads advantages, such as 'ppo_clip'"
        for index, reward in enumerate(rewards):
            if reward.weight and index not in reached:
                yield self.line(
                    f"rewards.{index}",
                    f"{reader}, so '{reward.name}' would change nothing; remove it, set weight: 0 "
                    f"to record it only, or use {other}",
                )
                continue
            for field, off in (("weight", 1.0), ("only_if", None)):
                value = getattr(reward, field)
                if reward.weight and value != off and "reward_components" not in read:
                    yield self.line(
                        f"rewards.{index}.{field}",
                        f"{reader}, as they are before the sum, so {field}: {value} would change "
                        f"nothing; remove it, or use {other}",
                    )
        weights = getattr(self.estimator.config, "weights", None)
        if "reward_components" in read and weights and len(weights) != len(rewards):
            yield self.line(
                "advantage.weights",
                f"{len(weights)} weights for {len(rewards)} rewards; give one per reward, in their "
                "order, or leave weights out",
            )
        if self.stage.reward_clip != (None, None):
            yield self.line(
                "reward_clip",
                f"{reader}, so the clipped sum of rewards would change nothing; remove reward_clip",
            )

    def _gates(self) -> Iterable[str]:
        """Rewards that count only where another one is 1, which is not there."""
        names = reward_labels(self.stage.rewards)
        for index, reward in enumerate(self.stage.rewards):
            others = [name for name in names if name != names[index]]
            if reward.only_if is not None and reward.only_if not in others:
                yield self.line(
                    f"rewards.{index}.only_if",
                    f"no other reward is called '{reward.only_if}'; give the label of one "
                    f"({', '.join(others) or 'the stage has no other'}), or remove only_if",
                )

    def _reward_columns_read(self) -> frozenset[str]:
        """The columns with rewards in them that the update depends on."""
        read: set[str] = set()
        for loss in self.counted:
            if loss.source == "rollout":
                read |= loss.required_columns()
        if "advantages" in read:
            read |= self.estimator.reward_columns()
        if self.stage.resample is not None or self.stage.drop_groups == "zero_advantage":
            read.add("rewards")
        return frozenset(read)

    def _rewards_reached(self, built: list[Any], read: frozenset[str]) -> tuple[set[int], str]:
        """Positions of the rewards in `read`, where their sum is not, and who reads it that way."""
        who = f"advantage '{self.estimator.name}'"
        if not any("advantages" in loss.required_columns() for loss in self.counted):
            who = f"policy loss {', '.join(repr(loss.name) for loss in self.counted)}"
        reached: set[int] = set()
        kinds: list[str] = []
        if "reward_components" in read:
            weights = getattr(self.estimator.config, "weights", None) or (1.0,) * len(built)
            reached |= {index for index, weight in enumerate(weights) if weight}
            kinds.append("rewards that its `weights` name")
        if "step_score" in read:
            reached |= set([i for i, reward in enumerate(built) if reward.gives_steps][:1])
            kinds.append("step scores of the first reward that scores steps")
        if "acc" in read:
            reached |= {i for i, reward in enumerate(built) if reward.is_verdict}
            kinds.append("the task's verdict")
        return reached, f"{who} reads only {' and '.join(kinds) or 'columns without rewards'}"

    def sampler(self) -> Iterable[str]:
        sampler, size = self.build("sampler", self.stage.sampler), self.stage.num_generations
        if size < sampler.smallest_group():
            yield self.line(
                "num_generations",
                f"sampler '{sampler.name}' looks for prompts whose responses differ, which a group "
                f"of {size} never does; use num_generations: {sampler.smallest_group()} or more, "
                "or the sampler 'group'",
            )

    def critic(self) -> Iterable[str]:
        """A critic nobody reads, or one without its source."""
        critic = self.stage.critic
        if critic is None:
            return
        if "values" not in self.estimator.required_columns():
            yield self.line(
                "critic",
                f"advantage '{self.estimator.name}' reads no values, so the critic would be "
                "trained for nothing; set critic: null, or use an advantage such as 'gae'",
            )
        if (critic.init == "checkpoint") != (critic.path is not None):
            yield self.line(
                "critic.path",
                "`init: checkpoint` and `path: <directory>` belong together; set both or neither",
            )
        elif critic.path is not None and not Path(critic.path).expanduser().is_dir():
            yield self.line(
                "critic.path",
                f"there is no folder '{critic.path}', which should hold a saved critic; relative "
                f"paths start at {Path.cwd()}",
            )

    def implicit_prm(self) -> Iterable[str]:
        """A process reward model nobody reads, or whose reference would not stay."""
        if self.stage.implicit_prm is None:
            return
        if "process_rewards" not in self.estimator.required_columns():
            yield self.line(
                "implicit_prm",
                f"advantage '{self.estimator.name}' reads no process rewards, so the model would "
                "be trained for nothing; set implicit_prm: null, or use advantage: prime",
            )
        if self.stage.kl.moves:
            yield self.line(
                "implicit_prm",
                "its rewards are log-ratios to the stage's input model, and the reference moves; "
                "remove kl.refresh_every and kl.ref_update",
            )

    def kl(self) -> Iterable[str]:
        """KL settings without a KL term, and an exact KL where only sampled ones can stand."""
        kl = self.stage.kl
        if kl.moves and not self.has_reference():
            field, off = ("refresh_every", 0) if kl.refresh_every else ("ref_update", "null")
            yield self.line(
                f"kl.{field}",
                "there is no reference policy to refresh, because the KL coefficient is 0; set "
                f"kl.controller.coef above 0, or {field}: {off}",
            )
        if kl.refresh_every and kl.ref_update is not None:
            yield self.line(
                "kl.ref_update",
                "the reference follows one rule, and refresh_every is another; keep one of them",
            )
        estimator = self.build("kl", kl.estimator)
        updates = self.stage.epochs * self.stage.num_mini_batches
        if kl.ref_update is not None and estimator.from_logits and updates > 1:
            yield self.line(
                "kl.ref_update",
                f"'{kl.estimator.name}' computes the reference in each of the {updates} updates of "
                "a rollout batch, and it would move between them; use an estimate of sampled "
                "tokens, such as 'k3', or one update per batch",
            )
        if kl.place == "reward" and estimator.from_logits:
            yield self.line(
                "kl.estimator",
                f"'{kl.estimator.name}' needs both models' logits, which a reward does not have; "
                "use 'k1' in the reward, or place: loss",
            )

    def entropy(self) -> Iterable[str]:
        """A fixed coefficient in addition to a controller's."""
        controller = self.stage.entropy_controller
        if controller is not None and self.stage.entropy_coef > 0:
            yield self.line(
                "entropy_coef",
                f"entropy_controller '{controller.name}' has a coefficient of its own; set "
                "entropy_coef: 0, and where the controller starts among its own fields",
            )

    def correction(self) -> Iterable[str]:
        """Counts that would have to be known before they can be."""
        from posttrain.core.contracts import RolloutCorrection

        section = self.stage.rollout_correction
        plugin = self.build("rollout_correction", section.plugin)
        if section.renormalise and type(plugin).keeps is not RolloutCorrection.keeps:
            yield self.line(
                "rollout_correction.renormalise",
                f"'{plugin.name}' decides in each micro-batch what it keeps, so the count of kept "
                "tokens is not known before the first; set renormalise: false",
            )
        generation = self.stage.generation
        if section.bypass_old and (generation.top_k > 0 or generation.top_p < 1):
            yield self.line(
                "rollout_correction.bypass_old",
                "the engine's log-probs are renormalised over what top_k and top_p keep, and the "
                "policy's are not, so their ratio would not start at 1; set bypass_old: false, or "
                "generation.top_p: 1 and top_k: 0",
            )

    def sampling(self) -> Iterable[str]:
        """A sampler that cannot do with this group size, or without an environment."""
        sampler = self.build("sampler", self.stage.sampler)
        if sampler.needs_environment and self.stage.environment is None:
            yield self.line(
                "sampler",
                f"'{sampler.name}' branches after observations, which only an environment gives; "
                "add `environment: {name: tools, tools: [calculator]}`, or set sampler: group",
            )
        if self.stage.schedule == "streaming" and not sampler.is_plain:
            yield self.line(
                "schedule",
                f"streaming takes groups as they are done, and sampler '{sampler.name}' chooses "
                "them itself; set sampler: group, or schedule: steps",
            )
        section = self.stage.rollout_correction
        corrects = section.plugin.name != "none" or bool(section.plugin.fields().get("reject"))
        if sampler.needs_correction and not corrects and not section.bypass_old:
            yield self.line(
                "rollout_correction.plugin",
                f"sampler '{sampler.name}' trains on groups up to {sampler.max_lag()} policy "
                "versions old, which 'none' does not correct; leave it out for 'tis_token', or set "
                "rollout_correction.bypass_old: true",
            )
        refused = sampler.refuses(self.stage.num_generations)
        if refused:
            yield self.line("sampler", refused)
        read = {} if self.stage.environment is None else self.stage.environment.paths()
        for field, path in read.items():
            if not Path(path).expanduser().exists():
                yield self.line(
                    field, f"there is no file or folder '{path}'; paths start at {Path.cwd()}"
                )

    def trust_region(self) -> Iterable[str]:
        """What a loss with its own optimizer step cannot be combined with."""
        owners = [loss for loss in self.losses if loss.owns_update]
        if not owners:
            return
        name = owners[0].name
        if len(self.losses) > 1:
            yield self.line(
                "policy_loss",
                f"'{name}' takes its own optimizer step, so no other term can be added to it; keep "
                "one of them",
            )
        if self.controller_coefficient() > 0 and self.stage.kl.place == "loss":
            yield self.line(
                "kl",
                f"'{name}' bounds its step by a KL to the rollout's policy and takes no KL term in "
                "the loss; set kl.controller: {name: fixed, coef: 0}, or place: reward",
            )
        if not isinstance(self.stage.optimizer, OptimizerSection):
            yield self.line(
                "optimizer",
                f"'{name}' takes its own optimizer step, so optimizer "
                f"'{self.stage.optimizer.name}' would not be used; remove optimizer.name and its "
                "fields",
            )
        if self.loaded.config.model.dtype != "float32":
            yield self.loaded.problem(
                "model.dtype",
                f"policy loss '{name}' solves for its step, which bfloat16 is too coarse for; use "
                "float32",
            )

    def precision(self) -> Iterable[str]:
        place = ("stages", self.name)
        yield from check_precision(self.stage.optimizer, (*place, "optimizer"), self.loaded)
        if self.stage.critic is not None:
            critic = (*place, "critic", "optimizer")
            yield from check_precision(self.stage.critic.optimizer, critic, self.loaded)
        if self.stage.implicit_prm is not None:
            prm = (*place, "implicit_prm", "optimizer")
            yield from check_precision(self.stage.implicit_prm.optimizer, prm, self.loaded)

    def ranks(self) -> Iterable[str]:
        if not self.loaded.config.trains_elsewhere:
            return
        fix = self.loaded.config.train_here
        for loss in self.losses:
            if loss.owns_update:
                yield self.line(
                    "policy_loss",
                    f"'{loss.name}' solves for its step with whole weights, which no rank has; "
                    f"{fix}",
                )
