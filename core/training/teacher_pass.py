"""What a teacher says of sampled tokens, from one forward pass of it.

Its logits are made chunk by chunk; those of a batch never exist. Axes: B rows, T response tokens, K
candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.divergence import ABSENT
from posttrain.core.models.sharded import put_away
from posttrain.core.training.exact_kl import CHUNK, over_logits
from posttrain.core.training.forward import policy_head, response_states
from posttrain.core.training.ranks import ALONE, Ranks, in_place


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's `logprobs` [B, T] of sampled tokens (NaN = not scored) and, if asked for, its
    best candidates `topk_ids` [B, T, K] (-1 = missing) with `topk_logprobs` [B, T, K], best first.
    """

    logprobs: Tensor
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None


@torch.no_grad()
def candidate_pass(
    model: PreTrainedModel,
    batch: RolloutBatch,
    order: Sequence[Tensor],
    *,
    top_k: int,
    temperature: float,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> TeacherScores:
    """What `model` says of the response tokens of `batch` at `temperature`, from one forward pass.

    `order` are the row indices of each micro-batch. Log-probs are 0, and candidates token 0, where
    `response_mask` is 0.
    """
    rows: list[Tensor] = []
    found: list[tuple[Tensor, ...]] = []
    for index, counts in ranks.share(order):
        check()
        parts = _candidates(model, batch.select(index), top_k, temperature)
        if counts:
            rows.append(index)
            found.append(parts)
    put_away(model)
    shape = batch.response_ids.shape
    sizes = (shape, torch.Size((*shape, top_k)), torch.Size((*shape, top_k)))
    logprobs, ids, values = (
        ranks.add(in_place(rows, [parts[i] for parts in found], size))
        for i, size in enumerate(sizes)
    )
    return TeacherScores(logprobs, ids.round().long(), values)


def _candidates(
    model: PreTrainedModel, micro: RolloutBatch, top_k: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [B, T], candidates' ids and log-probs [B, T, K], in float32 on the CPU."""
    hidden, ids, mask, _ = response_states(model, micro, include_last=False)
    chosen, targets = hidden[:, : ids.shape[1]][mask], ids[mask]

    def of_chunk(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.topk(min(top_k, logprobs.shape[1]), dim=-1)
        own = logprobs.gather(1, targets[rows, None]).squeeze(1)
        missing = (0, top_k - best.values.shape[1])  # of a vocabulary that has no more
        # Ids as numbers of the same type, which ranks add up: exact up to 16 million.
        ids = pad(best.indices.float(), missing, value=ABSENT)
        return own, ids, pad(best.values, missing, value=-torch.inf)

    parts = over_logits(chosen, policy_head(model), of_chunk, temperature=temperature, chunk=CHUNK)
    shape = micro.response_ids.shape
    where = mask.nonzero(as_tuple=True)

    def put(columns: list[Tensor], size: tuple[int, ...]) -> Tensor:
        result = torch.zeros(size, dtype=columns[0].dtype if columns else torch.float32)
        if columns:
            result[where[0].cpu(), where[1].cpu()] = torch.cat(columns).cpu()
        return result

    return (
        put([own for own, _, _ in parts], (*shape,)),
        put([best for _, best, _ in parts], (*shape, top_k)),
        put([values for _, _, values in parts], (*shape, top_k)),
    )
