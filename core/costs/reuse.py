"""Whether an rl stage's updates take what sampling computed, as the stage itself decides."""

from __future__ import annotations

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.costs.parts import RlParts
from posttrain.core.costs.work import Work
from posttrain.core.models.sampled_outputs import MAX_BYTES, MAX_LOGITS_BYTES, why_no_reuse
from posttrain.core.models.sharing import widest_window


def reuses_products(work: Work, stage: RlStage, parts: RlParts) -> bool:
    """Whether the first update on a rollout reuses the linear outputs of sampling."""
    reason = why_no_reuse(
        work.config,
        stage,
        recordable=work.engine == "transformers" and work.device.type == "cpu",
        streams=not work.padded,
        window=widest_window(work.shape),
        corrects=parts.corrects,
        owns_update=parts.trust_region is not None,
    )
    return reason is None and 0 < kept_products(work, stage) <= MAX_BYTES


def kept_products(work: Work, stage: RlStage) -> float:
    """Bytes that the engine sets aside for what linear layers give in a step's rollouts."""
    rows = stage.prompts_per_step * stage.num_generations
    shared = work.lengths.shared if stage.prompts_per_step > 1 else 0
    tokens = shared + stage.prompts_per_step * (max(work.lengths.prompts) - shared)
    tokens += rows * (stage.generation.max_response_length - 1)
    return tokens * work.product_bytes


def kept_logits(work: Work, stage: RlStage) -> float:
    """Bytes of logits that a step's tokens are drawn from; 0 where they are too many to keep."""
    rows = stage.prompts_per_step * stage.num_generations
    states = stage.prompts_per_step + rows * (stage.generation.max_response_length - 1)
    size = float(states * work.bytes_each * work.shape.vocabulary)
    return size if size <= MAX_LOGITS_BYTES else 0.0
