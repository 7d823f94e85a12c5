"""Time, memory and disk of each stage, from its tokens, the model's shape and a machine's rates.

A forward pass takes 2 FLOPs per weight and token, training 6, or 8 with gradient checkpointing, or
4 with LoRA, which needs no gradients of the weights. All rows are counted as computed: rows that
are left out and results that are reused make a run quicker than its estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import BUILT_IN, TransformStage
from posttrain.core.config.sections import LoraSection
from posttrain.core.config.sft_stage import SftStage
from posttrain.core.config.suites import HELD_OUT
from posttrain.core.contracts import KlController, ModelSize, Optimizer, PolicyLoss, PreferenceLoss
from posttrain.core.contracts.stage import faults_of_plugin
from posttrain.core.estimate import memory
from posttrain.core.estimate.rates import Rates
from posttrain.core.estimate.shape import ModelShape
from posttrain.core.estimate.tokens import Lengths, Rows, RunData

GB = 1e9
LOADING_S, FILE_BYTES_S = 1.0, 0.5e9
"""Assumed time to start a stage, and speed of reading, writing and digesting files."""
ADAMW_BYTES, DRAW_BYTES = 46, 24
"""Memory traffic of a fused AdamW step per parameter (weight, gradient and moments read, three of
them written, norm, clipping, the bfloat16 copy), and of drawing a token per logit."""

Training = SftStage | RewardModelStage | ProcessRewardModelStage | PreferenceStage | RlStage
HEADLESS = RewardModelStage | ProcessRewardModelStage
"""Stages that train a model with a scalar head, which makes no logits of a vocabulary."""
ASSUMED_STEPS = 3
"""Steps of an answer that a process reward model's stage goes on from."""


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

        `phases` are of a mean step, named as the run's `time/*_s`. Of the parts of `memory` named
        in `PASSING` only the largest is there at a time.
        """
        found, engine_runs = {}, False
        for name in names:
            stage = self.data.config.stages[name]
            if isinstance(stage, PromoteStage):  # evaluates the champion as the model was
                stage = self.data.config.stages[stage.inputs["evaluation"]]
            if isinstance(stage, BenchmarkStage):
                evaluation = self._as_evaluation(stage)
                if evaluation is None:
                    continue
                stage = evaluation
            if stage.kind not in BUILT_IN:
                if (row := self._plugin_stage(name, stage)) is not None:
                    found[name] = row
                continue
            calls, batches = self.sampled(stage)
            engine_runs = engine_runs or bool(calls)
            steps, phases, once = self._time(stage, batches * sum(map(self.generate, calls)))
            if isinstance(stage, StepStage) and stage.fork is not None:
                steps = max(0, steps - stage.fork.step)  # those it shares are not computed
            left = more = 0.0
            if isinstance(stage, Training):
                models, keep = self._models(stage), self.data.config.keep
                each = sum(model.checkpoint for model in models)
                written = memory.checkpoints(stage.checkpoint_every, steps, keep.every)
                if keep.checkpoint_minutes:
                    spent = steps * sum(phases.values())
                    written = max(written, int(spent // (60 * keep.checkpoint_minutes)))
                staying = memory.checkpoints(0, steps, keep.every)
                left = models[0].held["weights"] + staying * each
                more = min(1 + keep.checkpoints, written - staying) * each
                once += models[0].held["weights"] / FILE_BYTES_S
                phases["checkpoint"] = written * each / FILE_BYTES_S / max(1, steps)
            if steps:
                once += LOADING_S + self.compute_bytes * self.shape.total / FILE_BYTES_S
            step, parts = sum(phases.values()), self._memory(stage, calls, engine_runs)
            peak = memory.peak(parts)
            found[name] = {
                "steps": steps,
                "step_s": round(step, 4),
                "phases": {phase: round(seconds, 4) for phase, seconds in phases.items()},
                "seconds": round(steps * step + once, 2),
                "memory_gb": round(peak / GB, 3),
                "memory": {part: round(size / GB, 3) for part, size in parts.items()},
                "fits": peak <= self.rates.memory,
                "disk_gb": round(left / GB, 4),
                "disk_peak_gb": round((left + more) / GB, 4),
            }
        return found

    def _as_evaluation(self, stage: BenchmarkStage) -> EvaluateStage | None:
        """The evaluation that `held_out` is; None with other suites, whose tokens nobody knows."""
        if set(stage.suites) != {HELD_OUT}:
            return None
        section = self.data.config.evaluation
        count = min(section.num_problems, stage.limit or section.num_problems)
        limited = section.model_copy(update={"num_problems": count})
        return EvaluateStage(kind="evaluate", inputs=stage.inputs, evaluation=limited)

    def _plugin_stage(self, name: str, stage: StageBase) -> dict[str, Any] | None:
        """What the plugin of a stage says that it takes; None where it does not say."""
        size = ModelSize(self.shape.total, float(self.compute_bytes * self.shape.total))
        with faults_of_plugin(name, stage, "estimate"):
            said = self.data.manager.stage(stage).estimate(size)
        if said is None:
            return None
        return {
            "steps": 0,
            "step_s": 0.0,
            "phases": {},
            "seconds": round(said.seconds, 2),
            "memory_gb": round(said.memory_gb, 3),
            "memory": {"stage": round(said.memory_gb, 3)},
            "fits": said.memory_gb * GB <= self.rates.memory,
            "disk_gb": round(said.disk_gb, 4),
            "disk_peak_gb": round(said.disk_gb, 4),
        }

    def _rows(self, count: int, group: int, micro: int, response: tuple[float, int]) -> Rows:
        return Rows(count, group, micro, self.lengths.prompt, *response, self.lengths.shared)

    def trained(self, stage: Training) -> Rows:
        """Rows of one step of a stage that trains; a pair is two rows."""
        if isinstance(stage, SftStage):
            worked = self.lengths.worked or (64.0, 64)
            rows = self.data.supervised(stage, self.lengths.prompt + worked[0])
            if stage.data is None:
                return self._rows(rows.batch, 1, stage.micro_batch_size, worked)
            # A row of a file is a response as a whole, since most of a chat may be learned.
            return Rows(rows.batch, 1, stage.micro_batch_size, 0, rows.tokens, rows.longest, 0)
        limit = stage.generation.max_response_length
        response = self.lengths.response(self.data.config, stage, limit)
        if isinstance(stage, RlStage):
            group, count = stage.num_generations, stage.prompts_per_step * stage.num_generations
            micro = min(stage.micro_batch_size, count // stage.num_mini_batches)
            if stage.max_tokens_per_microbatch is not None:
                tokens = response[0] + self.lengths.prompt / group
                micro = min(micro, max(1, int(stage.max_tokens_per_microbatch / tokens)))
            return self._rows(count, group, micro, response)
        if isinstance(stage, ProcessRewardModelStage):
            found = self.data.labelled_steps(stage)
            response = (found.answer, found.answer) if found.answer else response
            answers = math.ceil(stage.epochs * found.train / max(1, found.steps))
            return self._rows(answers, 1, stage.micro_batch_size, response)
        found = self.data.preferences(stage)
        response = (found.answer, found.answer) if found.answer else response
        pairs = math.ceil(stage.epochs * found.train / max(1, found.steps))
        if isinstance(stage, PreferenceStage) and stage.online is not None:
            pairs = min(pairs, stage.batch_size)  # a round's pairs beyond its steps are not used
        return self._rows(2 * pairs, 2, 2 * stage.micro_batch_size, response)

    def sampled(self, stage: StageBase) -> tuple[list[Rows], float]:
        """The engine's calls for one batch of problems, and how many batches there are."""
        groups, data = [0], self.data
        if isinstance(stage, RlStage):
            return [self.trained(stage)], stage.steps * stage.on_policy_share
        if isinstance(stage, EvaluateStage):
            section = stage.evaluation or data.config.evaluation
            count, batch = data.count("held_out", section.num_problems), section.batch_size
            groups, limit = [1, section.num_samples], section.max_response_length
        elif isinstance(stage, PreferenceStage) and stage.online is not None:
            online, limit = stage.online, stage.generation.max_response_length
            count, groups = online.rounds * online.prompts_per_round, [online.num_generations]
            batch = min(PAIR_PROMPTS_PER_CALL, online.prompts_per_round)
        elif isinstance(stage, PreferenceDataStage) and stage.data is None:
            count, batch, groups = stage.num_prompts, PAIR_PROMPTS_PER_CALL, [stage.num_generations]
            limit = stage.generation.max_response_length
        elif isinstance(stage, ProcessRewardModelStage) and stage.data is None:
            count, batch, answers = stage.num_prompts, PAIR_PROMPTS_PER_CALL, stage.num_generations
            groups = [answers, answers * ASSUMED_STEPS * stage.num_continuations]
            limit = stage.generation.max_response_length
        elif isinstance(stage, TransformStage) and stage.rewrite != "rules":
            count, batch = data.count("train", stage.num_problems), stage.batch_size
            groups, limit = [1, stage.num_solutions], stage.generation.max_response_length
        elif isinstance(stage, RecordTeacherStage) and stage.samples_here:
            count, batch = data.count("train", stage.num_problems), stage.problems_per_file
            groups, limit = [stage.num_generations], stage.generation.max_response_length
        else:
            return [], 0.0
        batch, response = min(batch, count), self.lengths.response(data.config, stage, limit)
        return [self._rows(batch * n, n, batch * n, response) for n in groups if n], count / batch

    def forward(self, rows: Rows, *, head: bool = True, work: int = 2) -> float:
        """Seconds of a pass of all rows without gradients; `work` is 2 FLOPs for each weight."""
        shape, rates = self.shape, self.rates
        attention = shape.attention_width * (rows.prompt + rows.response) * shape.layers
        products = (shape.active + attention) * rows.tokens
        products += shape.hidden * shape.vocabulary * rows.number * rows.response if head else 0
        fixed = rows.passes * shape.layers * rates.layer_s * work / 2
        return fixed + work * products / (rates.forward_flops if work == 2 else rates.train_flops)

    def train(
        self, rows: Rows, lora: LoraSection | None, *, head: bool = True, updates: int = 1
    ) -> float:
        """Forward and backward passes of all rows, and `updates` optimizer steps."""
        work = 4 if lora else 8 if self.data.config.model.gradient_checkpointing else 6
        traffic = updates * self.shape.trained(lora, head=head) * ADAMW_BYTES
        return self.forward(rows, head=head, work=work) + traffic / self.rates.bytes_s

    def generate(self, rows: Rows) -> float:
        """Read the prompts, then decode; each pass reads all weights, and keys and values so far.

        The transformers engine reads a group's prompt once; others read it once for each response
        and, on a GPU, have no fixed time per layer.
        """
        shape, rates, plain = self.shape, self.rates, self.engine == "transformers"
        prompts, output = (
            rows.number / (rows.group if plain else 1),
            shape.hidden * shape.vocabulary,
        )
        own = prompts * (rows.prompt - (rows.shared if plain else 0))
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

    def _time(self, stage: StageBase, sampling: float) -> tuple[int, dict[str, float], float]:
        """Steps, seconds of a mean step's phases, and seconds that come once."""
        if isinstance(stage, RlStage):
            return self._rl(stage, sampling / stage.steps)
        if isinstance(stage, SftStage):
            worked = self.lengths.worked or (64.0, 64)
            steps = self.data.supervised(stage, self.lengths.prompt + worked[0]).steps
            return steps, {"update": self.train(self.trained(stage), stage.lora)}, 0.0
        if isinstance(stage, RewardModelStage | PreferenceStage):
            found, rows = self.data.preferences(stage), self.trained(stage)
            head, reference = isinstance(stage, PreferenceStage), self._has_reference(stage)
            scoring = self.forward(rows, head=head)
            update = self.train(rows, stage.lora, head=head) + reference * scoring
            ranking = (1 + reference) * scoring * 2 * found.held_out / max(1, rows.number)
            return found.steps, {"update": update}, sampling + ranking
        if isinstance(stage, ProcessRewardModelStage):
            found, rows = self.data.labelled_steps(stage), self.trained(stage)
            ranking = self.forward(rows, head=False) * found.held_out / max(1, rows.number)
            update = self.train(rows, stage.lora, head=False)
            return found.steps, {"update": update}, sampling + ranking
        if isinstance(stage, RecordTeacherStage) and stage.teacher is None:
            count, group = self.data.count("train", stage.num_problems), stage.num_generations
            limit = stage.generation.max_response_length
            answer = self.lengths.response(self.data.config, stage, limit)
            if stage.answers == "worked" and self.lengths.worked is not None:
                mean, longest = self.lengths.worked
                answer = (min(mean, limit), min(longest, limit))
            rows = self._rows(count * group, group, stage.micro_batch_size, answer)
            return 1, {"generate": sampling, "score": self.forward(rows)}, 0.0
        if isinstance(stage, EvaluateStage):
            calls, batches = self.sampled(stage)  # the last call's answers are scored
            scoring = _reward_models(stage) * batches * self.forward(calls[-1], head=False)
            return int(sampling > 0), {"evaluate": sampling + scoring}, 0.0
        # Of a teacher behind a server nothing is computed here.
        return int(sampling > 0), {"generate": sampling}, 0.0

    def _rl(self, stage: RlStage, rollout: float) -> tuple[int, dict[str, float], float]:
        rows, reference, updates = self.trained(stage), self._has_reference(stage), stage.epochs
        losses: list[PolicyLoss[Any]] = [
            self.data.manager.build(PolicyLoss, t.name, t.fields()) for t in stage.loss_terms
        ]
        owner: Any = next((loss.config for loss in losses if loss.owns_update), None)
        update = self.train(
            rows._replace(number=rows.number * stage.epochs),
            stage.lora,
            updates=stage.epochs * stage.num_mini_batches,
        )
        if owner is not None:  # a product with the Fisher matrix is a second backward pass
            update *= 1 + 2 * owner.cg_iters * owner.fvp_token_fraction
        in_reward = reference and stage.kl.place == "reward"
        old = stage.epochs * stage.num_mini_batches > 1 or in_reward or owner is not None
        old = old or stage.rollout_correction.plugin.name != "none"
        old = old or any(loss.needs_prepare() for loss in losses)
        # Each response by one of them.
        judged = any(teacher.base_url is None for teacher in stage.teachers.values())
        scoring, advantage = (old + reference + judged) * self.forward(rows), 0.0
        if in_reward:
            scoring, advantage = 0.0, scoring
        if (critic := stage.critic) is not None:
            advantage += self.forward(rows, head=False)
            computed, updates = rows._replace(number=rows.number * critic.epochs), critic.epochs
            updates *= critic.num_mini_batches
            update += self.train(computed, critic.lora, head=False, updates=updates)
        if (prm := stage.implicit_prm) is not None:
            advantage += self.forward(rows)
            computed = rows._replace(number=rows.number * prm.epochs)
            update += self.train(computed, prm.lora, updates=prm.epochs * prm.num_mini_batches)
        copy, evaluation = 2 * self.compute_bytes * self.shape.total / self.rates.bytes_s, 0.0
        if stage.evaluate_every:  # greedy, before the first step, when it is due, after the last
            section = self.data.config.evaluation.model_copy(update={"num_samples": 0})
            greedy = EvaluateStage(kind="evaluate", inputs=stage.inputs, evaluation=section)
            calls, batches = self.sampled(greedy)
            evaluation = batches * self.generate(calls[0])
        due = math.ceil(stage.steps / (stage.evaluate_every or stage.steps))
        answering, first_answers = self._sampled_evaluation(stage)
        phases = {
            "rollout": rollout,
            "score": _reward_models(stage) * self.forward(rows, head=False),
            "advantage": advantage,
            "update": update + scoring,
            "sync": copy,
            "sync_check": copy if stage.check_sync == "every" else 0.0,
            "evaluate": evaluation * due / stage.steps,
            "evaluate_sampled": answering,
        }
        return stage.steps, phases, evaluation + first_answers

    def _sampled_evaluation(self, stage: RlStage) -> tuple[float, float]:
        """Seconds of avg@k and pass@k in a mean step, and before the first one."""
        section = stage.sampled_evaluation
        if section is None:
            return 0.0, 0.0
        limits = section.as_evaluation(self.data.config.evaluation)
        asked = EvaluateStage(kind="evaluate", inputs=stage.inputs, evaluation=limits)
        calls, batches = self.sampled(asked)
        each = batches * self.generate(calls[-1])  # the first call is greedy
        return each * math.ceil(stage.steps / section.every) / stage.steps, each

    def _has_reference(self, stage: StageBase) -> bool:
        """Whether a stage compares with a frozen copy of its input model."""
        manager = self.data.manager
        if isinstance(stage, RlStage):
            name, fields = stage.kl.controller.name, stage.kl.controller.fields()
            controller: KlController[Any] = manager.build(KlController, name, fields)
            terms = (
                manager.build(PolicyLoss, term.name, term.fields()) for term in stage.loss_terms
            )
            reading = any("ref_logprobs" in term.required_columns() for term in terms)
            return reading or stage.implicit_prm is not None or controller.coefficient() > 0
        if not isinstance(stage, PreferenceStage) or stage.reference_free:
            return False
        losses = (manager.find("preference_loss", term.name).cls for term in stage.loss_terms)
        return any(issubclass(loss, PreferenceLoss) and loss.needs_reference for loss in losses)

    def _models(self, stage: Training) -> list[memory.TrainedModel]:
        """The model that a stage trains, its critic and its process reward model."""
        parts = [(stage.lora, stage.optimizer, not isinstance(stage, HEADLESS))]
        if isinstance(stage, RlStage) and stage.critic is not None:
            parts.append((stage.critic.lora, stage.critic.optimizer, False))
        if isinstance(stage, RlStage) and (prm := stage.implicit_prm) is not None:
            parts.append((prm.lora, prm.optimizer, True))
        each = self.weight_bytes
        build = self.data.manager.build
        return [
            memory.trained_model(
                self.shape, lora, build(Optimizer, used.name, used.fields()), each, head=head
            )
            for lora, used, head in parts
        ]

    def _memory(self, stage: StageBase, calls: Sequence[Rows], engine: bool) -> dict[str, float]:
        """Bytes by what holds them; `engine` if it has been started."""
        on_gpu, shape, each = self.rates.on_gpu, self.shape, self.compute_bytes
        parts = {"libraries": memory.GPU_CONTEXT if on_gpu else memory.CPU_LIBRARIES}
        parts |= {"engine": self.engine_bytes} if engine else {}
        if calls and self.engine == "transformers":
            together = calls[-1]._replace(number=min(calls[-1].number, self.engine_rows))
            parts["sampling"] = memory.cache_bytes(shape, together, each)
        if isinstance(stage, EvaluateStage | RlStage):
            parts["reward models"] = _reward_models(stage) * each * shape.total
        if not isinstance(stage, Training):
            return parts
        for model in self._models(stage):
            parts |= {name: parts.get(name, 0.0) + size for name, size in model.held.items()}
        if self._has_reference(stage) and stage.lora is None:
            parts["reference"] = float(self.weight_bytes * shape.total)
        if isinstance(stage, RlStage):
            parts["teachers"] = _teachers(stage) * each * shape.total
        parts["training"] = memory.kept_for_backward(
            shape,
            self.trained(stage),
            each,
            head=not isinstance(stage, HEADLESS),
            checkpointing=self.data.config.model.gradient_checkpointing,
            on_gpu=on_gpu,
        )
        if not on_gpu:
            used = memory.peak(parts) - parts["libraries"]
            parts["fragmentation"] = memory.FRAGMENTATION * used
        return parts


def _teachers(stage: RlStage) -> int:
    """Further models in this process, which are taken to be of the policy's size."""
    local = [t for t in stage.teachers.values() if t.base_url is None]
    sampling = len(local) if stage.seq_kd else 0  # an engine of its own has the weights again
    return sampling + sum(t.weights != "live" for t in local)


def _reward_models(stage: EvaluateStage | RlStage) -> float:
    if isinstance(stage, EvaluateStage):
        return float("reward_model" in stage.inputs)
    return float(sum(reward.name == "reward_model" for reward in stage.rewards))
