"""What an update need not compute, because the policy's own rollout has: see `sampled_products`.

Axes: B rows, S tokens of their stream, K tokens kept, R response tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.models.checkpointing import is_checkpointed
from posttrain.core.models.lora import is_adapted
from posttrain.core.models.sampled_products import Ids, SampledProducts
from posttrain.core.models.sharing import widest_window
from posttrain.core.models.stream_attention import STREAM
from posttrain.core.training.head_targets import KnownLogits
from posttrain.core.training.stream import distinct_prompts, stream_of


@dataclass(frozen=True, slots=True)
class KnownProducts:
    """Outputs [K, out] of linear layers by name, which of them make a stream, and logits [M, V].

    `places` [S] are the K's that the stream's tokens are, `drawn` [R] the logits that each response
    token was drawn from, row by row; there are none where they were too many to keep. They are
    `spent` when nothing else reads them.
    """

    layers: dict[str, Tensor]
    places: Tensor
    logits: Tensor | None
    drawn: Tensor
    spent: bool

    def in_order(self, first: Tensor, like: Tensor) -> tuple[Tensor, Tensor, KnownLogits | None]:
        """The logits of states, and what `distinct_states` gave of them in the order of these."""
        if self.logits is None:
            return first, like, None
        places, order = self.drawn.to(first.device)[first].sort()
        own = torch.empty_like(order)
        own[order] = torch.arange(len(order), device=order.device)
        spent = self.spent and bool((places.diff() > 0).all())
        return first[order], own[like], KnownLogits(self.logits.to(places.device), places, spent)


def why_nothing_known(model: PreTrainedModel, engine: torch.dtype, longest: int) -> str | None:
    """Why an update of `model` makes all of its products, whatever an engine kept; None if not.

    The engine computes in `engine`, and no sequence has more than `longest` tokens.
    """
    window = widest_window(model)
    if model.dtype != engine:
        return "the engine's weights are in another precision"
    if is_adapted(model):
        return "an adapter is around the model's layers"
    if is_checkpointed(model):
        return "gradient checkpointing makes them again"
    if model.config._attn_implementation != STREAM:
        return "the model is not computed as one stream"
    if window is not None and window < longest:
        return "the model's sliding window is narrower than max_model_len"
    return None


def known_products(
    products: SampledProducts, batch: RolloutBatch, *, last: bool
) -> KnownProducts | None:
    """What is known of the stream of `batch`; None where one of its rows was not sampled so.

    With `last` nothing is asked of `products` again: it is emptied.
    """
    places = _places(products, batch)
    if places is None:
        return None
    fed, drawn = places
    fed = fed[stream_of(batch, include_last=False).kept]
    layers = {name: _join(blocks) for name, blocks in products.layers.items()}
    logits = _join(products.logits) if products.logits else None
    if last:
        products.forget()
    return KnownProducts(layers, fed, logits, drawn, spent=last)


def _join(blocks: list[Tensor]) -> Tensor:
    """All of them as one, which takes their place."""
    if len(blocks) > 1:
        blocks[:] = [torch.cat(blocks)]
    return blocks[0]


def _places(products: SampledProducts, batch: RolloutBatch) -> tuple[Tensor, Tensor] | None:
    """Where the tokens of prompts and responses [A] lie, and the logits of response tokens [R]."""
    firsts, _ = distinct_prompts(batch.group_id)
    texts = [text for row in range(len(batch)) if (text := _text(batch, row)) is not None]
    known = [text for text in texts if text in products.responses]
    if not products.layers or len(known) < len(batch):
        return None
    prompts = [products.prompts[known[row][0]] for row in firsts.tolist()]
    found = [products.responses[text] for text in known]
    return (
        torch.cat([*prompts, *(fed for fed, _ in found)]),
        torch.cat([drawn for _, drawn in found]),
    )


def _text(batch: RolloutBatch, row: int) -> tuple[Ids, Ids] | None:
    """Prompt and response of a row; None where others wrote a part of the response."""
    sampled = batch.response_mask[row].bool()
    length = int(sampled.sum())
    if not sampled[:length].all():
        return None
    prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
    return tuple(prompt.tolist()), tuple(batch.response_ids[row, :length].tolist())
