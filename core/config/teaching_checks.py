"""What a stage with teachers cannot be: each impossible setting with what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from posttrain.core.config.base import Component
from posttrain.core.config.loading import LoadedConfig
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.teachers import TEACHER
from posttrain.core.contracts import TEACHER_COLUMNS, TEXT_COLUMNS

ADD_ONE = (
    "add `inputs: {teacher: <stage>}`, or `teachers` with the `model` of a folder or a `base_url`"
)


class TeachingCheck:
    """The parts of one stage that learn from teachers, built, and its problems.

    `build` makes a plugin of a kind from a component, `line` a problem at a field of the stage.
    Any: plugins of whatever kind.
    """

    def __init__(
        self,
        stage: RlStage,
        loaded: LoadedConfig,
        losses: list[Any],
        estimator: Any,
        build: Callable[[str, Component], Any],
        line: Callable[[str, str], str],
    ) -> None:
        self.stage, self.loaded, self.line = stage, loaded, line
        self.losses, self.estimator = losses, estimator
        self.transforms = [build("advantage_transform", each) for each in stage.transforms]
        self.sampler = build("sampler", stage.sampler)
        self.distillation = None
        if stage.distillation is not None:
            self.distillation = build("distillation_loss", stage.distillation)

    def columns(self) -> frozenset[str]:
        """Columns that the teachers of the stage fill."""
        taught = self.stage.teachers or self.stage.learns_from_record
        return TEACHER_COLUMNS if taught else frozenset()

    def problems(self) -> Iterable[str]:
        yield from self.readers()
        yield from self.routing()
        yield from self.places()
        yield from self.own()
        yield from self.texts()
        yield from self.terms()
        yield from self.groups()

    def readers(self) -> Iterable[str]:
        """Somebody who reads no teacher, and a teacher whom nobody reads."""
        stage = self.stage
        reading = [each for each in self.losses if each.required_columns() & TEACHER_COLUMNS]
        reading += [each for each in self.transforms if each.required_columns() & TEACHER_COLUMNS]
        if self.distillation is not None:
            reading.append(self.distillation)
            if not stage.teachers and not stage.learns_from_record:
                yield self.line(
                    "distillation",
                    f"'{self.distillation.name}' learns from a teacher, and this stage has none; "
                    f"{ADD_ONE}",
                )
        if stage.teachers and not reading:
            where = f"inputs.{TEACHER}" if tuple(stage.teachers) == (TEACHER,) else "teachers"
            yield self.line(
                where,
                "nothing in this stage learns from a teacher, which would be asked for nothing; "
                "use `algorithm: opd` or `gkd`, add `advantage_transform: opd`, `policy_loss: "
                "ref_kl` or `distillation: gkd`, or remove it",
            )

    def routing(self) -> Iterable[str]:
        """Several teachers of whom nobody knows who judges what."""
        stage = self.stage
        if len(stage.teachers) > 1 and stage.teacher_routing is None:
            yield self.line(
                "teachers",
                f"there are {len(stage.teachers)} ({', '.join(stage.teachers)}), and nothing says "
                "which of them judges a problem; add `teacher_routing: {by: <field of the "
                "problem's metadata>}`",
            )
        if stage.teacher_routing is not None and not stage.teachers:
            yield self.line(
                "teacher_routing", f"this stage has no teacher to route to; {ADD_ONE}, or remove it"
            )
        if stage.teacher_routing is None and any(t.routes for t in stage.teachers.values()):
            yield self.line(
                "teachers",
                "`routes` are values of a field that nothing names; add `teacher_routing: {by: "
                "<field of the problem's metadata>}`, or remove them",
            )
        yield from self.balance()
        named = Counter(
            route for name, teacher in stage.teachers.items() for route in teacher.routes or (name,)
        )
        for route in sorted(route for route, times in named.items() if times > 1):
            yield self.line(
                "teachers", f"'{route}' is routed to {named[route]} teachers; keep one of them"
            )

    def balance(self) -> Iterable[str]:
        """Teachers that are to count alike where no term is theirs alone."""
        routing = self.stage.teacher_routing
        alone = [each for each in self.losses if each.required_columns() & TEACHER_COLUMNS]
        taught = self.estimator.is_zero and self.transforms
        if routing is None or routing.balance == "tokens":
            return
        if not alone and not taught and self.distillation is None:
            yield self.line(
                "teacher_routing.balance",
                "equal is for terms that read teachers alone, and here advantages hold rewards as "
                "well; set balance: tokens, or use `policy_loss: ref_kl` or advantage: zero",
            )

    def places(self) -> Iterable[str]:
        """Teachers that are not there, or cannot give what is read."""
        stage = self.stage
        reads_logits = self.distillation is not None and self.distillation.reads() == "logits"
        for name, teacher in stage.teachers.items():
            if teacher.folder is not None and not Path(teacher.folder).expanduser().is_dir():
                yield self.line(
                    f"teachers.{name}.model",
                    f"there is no folder '{teacher.folder}', which should hold the teacher; "
                    f"relative paths start at {Path.cwd()}",
                )
            if teacher.base_url is None:
                continue
            if reads_logits:
                few = "set support: topk and of: teacher, or give the teacher's folder"
                if self.by_text:
                    few = "give the teacher's folder"
                yield self.line(
                    "distillation",
                    f"it reads the whole vocabulary of teacher '{name}', and a server gives a few "
                    f"candidates; {few}",
                )
            if stage.generation.temperature != 1:
                yield self.line(
                    "generation.temperature",
                    f"the server of teacher '{name}' gives log-probs at temperature 1, and the "
                    f"policy's are at {stage.generation.temperature:g}, which would be compared; "
                    "set 1.0, or give the teacher's folder",
                )
        local = [name for name, teacher in stage.teachers.items() if teacher.base_url is None]
        if reads_logits and len(local) > 1 and self.loaded.config.trains_elsewhere:
            yield self.line(
                "teachers",
                "ranks cannot compute logits of several teachers, whose rows differ from rank to "
                f"rank; set support: topk and of: teacher, or {self.loaded.config.train_here}",
            )

    @property
    def by_text(self) -> bool:
        """Whether its teachers may have tokenizers of their own."""
        return self.distillation is not None and bool(
            self.distillation.required_columns() & TEXT_COLUMNS
        )

    def texts(self) -> Iterable[str]:
        """A comparison of texts where there is none, or next to one of tokens."""
        if self.distillation is None or not self.by_text:
            return
        stage, name = self.stage, self.distillation.name
        if stage.environment is not None:
            yield self.line(
                "distillation",
                f"'{name}' compares a response that is one text, and with an environment others "
                "write in between; remove `environment`, or use 'gkd' and a teacher of the "
                "policy's vocabulary",
            )
        for teacher, section in stage.teachers.items():
            if section.policy is not None:
                yield self.line(
                    f"teachers.{teacher}.policy",
                    f"the policy has its own tokens, and '{name}' is for a teacher of others; use "
                    "`distillation: gkd`",
                )
        for place, each in (
            *(("policy_loss", loss) for loss in self.losses),
            *(("advantage_transform", transform) for transform in self.transforms),
        ):
            if each.required_columns() & TEACHER_COLUMNS:
                yield self.line(
                    place,
                    f"'{each.name}' reads what the teacher says of the policy's tokens, and next "
                    f"to '{name}' the teacher reads its own; remove one of them",
                )

    def own(self) -> Iterable[str]:
        """The policy as its own teacher, with a context or weights that it cannot have."""
        stage = self.stage
        owns = {n: t.policy for n, t in stage.teachers.items() if t.policy is not None}
        reads_logits = self.distillation is not None and self.distillation.reads() == "logits"
        for name, own in owns.items():
            field = f"teachers.{name}.policy"
            if stage.environment is not None:
                yield self.line(
                    field,
                    "a context is put into the prompt, and with an environment the prompt is not "
                    "the problem's own; remove `environment`, or use another teacher",
                )
            if own.context == "sibling":
                yield from self.siblings(f"{field}.context")
            if own.weights == "live" and reads_logits and self.loaded.config.trains_elsewhere:
                yield self.line(
                    f"{field}.weights",
                    "ranks cannot compute logits of the policy twice in one step; set weights: "
                    f"ema, or {self.loaded.config.train_here}",
                )
        averages = {own.ema_rate for own in owns.values() if own.weights == "ema"}
        if averages and stage.kl.moves:
            yield self.line(
                "teachers",
                "a stage has one copy of the policy that follows it, and both the reference and a "
                "teacher with weights: ema would be one; set weights: base or live, or a fixed "
                "reference",
            )
        if len(averages) > 1:
            yield self.line(
                "teachers", "teachers with weights: ema are one model; give them one `ema_rate`"
            )

    def siblings(self, field: str) -> Iterable[str]:
        """Groups in which no response can be another one's teacher."""
        stage = self.stage
        if stage.num_generations < 2:
            yield self.line(
                field, "a sibling is another response to the same prompt; set num_generations: 2"
            )
        if not stage.rewards:
            yield self.line(
                field, "a sibling succeeds by its reward, and there is none; add `rewards`"
            )
        if stage.reward_whiten != "none":
            yield self.line(
                "reward_whiten",
                "a sibling succeeds by the reward itself, which whitening changes; set none",
            )

    def terms(self) -> Iterable[str]:
        """Losses that cannot take what the teacher's part makes of advantages, or none at all."""
        if not self.losses and self.distillation is None:
            yield self.line(
                "policy_loss",
                "without a policy loss there is nothing to learn; name one, or add `distillation`",
            )
        generation, by_engine = self.stage.generation, {"teacher_logprobs", "rollout_logprobs"}
        for place, each in (
            *(("policy_loss", loss) for loss in self.losses),
            *(("advantage_transform", transform) for transform in self.transforms),
        ):
            cuts = generation.top_k > 0 or generation.top_p < 1
            if cuts and by_engine <= each.required_columns():
                yield self.line(
                    place,
                    f"'{each.name}' compares the teacher with the engine's log-probs, which are "
                    "renormalised over what top_k and top_p keep; set anchor: old on it, or "
                    "generation.top_p: 1 and top_k: 0",
                )
        owners = [loss.name for loss in self.losses if loss.owns_update]
        if owners and self.distillation is not None:
            yield self.line(
                "distillation",
                f"'{owners[0]}' takes its own optimizer step, so no other term can be added to it; "
                "use another policy loss",
            )
        reading = [each for each in self.losses if "advantages" in each.required_columns()]
        if self.transforms and not reading:
            yield self.line(
                "advantage_transform",
                "it changes advantages, which no policy loss of this stage reads; add one such as "
                "'ppo_clip', or remove it",
            )
        for transform in self.transforms:
            whole = [e for e in reading if getattr(e.config, "adv_reduce", "mean") == "none"]
            whole = [e for e in whole if not _by_token(e)]
            if transform.varies_in_a_row() and whole:
                yield self.line(
                    "advantage_transform",
                    f"'{transform.name}' gives the tokens of a response different advantages, and "
                    f"'{whole[0].name}' has one ratio per response; use a loss by token such as "
                    "'ppo_clip', or set adv_reduce: mean on it",
                )
        learns = self.transforms or self.distillation is not None
        if self.estimator.is_zero and not learns and len(reading) == len(self.losses):
            yield self.line(
                "advantage",
                f"'{self.estimator.name}' leaves nothing to learn; add `advantage_transform: opd` "
                "or `distillation: gkd`, or use another advantage",
            )

    def groups(self) -> Iterable[str]:
        """Groups left out for their rewards, although the teacher has something to say of them."""
        signals = [each.name for each in self.transforms if each.carries_signal()]
        signals += [each.name for each in self.losses if each.required_columns() & TEACHER_COLUMNS]
        signals += [] if self.distillation is None else [self.distillation.name]
        if not signals:
            return
        why = f"'{signals[0]}' learns from groups of equal rewards as well"
        if self.stage.drop_groups != "none":
            yield self.line("drop_groups", f"{why}; set drop_groups: none")
        if self.sampler.name == "dynamic":
            yield self.line(
                "sampler", f"{why}, which sampler 'dynamic' replaces; set sampler: group"
            )


def _by_token(loss: Any) -> bool:  # Any: a policy loss
    """Whether its ratio is one per token although it could be one per response."""
    return getattr(loss.config, "ratio_level", "sequence") == "token"
