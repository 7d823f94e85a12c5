"""A rollout batch as one stream of tokens: prompts, then responses, what begins alike once.

Axes: B rows, T padded response width, n longest response, P prompts of groups, A tokens of these
and of all responses, S distinct ones among them: tokens with the same history are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.models.prefixes import depth_first, first_alike
from posttrain.core.models.stream_attention import Repeats, StreamLayout


@dataclass(frozen=True, slots=True)
class TokenStream:
    """`token_ids` and `positions` [S], how they lie, and where each response token's state is.

    `picks` [B, n (+ 1)] is the token of the stream whose state predicts token t; `ids` and `mask`
    are [B, n]. `kept` [S] says which of the A tokens, a prompt once a group and then row by row,
    are in it.
    """

    token_ids: Tensor
    positions: Tensor
    layout: StreamLayout
    picks: Tensor
    ids: Tensor
    mask: Tensor
    kept: Tensor


def stream_of(batch: RolloutBatch, *, include_last: bool) -> TokenStream:
    """The stream of `batch`, on the CPU; with `include_last` up to each response's last token."""
    first_rows, row_to_prompt = distinct_prompts(batch)
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
    token_ids = torch.cat([batch.prompt_ids[first_rows][prompt_mask], ids[is_input]])
    positions = torch.arange(in_prompt.shape[1]).expand_as(in_prompt)[in_prompt]
    positions = torch.cat([positions, own_positions[is_input]])
    prompt_grid = torch.where(in_prompt, prompt_places, -1)
    own_grid = torch.where(is_input, own_places, -1)[:, : int(inputs.max())]
    first = first_alike(token_ids, prompt_grid, own_grid, row_to_prompt)
    kept, place = torch.unique(first, return_inverse=True)
    return TokenStream(
        token_ids=token_ids[kept],
        positions=positions[kept],
        layout=_layout(prompt_grid, own_grid, row_to_prompt, kept, place),
        picks=place[picks],
        ids=ids,
        mask=mask,
        kept=kept,
    )


def _layout(
    prompt_places: Tensor, own_places: Tensor, row_to_prompt: Tensor, kept: Tensor, place: Tensor
) -> StreamLayout:
    """Grids of the A tokens, [P, L] and [B, R], -1 where there is none.

    The tokens `kept` [S] of them are in the stream; `place` [A] is where each, or its like, is.
    """
    num_prompts, longest = prompt_places.shape
    length = own_places.shape[1]
    counts = torch.bincount(row_to_prompt, minlength=num_prompts)
    order = row_to_prompt.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[row_to_prompt[order]]
    rows = int(counts.max())
    grid = own_places.new_full((num_prompts, rows, length), -1)
    grid[row_to_prompt, rank] = own_places
    tokens = torch.cat([prompt_places.flatten(), grid.flatten()])
    real = (tokens >= 0).nonzero().squeeze(1)
    back = torch.empty_like(real)
    back[tokens[real]] = real
    lengths = (prompt_places >= 0).sum(dim=1)
    own_lengths = (own_places >= 0).sum(dim=1)
    rows_of_a = torch.cat([prompt_places[row_to_prompt], own_places], dim=1)
    numbers, last = depth_first(torch.where(rows_of_a >= 0, place[rows_of_a.clamp(min=0)], -1))
    return StreamLayout(
        shape=(num_prompts, longest, rows, length),
        places=place[tokens.clamp(min=0)],
        back=back[kept],
        repeats=_repeats(real, place[tokens[real]]) if len(kept) < len(real) else None,
        prompt_lengths=lengths,
        longest=int((lengths[row_to_prompt] + own_lengths).max()),
        numbers=numbers,
        last=last,
    )


def _repeats(real: Tensor, places: Tensor) -> Repeats:
    """The tokens that several of the grids' places `real` [A] hold; each holds that at `places`."""
    several = torch.bincount(places) > 1
    these = several[places]
    tokens, which = torch.unique(places[these], return_inverse=True)
    return Repeats(tokens, real[these], which)


def distinct_prompts(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """First row of each prompt of a group [P], and for each row [B] the index of its prompt.

    A group has one prompt, unless an environment or a program wrote what its episodes begin with.
    """
    prompts = torch.where(batch.prompt_mask.bool(), batch.prompt_ids, -1).numpy()
    order: dict[tuple[int, bytes], int] = {}
    first: list[int] = []
    index = []
    for row, (group, prompt) in enumerate(zip(batch.group_id.tolist(), prompts, strict=True)):
        number = order.setdefault((group, prompt.tobytes()), len(order))
        if number == len(first):
            first.append(row)
        index.append(number)
    return torch.tensor(first), torch.tensor(index)
