"""Decoding a group's responses over their prompt's keys and values, which are kept once.

Axes: N sequences, P prompts, W most sequences of a prompt, L prompt keys, T response keys, H heads,
K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.models.wide_products import product


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Prompts' keys and values by layer, each [P, K, L, D], and whose sequences are whose.

    Sequence n belongs to prompt `prompt_of[n]`; those of a prompt are adjacent.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    present: Tensor  # [P, L], True where a prompt has a token
    prompt_of: Tensor  # [N]
    slots: Tensor | None  # [P x W]: the sequence at each; None where every prompt has W
    back: Tensor | None  # [N]: the slot of each sequence
    hidden: Tensor | None  # [P, 1, 1, L], added to scores; None where no prompt is padded

    @classmethod
    def make(
        cls,
        layers: Iterable[tuple[Tensor, Tensor]],
        present: Tensor,
        prompt_of: Tensor,
    ) -> SharedPrompts:
        """From keys and values by layer; prompts that no sequence belongs to are dropped."""
        kept, index, counts = torch.unique_consecutive(
            prompt_of, return_inverse=True, return_counts=True
        )
        pairs = list(layers)
        if len(kept) < len(present):
            pairs = [(keys[kept], values[kept]) for keys, values in pairs]
            present = present[kept]
        return cls(
            keys=tuple(keys for keys, _ in pairs),
            values=tuple(values for _, values in pairs),
            present=present,
            prompt_of=index,
            **_slots(index, counts),
            hidden=_hidden(present, pairs[0][0].dtype),
        )

    def select(self, rows: Tensor) -> SharedPrompts:
        pairs = zip(self.keys, self.values, strict=True)
        return SharedPrompts.make(pairs, self.present, self.prompt_of[rows])


def _slots(prompt_of: Tensor, counts: Tensor) -> dict[str, Tensor | None]:
    most = int(counts.max())
    if bool((counts == most).all()):
        return {"slots": None, "back": None}
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(prompt_of), device=counts.device) - first[prompt_of]
    back = prompt_of * most + rank
    slots = back.new_zeros(len(counts) * most)
    slots[back] = torch.arange(len(prompt_of), device=counts.device)
    return {"slots": slots, "back": back}


def _hidden(present: Tensor, dtype: torch.dtype) -> Tensor | None:
    if bool(present.all()):
        return None
    least = torch.finfo(dtype).min
    hidden = torch.zeros(present.shape, dtype=dtype, device=present.device)
    return hidden.masked_fill_(~present, least)[:, None, None, :]


def attention_over_prompts(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, prompts: SharedPrompts, layer: int
) -> Tensor:
    """[N, 1, H, D] of `query` [N, H, 1, D] over a prompt and over `key`, `value` [N, K, T, D]."""
    rows, heads, _, size = query.shape
    groups, shared = key.shape[1], heads // key.shape[1]
    own = query.reshape(rows, groups, shared, size)
    prompt_keys, prompt_values = prompts.keys[layer], prompts.values[layer]
    number, length = prompt_keys.shape[0], prompt_keys.shape[2]

    def gather(x: Tensor) -> Tensor:  # [N, K, H/K, *] to [P, K, W x H/K, *]
        x = x if prompts.slots is None else x[prompts.slots]
        x = x.view(number, -1, *x.shape[1:]).transpose(1, 2)
        return x.reshape(number, groups, -1, x.shape[-1])

    def scatter(x: Tensor) -> Tensor:  # and back
        x = x.view(number, groups, -1, shared, x.shape[-1]).transpose(1, 2)
        x = x.reshape(-1, groups, shared, x.shape[-1])
        return x if prompts.back is None else x[prompts.back]

    of_prompt = product(gather(own), prompt_keys.transpose(2, 3))
    if prompts.hidden is not None:
        of_prompt += prompts.hidden
    scores = torch.cat([scatter(of_prompt), product(own, key.transpose(2, 3))], dim=-1)
    scores *= scaling
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = scatter(product(gather(weights[..., :length]), prompt_values))
    output += product(weights[..., length:], value)
    return output.reshape(rows, 1, heads, size)  # of one prompt it may be strided
