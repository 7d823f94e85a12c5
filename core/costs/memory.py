"""Bytes that a stage holds at its peak, and that it leaves on the disk.

On a CPU the peak is the process's own: models, gradients, moments, what a micro-batch keeps for its
backward pass, and the libraries. On a GPU it is the device's part of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.core.config.gate_stages import PromoteStage
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig, Stage, TransformStage
from posttrain.core.config.sections import LoraSection, OptimizerSection
from posttrain.core.config.supervised_stages import (
    EvaluateStage,
    PreferenceDataStage,
    PreferenceStage,
    RewardModelStage,
    SftStage,
)
from posttrain.core.costs.lengths import Responses
from posttrain.core.costs.parts import has_reference, parts_of
from posttrain.core.costs.reuse import kept_logits, kept_products, reuses_products
from posttrain.core.costs.sureness import answers
from posttrain.core.costs.times import (
    FLOAT,
    TrainingStage,
    checkpoint_bytes,
    checkpoints,
    master_bytes,
    moment_bytes,
    preference_rows,
    rl_rows,
    saved_bytes,
    sft_rows,
    trained_parameters,
    training_steps,
)
from posttrain.core.costs.work import Rows, Work
from posttrain.core.data.preference import PAIR_PROMPTS_PER_CALL
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.training.logprobs import block_rows

BYTES_PER_DIGEST, DIGESTS_PER_LAYER = 110, 9
"""A line of a record names each weight twice: with its digest and with its shape."""
BYTES_PER_TOKEN, BYTES_PER_PROMPT_TOKEN = 32, 8
"""Of a recorded response (ids, masks, log-prob, version, advantage) and of its prompt."""
LIBRARIES = 0.9e9
"""torch, transformers, Prefect and MLflow in a process that has run a pipeline of a tiny model."""
HOLES = 0.2
"""Of what training holds on a CPU, on top: buffers of ever new sizes leave holes in the heap, which
grows by a tenth to a third before it is trimmed (`core/runtime/heap.py`)."""
CURVES = 5e6
"""The page of a stage's learning curves, which carries its own plotly.js."""
VLLM_LIBRARIES = 0.5e9
"""What importing and starting vLLM adds to them on a CPU."""
VLLM_CPU_CACHE = 2**30
"""Key-value cache of the `vllm` engine on a CPU, unless its config says otherwise."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes at the peak: what is held throughout, by name, and the largest of what comes and goes.

    Only one of `passing` is there at a time.
    """

    held: Mapping[str, float] = field(default_factory=dict)
    passing: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Bytes at the peak."""
        return sum(self.held.values()) + max(self.passing.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Holder:
    """How the run keeps models: on which device, and what engine beside them."""

    work: Work
    manager: PluginManager
    on_gpu: bool
    engine_cache: float | None
    packed: float = 0.0  # bytes of the engine's second copy of its weights

    def stage(self, stage: Stage, *, engine_runs: bool) -> StageMemory:
        """Memory of one stage; `engine_runs` when it, or a stage before it, needs the engine."""
        held = {} if self.on_gpu else {"libraries": LIBRARIES}
        if engine_runs:
            held |= self._engine()
        passing: dict[str, float] = {}
        if isinstance(stage, SftStage):
            held |= self._trained(stage.lora, stage.optimizer, head=True)
            passing["training"] = self._pass(sft_rows(self.work, stage), stage.lora, head=True)
        elif isinstance(stage, RlStage):
            held |= self._rl(stage)
            passing |= self._rl_passing(stage)
        elif isinstance(stage, PreferenceDataStage):
            head = isinstance(stage, PreferenceStage)
            held |= self._trained(stage.lora, stage.optimizer, head=head)
            if isinstance(stage, PreferenceStage) and has_reference(stage, self.manager):
                held["reference"] = 0.0 if stage.lora else self._copy
            rows = preference_rows(self.work, stage)
            passing["training"] = self._pass(rows, stage.lora, head=head)
        every = self.work.config.keep.every
        writes = isinstance(stage, TrainingStage) and (stage.checkpoint_every or every)
        if isinstance(stage, TrainingStage) and writes and not self.on_gpu:
            # A file of tensors is put together in memory before it is written.
            head = not isinstance(stage, RewardModelStage)
            trained = trained_parameters(self.work, stage.lora, head=head)
            passing["checkpoint"] = float(FLOAT * trained)
        passing["sampling"] = self._sampling(stage)
        if isinstance(stage, RlStage):
            parts = parts_of(stage, self.manager)
            if reuses_products(self.work, stage, parts):
                passing["sampling"] += kept_products(self.work, stage)
                passing["sampling"] += kept_logits(self.work, stage)
        if isinstance(stage, TrainingStage) and not self.on_gpu:
            own = StageMemory(held, passing).peak - held["libraries"]
            held["holes of the heap"] = HOLES * own
        return StageMemory(held, passing)

    @property
    def _copy(self) -> float:
        """One copy of the model, as it computes."""
        return float(self.work.bytes_each * self.work.shape.total)

    def _engine(self) -> dict[str, float]:
        if self.work.engine == "vllm_server":  # processes of their own
            return {}
        held = {"engine": self._copy + self.packed}
        if self.work.engine == "vllm" and not self.on_gpu:
            held["engine's cache"] = self.engine_cache or VLLM_CPU_CACHE
            held["vLLM"] = VLLM_LIBRARIES
        return held

    def _trained(
        self,
        lora: LoraSection | None,
        optimizer: OptimizerSection,
        *,
        head: bool,
        who: str = "",
    ) -> dict[str, float]:
        """A model in training: weights, float32 masters if it has others, gradients, moments."""
        shape, each = self.work.shape, self.work.bytes_each
        trained = trained_parameters(self.work, lora, head=head)
        whole = (shape.total if head else shape.backbone) + (trained if lora is not None else 0)
        return {
            f"{who}weights": float(each * whole),
            f"{who}masters": float(master_bytes(optimizer) * trained if each < FLOAT else 0),
            f"{who}gradients": float(FLOAT * trained),
            f"{who}moments": float(moment_bytes(optimizer) * trained),
        }

    def _rl(self, stage: RlStage) -> dict[str, float]:
        parts, shape, each = parts_of(stage, self.manager), self.work.shape, self.work.bytes_each
        held = self._trained(stage.lora, stage.optimizer, head=True)
        if stage.critic is not None:
            held |= self._trained(
                stage.critic.lora, stage.critic.optimizer, head=False, who="critic's "
            )
        if parts.has_reference and stage.lora is None:
            held["reference"] = self._copy
        if parts.reward_models:
            held["reward models"] = float(parts.reward_models * each * shape.backbone)
        return held

    def _rl_passing(self, stage: RlStage) -> dict[str, float]:
        rows = rl_rows(self.work, stage, mini=True)
        found = {"training": self._pass(rows, stage.lora, head=True)}
        if reuses_products(self.work, stage, parts_of(stage, self.manager)):
            # Of the last micro-batch they become what is kept for its backward pass.
            kept, share = kept_products(self.work, stage), 1 - rows.at_once / rows.count
            logits = kept_logits(self.work, stage)
            if not share:  # the only micro-batch makes its gradients in their place
                logits = max(0.0, logits - self._made_logits(rows))
            found["training"] += kept * share + logits
        if stage.critic is not None:
            found["critic"] = self._pass(rows, stage.critic.lora, head=False)
        return found

    def _pass(self, rows: Rows, lora: LoraSection | None, *, head: bool) -> float:
        """What one micro-batch keeps for its backward pass, and the layer at work once more."""
        shape = self.work.shape
        layers = self.work.rates.kept(rows.heaviest, lora).of(shape.layers + 1)
        if not head:
            return layers
        blocks = 2 * block_rows(self.work.device) * FLOAT
        # The vocabulary's gradient is made beside the sum that it is added to.
        matrix = (self._wide + (0 if lora is not None else self.work.bytes_each)) * shape.hidden
        return layers + self._made_logits(rows) + shape.vocabulary * (blocks + matrix)

    def _made_logits(self, rows: Rows) -> float:
        """Logits that are made at a time, and what they are rounded from."""
        states = min(self.work.logit_rows, rows.at_once * rows.responses.mean)
        return states * (self.work.bytes_each + self._wide) * self.work.shape.vocabulary

    @property
    def _wide(self) -> int:
        """Bytes of a number that products are made in, where they are then rounded; else 0."""
        made = self.work.made_bytes
        return made if made > self.work.bytes_each else 0

    def _sampling(self, stage: Stage) -> float:
        """Keys and values of the sequences that are decoded together, and their logits."""
        if self.work.engine != "transformers":
            return 0.0
        rows, limit = most_sampled(stage, self.work.config)
        responses = answers(self.work, stage, limit)
        return self._cache(min(rows, self.work.engine_rows), responses)

    def _cache(self, rows: int, responses: Responses) -> float:
        text, each = self.work.shape.config.get_text_config(), self.work.bytes_each
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        rows = max(1, rows)
        tokens = self.work.lengths.longest_prompt(rows) + responses.longest_of(rows)
        # A token is added by making the layer's keys and values anew, one layer at a time.
        keys = 2 * heads * size * each * tokens * (self.work.shape.layers + 1)
        return float(rows * (keys + self.work.shape.vocabulary * each))


def most_sampled(stage: Stage, config: RunConfig) -> tuple[int, int]:
    """Most sequences of one call of the engine in a stage, and the tokens that each may have."""
    if isinstance(stage, RlStage):
        own = stage.prompts_per_step * stage.num_generations, stage.generation.max_response_length
        evaluated = config.evaluation.at_once, config.evaluation.max_response_length
        return max(own, evaluated) if stage.evaluate_every else own
    if isinstance(stage, EvaluateStage):
        section = stage.evaluation or config.evaluation
        samples = max(1, section.num_samples)
        return section.at_once * samples, section.max_response_length
    if isinstance(stage, PreferenceDataStage) and stage.data is None:
        rows = min(PAIR_PROMPTS_PER_CALL, stage.num_prompts) * stage.num_generations
        return rows, stage.generation.max_response_length
    if isinstance(stage, TransformStage) and stage.rewrite != "rules":
        rows = min(stage.batch_size, stage.num_problems) * stage.num_solutions
        return rows, stage.generation.max_response_length
    if isinstance(stage, PromoteStage):
        return most_sampled(config.stages[stage.inputs["evaluation"]], config)
    return 0, 1


def uses_engine(stage: Stage) -> bool:
    """Whether a stage samples."""
    if isinstance(stage, PreferenceDataStage):
        return stage.data is None
    return isinstance(stage, RlStage | EvaluateStage | TransformStage | PromoteStage)


@dataclass(frozen=True, slots=True)
class StageDisk:
    """Bytes that a stage leaves, and those it needs beside them while it runs."""

    left: float
    passing: float = 0.0


def stage_disk(work: Work, stage: Stage) -> StageDisk:
    """The model it saves, checkpoints and records that stay for a replay.

    While it runs, as many newer checkpoints as are kept, and one more for a moment.
    """
    left = saved_bytes(work, stage)
    left += work.tokenizer_bytes if left else 0
    if isinstance(stage, RlStage | PreferenceStage):
        left += CURVES
    if not isinstance(stage, TrainingStage):
        return StageDisk(left)
    keep, steps = work.config.keep, training_steps(work, stage)
    each = checkpoint_bytes(work, stage)
    written = checkpoints(stage.checkpoint_every, steps, keep.every)
    staying = checkpoints(0, steps, keep.every)
    left += staying * each + record_bytes(work, stage, steps)
    return StageDisk(left, min(1 + keep.checkpoints, written - staying) * each)


def record_bytes(work: Work, stage: TrainingStage, steps: int) -> float:
    """The record of its steps: a digest per weight, and the tensors of an rl step's batch."""
    keep = work.config.keep
    if not keep.records:
        return 0.0
    each: float = BYTES_PER_DIGEST * DIGESTS_PER_LAYER * work.shape.layers
    if keep.values and isinstance(stage, RlStage):
        rows = stage.prompts_per_step * stage.num_generations
        limit = stage.generation.max_response_length
        responses = answers(work, stage, limit)
        width = responses.longest_of(max(1, rows))
        each += rows * (width * BYTES_PER_TOKEN + work.lengths.prompt * BYTES_PER_PROMPT_TOKEN)
    return float(each * (steps // keep.records))
