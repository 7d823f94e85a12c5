"""A rollout batch as one stream of tokens: each distinct prompt once, then every response.

Axes: B rows, T padded response width, n longest response, P distinct prompts, S tokens in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.models.stream_attention import StreamLayout


@dataclass(frozen=True, slots=True)
class TokenStream:
    """`token_ids` and `positions` [S], how they lie, and where each response token's state is.

    `picks` [B, n (+ 1)] is the token of the stream whose state predicts token t; `ids` and `mask`
    are [B, n].
    """

    token_ids: Tensor
    positions: Tensor
    layout: StreamLayout
    picks: Tensor
    ids: Tensor
    mask: Tensor


def stream_of(batch: RolloutBatch, *, include_last: bool) -> TokenStream:
    """The stream of `batch`, on the CPU. The last token of a response is in it with `include_last`.

    Tokens between sampled ones (tool output) are in it: all up to the last sampled one.
    """
    first_rows, row_to_prompt = distinct_prompts(batch.group_id)
    prompt_mask = batch.prompt_mask[first_rows].bool()
    prompt_lengths = prompt_mask.sum(dim=1)
    mask = batch.response_mask.bool()
    columns = torch.arange(1, mask.shape[1] + 1)
    lengths = (columns * mask).amax(dim=1) if mask.shape[1] else mask.sum(dim=1)
    width = int(lengths.max())
    ids, mask = batch.response_ids[:, :width], mask[:, :width]
    inputs = lengths if include_last else (lengths - 1).clamp(min=0)
    is_input = torch.arange(width)[None, :] < inputs[:, None]  # [B, n]
    in_prompt = torch.arange(int(prompt_lengths.max()))[None, :] < prompt_lengths[:, None]  # [P, L]

    num_prompt_tokens = int(prompt_lengths.sum())
    prompt_starts = prompt_lengths.cumsum(0) - prompt_lengths
    starts = num_prompt_tokens + inputs.cumsum(0) - inputs
    prompt_places = prompt_starts[:, None] + torch.arange(in_prompt.shape[1])[None, :]
    own_places = starts[:, None] + torch.arange(width)[None, :]
    ends = (prompt_starts + prompt_lengths - 1)[row_to_prompt]
    later = own_places[:, : width if include_last else max(0, width - 1)]
    picks = torch.cat([ends[:, None], torch.where(is_input[:, : later.shape[1]], later, 0)], dim=1)
    own_positions = prompt_lengths[row_to_prompt][:, None] + torch.arange(width)[None, :]
    return TokenStream(
        token_ids=torch.cat([batch.prompt_ids[first_rows][prompt_mask], ids[is_input]]),
        positions=torch.cat(
            [
                torch.arange(in_prompt.shape[1]).expand_as(in_prompt)[in_prompt],
                own_positions[is_input],
            ]
        ),
        layout=_layout(
            torch.where(in_prompt, prompt_places, -1),
            torch.where(is_input, own_places, -1)[:, : int(inputs.max())],
            row_to_prompt,
        ),
        picks=picks,
        ids=ids,
        mask=mask,
    )


def _layout(prompt_places: Tensor, own_places: Tensor, row_to_prompt: Tensor) -> StreamLayout:
    """Grids of the places [P, L] and [B, R] of tokens in the stream, -1 where there is none."""
    num_prompts, longest = prompt_places.shape
    length = own_places.shape[1]
    counts = torch.bincount(row_to_prompt, minlength=num_prompts)
    order = row_to_prompt.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[row_to_prompt[order]]
    rows = int(counts.max())
    grid = own_places.new_full((num_prompts, rows, length), -1)
    grid[row_to_prompt, rank] = own_places
    places = torch.cat([prompt_places.flatten(), grid.flatten()])
    real = (places >= 0).nonzero().squeeze(1)
    back = torch.empty_like(real)
    back[places[real]] = real
    lengths = (prompt_places >= 0).sum(dim=1)
    own_lengths = (own_places >= 0).sum(dim=1)
    return StreamLayout(
        shape=(num_prompts, longest, rows, length),
        places=places.clamp(min=0),
        back=back,
        prompt_lengths=lengths,
        longest=int((lengths[row_to_prompt] + own_lengths).max()),
    )


def distinct_prompts(group_id: Tensor) -> tuple[Tensor, Tensor]:
    """First row of each group [P], and for each row [B] the index of its group."""
    order: dict[int, int] = {}
    first, index = [], []
    for row, group in enumerate(group_id.tolist()):
        if group not in order:
            order[group] = len(order)
            first.append(row)
        index.append(order[group])
    return torch.tensor(first), torch.tensor(index)
