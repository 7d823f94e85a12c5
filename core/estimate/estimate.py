"""Time, memory and disk of each stage, from its tokens, the model's shape and a machine's rates.

A forward pass takes 2 FLOPs per weight and token, training 6, or 8 with gradient checkpointing, or
4 with LoRA, which needs no gradients of the weights. All rows are counted as computed: rows that
are left out and results that are reused make a run quicker than its estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from posttrain.core.config.base import StageBase
from posttrain.core.config.distill_stage import RecordTeacherStage
from posttrain.core.config.evaluation_stages import BenchmarkStage, EvaluateStage
from posttrain.core.config.fork_section import StepStage
from posttrain.core.config.gate_stages import PromoteStage
from posttrain.core.config.preference_stages import (
    PAIR_PROMPTS_PER_CALL,
    PreferenceDataStage,
    PreferenceStage,
    ProcessRewardModelStage,
    RewardModelStage,
)
from posttrain.core.config.rl_stage import CriticSection, ImplicitPrmSection, RlStage
from posttrain.core.config.schema import BUILT_IN, TransformStage
from posttrain.core.config.sections import EvaluationSection
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.config.suites import HELD_OUT
from posttrain.core.contracts import KlController, ModelSize, Optimizer, PolicyLoss, PreferenceLoss
from posttrain.core.contracts.stage import faults_of_plugin
from posttrain.core.estimate import memory
from posttrain.core.estimate.rates import Rates
from posttrain.core.estimate.shape import ModelShape
from posttrain.core.estimate.tokens import ASSUMED_TOKENS, Lengths, Rows, RunData

GB = 1e9
LOADING_S, FILE_BYTES_S = 1.0, 0.5e9
"""Assumed time to start a stage, and speed of reading, writing and digesting files."""
ADAMW_BYTES, DRAW_BYTES = 46, 24
"""Memory traffic of a fused AdamW step per parameter (weight, gradient and moments read, three of
them written, norm, clipping, the bfloat16 copy), and of drawing a token per logit."""
ASSUMED_STEPS = 3
"""Steps of an answer that a process reward model's stage goes on from."""

Judged = RewardModelStage | PreferenceStage | ProcessRewardModelStage
Training = SftStage | Judged | RlStage


