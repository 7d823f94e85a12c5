"""Mini-batches of pairs and of labelled answers, as the rows that a model computes.

Axes: N pairs or labelled rows of a mini-batch, B rows of its batch (two for each pair), T response
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.packing import response_batch
from posttrain.core.data.preference import LabelledAnswer, Pair
from posttrain.core.training.preference_scores import LabelTokens, MiniCounts, PairTokens, Tokens


@dataclass(frozen=True, slots=True)
class PairMini:
    """N pairs: rows 2i and 2i + 1 of `batch` are chosen and rejected of pair i; `margin` [N]."""

    batch: RolloutBatch
    margin: Tensor

    @classmethod
    def of(cls, pairs: Sequence[Pair], pad_token_id: int) -> PairMini:
        batch = response_batch(
            prompts=[pair.prompt_ids for pair in pairs for _ in range(2)],
            responses=[ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)],
            group_ids=[number for number in range(len(pairs)) for _ in range(2)],
            pad_token_id=pad_token_id,
            problems=(),
        )
        return cls(batch, torch.tensor([pair.margin for pair in pairs], dtype=torch.float64))

    def counts(self) -> MiniCounts:
        return MiniCounts(float(len(self.margin)), float(self.batch.mask[0::2].sum()))

    def micro_batches(self, size: int) -> Iterator[tuple[Tensor, PairMini]]:
        for index in torch.split(torch.arange(len(self.margin)), size):
            rows = torch.stack([2 * index, 2 * index + 1], dim=1).flatten()
            yield index, PairMini(self.batch.select(rows), self.margin[index])

    def tokens(self, logprobs: Tensor, log_sum_sq: Tensor | None = None) -> PairTokens:
        """The log-probs [B, T] of the batch's rows, chosen and rejected apart."""
        reference, mask = self.batch.ref_logprobs, self.batch.mask
        return PairTokens(
            chosen=logprobs[0::2],
            rejected=logprobs[1::2],
            chosen_mask=mask[0::2],
            rejected_mask=mask[1::2],
            ref_chosen=None if reference is None else reference[0::2],
            ref_rejected=None if reference is None else reference[1::2],
            chosen_log_sum_sq=None if log_sum_sq is None else log_sum_sq[0::2],
            rejected_log_sum_sq=None if log_sum_sq is None else log_sum_sq[1::2],
            margin=self.margin,
        )


@dataclass(frozen=True, slots=True)
class LabelMini:
    """N labelled answers, a row of `batch` each; `desirable` [N]."""

    batch: RolloutBatch
    desirable: Tensor

    @classmethod
    def of(cls, rows: Sequence[LabelledAnswer], pad_token_id: int) -> LabelMini:
        batch = answer_batch(rows, [row.answer_ids for row in rows], pad_token_id)
        return cls(batch, torch.tensor([row.desirable for row in rows]))

    def counts(self) -> MiniCounts:
        return MiniCounts(float(len(self.desirable)))

    def micro_batches(self, size: int) -> Iterator[tuple[Tensor, LabelMini]]:
        for index in torch.split(torch.arange(len(self.desirable)), size):
            yield index, LabelMini(self.batch.select(index), self.desirable[index])

    def tokens(self, logprobs: Tensor, log_sum_sq: Tensor | None = None) -> LabelTokens:
        return LabelTokens(logprobs, self.batch.mask, self.desirable, self.batch.ref_logprobs)


Mini = PairMini | LabelMini


def answer_batch(
    rows: Sequence[LabelledAnswer], answers: Sequence[Sequence[int]], pad_token_id: int
) -> RolloutBatch:
    """The rows' prompts with `answers`; rows of one prompt share it."""
    numbers = {row.prompt_ids: number for number, row in enumerate(rows)}
    return response_batch(
        prompts=[row.prompt_ids for row in rows],
        responses=answers,
        group_ids=[numbers[row.prompt_ids] for row in rows],
        pad_token_id=pad_token_id,
        problems=(),
    )


def with_mismatched(tokens: Tokens, logprobs: Tensor, batch: RolloutBatch) -> Tokens:
    """`tokens` with the log-probs [N, T] of mismatched answers, which are the rows of `batch`."""
    assert isinstance(tokens, LabelTokens), "only losses of labelled rows ask for these"
    return replace(
        tokens, kl_logprobs=logprobs, ref_kl_logprobs=batch.ref_logprobs, kl_mask=batch.mask
    )
