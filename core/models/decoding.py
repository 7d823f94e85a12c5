"""What sequences that are decoded together remember: keys and values, a group's prompt kept once.

Axes: P prompts, N sequences, L tokens so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core.models.grouped_attention import GROUPED
from posttrain.core.models.shared_prompts import SharedPrompts

if TYPE_CHECKING:
    from transformers import DynamicCache


@dataclass(slots=True)
class DecodingMemory:
    """Keys and values of N sequences, the next position of each, and which of L tokens it sees.

    With `prompts`, cache and mask are of the responses alone.
    """

    cache: DynamicCache
    mask: Tensor  # [N, L]
    positions: Tensor  # [N, 1]
    prompts: SharedPrompts | None = None

    @classmethod
    def of_prompts(
        cls, model: Any, cache: DynamicCache, mask: Tensor, longest: int, *, several: bool
    ) -> DecodingMemory:  # Any: transformers' model classes are not typed
        """A sequence for each of the prompts that `cache` and `mask` [P, L] hold.

        Where a prompt is to have `several` (see `keep`), prompts are shared if the model lets them
        be and no sequence, of `longest` tokens, is wider than its sliding window; else each
        sequence has a copy.
        """
        positions = mask.sum(dim=-1, keepdim=True)
        if several and can_share(model, longest):
            from transformers import DynamicCache

            kept: list[Any] = cache.layers  # Any: `can_share` knows that all have keys
            layers = [(layer.keys, layer.values) for layer in kept]
            owners = torch.arange(len(mask), device=mask.device)
            prompts = SharedPrompts.make(layers, mask.bool(), owners)
            # Models hand a mask of four axes on as it is, and attention over prompts needs none.
            nothing = torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=mask.device)
            return cls(DynamicCache(), nothing, positions, prompts)
        return cls(cache, mask, positions)

    def keep(self, rows: Tensor) -> None:
        """Sequences become those of `rows` (ascending): others are forgotten, equal ones copied."""
        self.cache.batch_select_indices(rows)
        self.positions = self.positions[rows]
        if self.prompts is None:
            self.mask = self.mask[rows]
        else:
            self.prompts = self.prompts.select(rows)

    def next_token(self) -> dict[str, Any]:  # Any: keyword arguments of the model
        """What the model is given beside one more token for each sequence; call it once a token."""
        positions, self.positions = self.positions, self.positions + 1
        given = {"position_ids": positions, "past_key_values": self.cache}
        if self.prompts is not None:
            return {**given, "attention_mask": self.mask, "shared_prompts": self.prompts}
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=-1)
        return {**given, "attention_mask": self.mask}


def can_share(model: Any, longest: int) -> bool:  # Any: as above
    """Whether the prompts of `model` can be kept once for sequences of `longest` tokens."""
    # Imports transformers, which whoever lists plugins need not wait for.
    from posttrain.core.models.sharing import why_no_stream, widest_window

    if model.config._attn_implementation != GROUPED or why_no_stream(model) is not None:
        return False
    window = widest_window(model)
    return window is None or longest <= window