class Pass(NamedTuple):
    """Rows that go through a model, so many `times` in a mean step, and `once` in the whole stage.

    They are `sampled` by the engine, or the model of the config's section `trained` learns from
    them, or they get log-probs or scores. A model without `head` makes no logits of a vocabulary.
    """

    phase: str
    rows: Rows
    times: float = 1.0
    once: float = 0.0
    sampled: bool = False
    trained: Training | CriticSection | ImplicitPrmSection | None = None
    head: bool = True


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage does in its steps.

    A pass has its part of the run's `time/*_s`; `phases` are such parts without passes, in seconds
    of a mean step. `held` counts the other models in this process, by what they are.
    """

    steps: int
    passes: Sequence[Pass] = ()
    held: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimator:
    """A run's model on one machine.

    `engine` decodes at most `engine_rows` sequences together and holds `engine_bytes` in this
    process. A number takes `weight_bytes` in a model that is trained and `compute_bytes` elsewhere.
    """

    data: RunData
    lengths: Lengths
    shape: ModelShape
    rates: Rates
    engine: str
    engine_rows: int
    engine_bytes: float
    weight_bytes: int
    compute_bytes: int

    def stages(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Figures of the stages of those names, which run in that order, in seconds and GB.

        Of the parts of `memory` named in `PASSING` only the largest is there at a time. A stage
        whose work nobody knows is left out.
        """
        found, engine_runs, config = {}, False, self.data.config
        for name in names:
            stage = config.stages[name]
            if isinstance(stage, PromoteStage):  # evaluates the champion as the model was
                stage = config.stages[stage.inputs["evaluation"]]
            if isinstance(stage, BenchmarkStage):
                if set(stage.suites) != {HELD_OUT}:
                    continue
                section = config.evaluation
                count = min(section.num_problems, stage.limit or section.num_problems)
                limited = section.model_copy(update={"num_problems": count})
                stage = EvaluateStage(kind="evaluate", inputs=stage.inputs, evaluation=limited)
            if stage.kind in BUILT_IN:
                work = self.work(stage)
                engine_runs = engine_runs or any(each.sampled for each in work.passes)
                found[name] = self._built_in(stage, work, engine_runs)
                continue
            size = ModelSize(self.shape.total, float(self.compute_bytes * self.shape.total))
            with faults_of_plugin(name, stage, "estimate"):
                said = self.data.manager.stage(stage).estimate(size)
            if said is not None:
                held, disk = {"stage": said.memory_gb * GB}, said.disk_gb * GB
                found[name] = self._row(0, {}, said.seconds, held, disk, disk)
        return found

    def _built_in(self, stage: StageBase, work: Work, engine_runs: bool) -> dict[str, Any]:
        """Figures of a stage of ours, with its checkpoints and the files of its model."""
        steps, file = work.steps, self.compute_bytes * self.shape.total
        phases, once, left, more = dict(work.phases), 0.0, 0.0, 0.0
        for each in work.passes:
            seconds = self.seconds(each)
            phases[each.phase] = phases.get(each.phase, 0.0) + each.times * seconds
            once += each.once * seconds
        if isinstance(stage, StepStage) and stage.fork is not None:
            steps = max(0, steps - stage.fork.step)  # those it shares are not computed
        models = self._models(work)
        if isinstance(stage, Training):
            keep, weights = self.data.config.keep, models[0].held["weights"]
            size = sum(model.checkpoint for model in models)
            written = memory.checkpoints(stage.checkpoint_every, steps, keep.every)
            if keep.checkpoint_minutes:
                spent = steps * sum(phases.values())
                written = max(written, int(spent // (60 * keep.checkpoint_minutes)))
            staying = memory.checkpoints(0, steps, keep.every)
            left = weights + staying * size
            more = min(1 + keep.checkpoints, written - staying) * size
            once += weights / FILE_BYTES_S
            phases["checkpoint"] = written * size / FILE_BYTES_S / max(1, steps)
        if steps:
            once += LOADING_S + file / FILE_BYTES_S
        parts = self._memory(work, models, engine_runs)
        return self._row(steps, phases, once, parts, left, left + more)

    def _row(
        self,
        steps: int,
        phases: Mapping[str, float],
        once: float,
        parts: Mapping[str, float],
        disk: float,
        disk_peak: float,
    ) -> dict[str, Any]:
        step, peak = sum(phases.values()), memory.peak(parts)
        return {
            "steps": steps,
            "step_s": round(step, 4),
            "phases": {phase: round(seconds, 4) for phase, seconds in phases.items()},
            "seconds": round(steps * step + once, 2),
            "memory_gb": round(peak / GB, 3),
            "memory": {part: round(size / GB, 3) for part, size in parts.items()},
            "fits": peak <= self.rates.memory,
            "disk_gb": round(disk / GB, 4),
            "disk_peak_gb": round(disk_peak / GB, 4),
        }

    def _models(self, work: Work) -> list[memory.TrainedModel]:
        """The models that a stage trains, the one that it makes first."""
        found = []
        for each in work.passes:
            if (learner := each.trained) is not None:
                name, fields = learner.optimizer.name, learner.optimizer.fields()
                optimizer = self.data.manager.build(Optimizer, name, fields)
                asked = self.shape, learner.lora, optimizer, self.weight_bytes
                found.append(memory.trained_model(*asked, head=each.head))
        return found

    def _memory(
        self, work: Work, models: Sequence[memory.TrainedModel], engine_runs: bool
    ) -> dict[str, float]:
        """Bytes by what holds them; an engine that was started stays."""
        on_gpu, shape, each = self.rates.on_gpu, self.shape, self.compute_bytes
        parts = {"libraries": memory.GPU_CONTEXT if on_gpu else memory.CPU_LIBRARIES}
        parts |= {"engine": self.engine_bytes} if engine_runs else {}
        if self.engine == "transformers":
            for rows in (one.rows for one in work.passes if one.sampled):
                together = rows._replace(number=min(rows.number, self.engine_rows))
                cache = memory.cache_bytes(shape, together, each)
                parts["sampling"] = max(parts.get("sampling", 0.0), cache)
        for model in models:
            parts |= {name: parts.get(name, 0.0) + size for name, size in model.held.items()}
        whole = float(self.weight_bytes * shape.total)
        parts |= {name: count * whole for name, count in work.held.items()}
        trained = next((one for one in work.passes if one.trained is not None), None)
        if trained is None:
            return parts
        parts["training"] = memory.kept_for_backward(
            shape,
            trained.rows,
            each,
            head=trained.head,
            checkpointing=self.data.config.model.gradient_checkpointing,
            on_gpu=on_gpu,
        )
        if not on_gpu:
            used = memory.peak(parts) - parts["libraries"]
            parts["fragmentation"] = memory.FRAGMENTATION * used
        return parts

    def work(self, stage: StageBase) -> Work:
        """What a stage of a built-in kind does."""
        if isinstance(stage, SftStage):
            return self._sft(stage)
        if isinstance(stage, Judged):
            return self._judged(stage)
        if isinstance(stage, RlStage):
            return self._rl(stage)
        if isinstance(stage, RecordTeacherStage) and stage.teacher is None:
            return self._record(stage)
        if isinstance(stage, EvaluateStage):
            section = stage.evaluation or self.data.config.evaluation
            passes = self._evaluation("evaluate", stage, section, 1, section.num_samples)
            judges = float("reward_model" in stage.inputs)  # scores the sampled answers
            scoring = [
                last._replace(times=judges * last.times, sampled=False, head=False)
                for last in passes[-1:]
            ]
            return Work(len(scoring), [*passes, *scoring], {"reward models": judges})
        if isinstance(stage, TransformStage) and stage.rewrite != "rules":
            count, limit = stage.num_problems, stage.generation.max_response_length
            count, groups = self.data.count("train", count), (1, stage.num_solutions)
            return Work(
                1, self._sampling("generate", stage, limit, count, stage.batch_size, *groups)
            )
        return Work(0, phases={"generate": 0.0})

    def _sft(self, stage: SftStage) -> Work:
        mean, longest = self.lengths.worked or (ASSUMED_TOKENS, ASSUMED_TOKENS)
        given = self.data.supervised(stage, self.lengths.prompt + mean)
        rows = Rows(given.batch, 1, stage.micro_batch_size, 0, given.tokens, given.longest, 0)
        if stage.data is None:  # else a row is a response, since most of a chat may be learned
            prompt, shared = self.lengths.prompt, self.lengths.shared
            rows = rows._replace(prompt=prompt, response=mean, longest=longest, shared=shared)
        return Work(given.steps, [Pass("update", rows, trained=stage)])

    def _judged(self, stage: Judged) -> Work:
        """Of a stage on pairs, which are two rows each, or on answers whose steps have labels."""
        given, head = self.data.judged(stage), isinstance(stage, PreferenceStage)
        batch = math.ceil(stage.epochs * given.train / max(1, given.steps))
        limit, groups = stage.generation.max_response_length, [stage.num_generations]
        count, together = 0 if stage.data else stage.num_prompts, PAIR_PROMPTS_PER_CALL
        if isinstance(stage, PreferenceStage) and (online := stage.online) is not None:
            batch = min(batch, stage.batch_size)  # a round's pairs beyond its steps are not used
            count, groups = online.rounds * online.prompts_per_round, [online.num_generations]
            together = min(together, online.prompts_per_round)
        if isinstance(stage, ProcessRewardModelStage):
            groups.append(stage.num_generations * ASSUMED_STEPS * stage.num_continuations)
        sampled = self._sampling("update", stage, limit, count, together, *groups)
        passes = [one._replace(times=0.0, once=one.times) for one in sampled]  # before the steps
        each = 2 if isinstance(stage, PreferenceDataStage) else 1
        rows = self._rows(stage, limit, each * batch, each, each * stage.micro_batch_size)
        if given.longest:
            rows = rows._replace(response=given.tokens, longest=given.longest)
        passes.append(Pass("update", rows, trained=stage, head=head))
        reference = isinstance(stage, PreferenceStage) and self._compares(stage)
        ranked = (1 + reference) * each * given.held_out / max(1, rows.number)
        passes.append(Pass("update", rows, float(reference), ranked, head=head))
        held = {"reference": 1} if reference and stage.lora is None else {}
        return Work(given.steps, passes, held)

    def _record(self, stage: RecordTeacherStage) -> Work:
        """Of a teacher that is the input model."""
        limit, group = stage.generation.max_response_length, stage.num_generations
        count = self.data.count("train", stage.num_problems)
        rows = self._rows(stage, limit, count * group, group, stage.micro_batch_size)
        if stage.samples_here:
            asked = self._sampling("generate", stage, limit, count, stage.problems_per_file, group)
            return Work(1, [*asked, Pass("score", rows)])
        if self.lengths.worked is not None:
            mean, longest = self.lengths.worked
            rows = rows._replace(response=min(mean, limit), longest=min(longest, limit))
        return Work(1, [Pass("score", rows)], phases={"generate": 0.0})

    def _rl(self, stage: RlStage) -> Work:
        limit, group = stage.generation.max_response_length, stage.num_generations
        count = stage.prompts_per_step * group
        micro = min(stage.micro_batch_size, count // stage.num_mini_batches)
        rows = self._rows(stage, limit, count, group, micro)
        if stage.max_tokens_per_microbatch is not None:
            most = int(stage.max_tokens_per_microbatch / (rows.response + rows.prompt / group))
            rows = rows._replace(micro=min(micro, max(1, most)))
        reference, scored, slower = self._update(stage)
        scoring = "advantage" if reference and stage.kl.place == "reward" else "update"
        judges = sum(reward.name == "reward_model" for reward in stage.rewards)
        passes = [
            Pass("rollout", rows, stage.on_policy_share, sampled=True),
            Pass("score", rows, judges, head=False),
            Pass(scoring, rows, scored),
            Pass("update", rows, slower * stage.epochs, trained=stage),
        ]
        for part, head in ((stage.critic, False), (stage.implicit_prm, True)):
            if part is not None:
                passes.append(Pass("advantage", rows, head=head))
                passes.append(Pass("update", rows, part.epochs, trained=part, head=head))
        whole = self.data.config.evaluation
        asked = {"evaluate": (whole, 1, stage.evaluate_every)}
        if (more := stage.sampled_evaluation) is not None:
            asked["evaluate_sampled"] = (more.as_evaluation(whole), more.k, more.every)
        for phase, (section, group, every) in asked.items():
            for one in self._evaluation(phase, stage, section, group) if every else ():
                due = one.times * math.ceil(stage.steps / every) / stage.steps
                passes.append(one._replace(times=due, once=one.times))  # before the first step too
        local = [teacher for teacher in stage.teachers.values() if teacher.base_url is None]
        # With seq_kd an engine of its own has a teacher's weights again.
        teachers = stage.seq_kd * len(local) + sum(t.weights != "live" for t in local)
        held = {"reward models": judges, "teachers": teachers}
        if reference and stage.lora is None:
            held["reference"] = 1
        copy = 2 * self.compute_bytes * self.shape.total / self.rates.bytes_s
        phases = dict.fromkeys(("advantage", "sync_check", "evaluate", "evaluate_sampled"), 0.0)
        phases |= {"sync": copy} | ({"sync_check": copy} if stage.check_sync == "every" else {})
        return Work(stage.steps, passes, held, phases)

    def _update(self, stage: RlStage) -> tuple[bool, int, float]:
        """Whether a stage has a reference, how many passes give log-probs before its update, and
        how often the update goes forward and back."""
        build, controller = self.data.manager.build, stage.kl.controller
        kl: KlController[Any] = build(KlController, controller.name, controller.fields())
        losses = [build(PolicyLoss, term.name, term.fields()) for term in stage.loss_terms]
        reading = any("ref_logprobs" in loss.required_columns() for loss in losses)
        reference = reading or stage.implicit_prm is not None or kl.coefficient() > 0
        owner: Any = next((loss.config for loss in losses if loss.owns_update), None)
        old = (
            owner is not None
            or stage.epochs * stage.num_mini_batches > 1
            or (reference and stage.kl.place == "reward")
            or stage.rollout_correction.plugin.name != "none"
            or any(loss.needs_prepare() for loss in losses)
        )
        # Each response by one of the teachers.
        taught = any(teacher.base_url is None for teacher in stage.teachers.values())
        slower = 1.0
        if owner is not None:  # a product with the Fisher matrix is a second backward pass
            slower += 2 * owner.cg_iters * owner.fvp_token_fraction
        return reference, old + reference + taught, slower

    def _compares(self, stage: PreferenceStage) -> bool:
        """Whether a loss compares with a frozen copy of the stage's input model."""
        find = self.data.manager.find
        losses = [find("preference_loss", term.name).cls for term in stage.loss_terms]
        reading = (issubclass(loss, PreferenceLoss) and loss.needs_reference for loss in losses)
        return not stage.reference_free and any(reading)

    def _rows(self, stage: StageBase, limit: int, number: int, group: int, micro: int) -> Rows:
        """Rows with the responses of the stage's model, of at most `limit` tokens."""
        mean, longest = self.lengths.response(self.data.config, stage, limit)
        prompt, shared = self.lengths.prompt, self.lengths.shared
        return Rows(number, group, micro, prompt, mean, longest, shared)

    def _sampling(
        self, phase: str, stage: StageBase, limit: int, count: int, batch: int, *groups: int
    ) -> list[Pass]:
        """So many responses to each of `count` problems, `batch` problems together."""
        if not count:
            return []
        batch = min(batch, count)
        calls = [self._rows(stage, limit, batch * n, n, batch * n) for n in groups if n]
        return [Pass(phase, rows, count / batch, sampled=True) for rows in calls]

    def _evaluation(
        self, phase: str, stage: StageBase, section: EvaluationSection, *groups: int
    ) -> list[Pass]:
        limit, count = section.max_response_length, section.num_problems
        count = self.data.count("held_out", count)
        return self._sampling(phase, stage, limit, count, section.batch_size, *groups)

    def seconds(self, each: Pass) -> float:
        """Seconds of a pass."""
        if each.sampled:
            return self.generate(each.rows)
        if each.trained is None:
            return self.forward(each.rows, head=each.head)
        lora = each.trained.lora
        work = 4 if lora else 8 if self.data.config.model.gradient_checkpointing else 6
        updates = getattr(each.trained, "num_mini_batches", 1)
        traffic = updates * self.shape.trained(lora, head=each.head) * ADAMW_BYTES
        return self.forward(each.rows, head=each.head, work=work) + traffic / self.rates.bytes_s

    def forward(self, rows: Rows, *, head: bool = True, work: int = 2) -> float:
        """Seconds of a pass of all rows without gradients; `work` is 2 FLOPs for each weight."""
        shape, rates = self.shape, self.rates
        attention = shape.attention_width * (rows.prompt + rows.response) * shape.layers
        products = (shape.active + attention) * rows.tokens
        products += shape.hidden * shape.vocabulary * rows.number * rows.response if head else 0
        fixed = rows.passes * shape.layers * rates.layer_s * work / 2
        return fixed + work * products / (rates.forward_flops if work == 2 else rates.train_flops)

    def generate(self, rows: Rows) -> float:
        """Read the prompts, then decode; each pass reads all weights, and keys and values so far.

        The transformers engine reads a group's prompt once; others read it once for each response
        and, on a GPU, have no fixed time per layer.
        """
        shape, rates, plain = self.shape, self.rates, self.engine == "transformers"
        output = shape.hidden * shape.vocabulary
        prompts = rows.number / (rows.group if plain else 1)
        own = prompts * (rows.prompt - plain * rows.shared)
        seconds = 2 * (shape.active * own + output * prompts) / rates.forward_flops
        passes = math.ceil(rows.number / self.engine_rows) * max(1, rows.longest - 1)
        tokens, weights = rows.number * (rows.response - 1), shape.active + output
        reread = passes * self.compute_bytes * weights / rates.bytes_s
        seconds += max(2 * weights * tokens / rates.forward_flops, reread)
        if plain or not rates.on_gpu:
            seconds += passes * shape.layers * rates.layer_s
        numbers = tokens * (rows.prompt + rows.response / 2) * shape.kv_width * shape.layers
        drawn = rows.number * rows.response * shape.vocabulary * DRAW_BYTES
        return seconds + (numbers * self.compute_bytes + drawn) / rates.bytes_s
