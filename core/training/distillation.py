"""What teachers say of sampled tokens, and the divergence of the policy from them.

A teacher's logits are made chunk by chunk; those of a batch never exist. Axes: B rows, T response
tokens, N tokens of all rows, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import DistillationLoss, RowLoss, TeacherRows, TextLoss
from posttrain.core.math.divergence import ABSENT
from posttrain.core.math.teacher_gap import taught
from posttrain.core.models.paths import OutputHead
from posttrain.core.models.sharded import put_away
from posttrain.core.training.exact_kl import CHUNK, no_tokens, over_logits
from posttrain.core.training.forward import States, policy_head, response_states, to_rows
from posttrain.core.training.objective import Distilled
from posttrain.core.training.ranks import ALONE, Ranks, in_place

TeacherT = TypeVar("TeacherT")
LOGIT_GRADIENT = "distil/logit_gradient"
"""The metric that is the norm of a token's d loss / d logits, before the aggregator."""
GAP = "distil/gap"
"""The metric that is the teacher's log-prob of a sampled token minus the policy's, in nats."""


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


def response_distillation(
    model: PreTrainedModel,
    batch: RolloutBatch,
    loss: DistillationLoss[Any],
    teachers: Sequence[PreTrainedModel | None],
    temperature: float,
    *,
    states: States | None = None,
    slopes: bool = False,
) -> Distilled:
    """`loss` of `model` against the rows' `teachers` at the tokens of `batch` that take loss.

    A teacher is None where only its columns are known. `states` are what `response_states` gave for
    `model`, when a forward pass was made already. With `slopes` the metrics have `LOGIT_GRADIENT`.
    All tensors are on the CPU.
    """
    states = states or response_states(model, batch, include_last=False)
    shape, length = batch.response_ids.shape, states.ids.shape[1]
    take = taught(batch)[:, :length].bool().to(states.mask.device) & states.mask
    total = torch.zeros(shape, dtype=torch.float32)
    scored = torch.zeros(shape, dtype=torch.bool)
    metrics: dict[str, Tensor] = {}
    for rows, teacher in by_teacher(batch, teachers):
        part = take[rows.to(take.device)]
        micro = batch.select(rows)
        own = states.hidden[rows.to(take.device), :length][part]
        found = _rows(model, own, micro, part, loss, teacher, temperature, slopes)
        value = to_rows(found.loss, part, micro.mask.shape).cpu()
        total = total + value.new_zeros(shape).index_add(0, rows, value)
        scored[rows] = to_rows(found.scored, part, micro.mask.shape).cpu().bool()
        for name, column in found.metrics.items():
            into = metrics.setdefault(name, torch.zeros(shape))
            into[rows] = to_rows(column.float(), part, micro.mask.shape).cpu()
    return Distilled(total, scored, metrics)


def rows_with_slopes(loss: DistillationLoss[Any], logits: Tensor, teacher: TeacherRows) -> RowLoss:
    """`loss.rows` with `LOGIT_GRADIENT`, the norm of d loss / d logits [N], among its metrics.

    And with `GAP`, where the teacher's logits are of the same tokens.

    A value depends on no logits but those of its row.
    """
    found = loss.rows(logits, teacher)
    others = None if teacher.others is None else teacher.others.detach()
    leaf = logits.detach().requires_grad_()
    # Hooks of its own: those of a checkpoint would give up what this gradient needs.
    with torch.enable_grad(), saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        value = loss.rows(leaf, replace(teacher, others=others)).loss.sum()
        (slope,) = torch.autograd.grad(value, leaf, materialize_grads=True)
    metrics = {**found.metrics, LOGIT_GRADIENT: slope.norm(dim=1)}
    if teacher.logits is not None and teacher.matched is None and not isinstance(loss, TextLoss):
        own, theirs = (
            torch.log_softmax(each.detach(), dim=-1).gather(1, teacher.sampled[:, None]).squeeze(1)
            for each in (logits, teacher.logits)
        )
        metrics[GAP] = theirs - own
    return replace(found, metrics=metrics)


def by_teacher(
    batch: RolloutBatch, teachers: Sequence[TeacherT]
) -> Iterator[tuple[Tensor, TeacherT]]:
    """Rows [n] of each teacher; all rows where there is one, so that ranks make equal passes."""
    if batch.teacher_id is None or len(teachers) == 1:
        yield torch.arange(len(batch)), teachers[0]
        return
    for index, teacher in enumerate(teachers):
        rows = (batch.teacher_id == index).nonzero().squeeze(1)
        if len(rows):
            yield rows, teacher


def _rows(
    model: PreTrainedModel,
    own: Tensor,
    batch: RolloutBatch,
    take: Tensor,
    loss: DistillationLoss[Any],
    teacher: PreTrainedModel | None,
    temperature: float,
    slopes: bool,
) -> RowLoss:
    """The losses [N] of the states `own` [N, H], at the places `take` [B, n] of `batch`."""
    device, length = own.device, take.shape[1]
    where = take.cpu()

    def at_tokens(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[:, :length][where].to(device)

    said = TeacherRows(
        sampled=batch.response_ids[:, :length][where].to(device),
        topk_ids=at_tokens(batch.teacher_topk_ids),
        topk_logprobs=at_tokens(batch.teacher_topk_logprobs),
        old_logprobs=at_tokens(batch.old_logprobs),
        logprobs=at_tokens(batch.teacher_logprobs),
    )
    other: Tensor | None = None
    if teacher is not None and loss.reads() == "logits":
        with torch.no_grad():
            seen = response_states(teacher, batch.for_teachers(), include_last=False)
        longest = seen.ids.shape[1]  # of these rows, which may be fewer than the policy's
        other = seen.hidden[:, :longest].to(device)[take[:, :longest]]
        read = seen.ids.to(device)[take[:, :longest]]
        assert torch.equal(read, said.sampled), "the teacher judges other tokens"
        other_head = policy_head(teacher).detached(device)

    def of_chunk(logits: Tensor, rows: slice) -> RowLoss:
        logits_there = None if other is None else other_head.logits(other[rows]) / temperature
        here = said.part(rows, logits_there)
        return rows_with_slopes(loss, logits, here) if slopes else loss.rows(logits, here)

    return row_losses(own, policy_head(model), of_chunk, temperature)


def row_losses(
    states: Tensor,
    head: OutputHead,
    of_chunk: Callable[[Tensor, slice], RowLoss],
    temperature: float,
) -> RowLoss:
    """The losses [N] that `of_chunk` makes of the logits of `states` [N, H], chunk by chunk."""
    parts = over_logits(states, head, of_chunk, temperature=temperature)
    if not parts:
        empty = no_tokens(states, head)
        return RowLoss(empty, torch.zeros_like(empty, dtype=torch.bool))
    return RowLoss(
        torch.cat([part.loss for part in parts]),
        torch.cat([part.scored for part in parts]),
        {name: torch.cat([part.metrics[name] for part in parts]) for name in parts[0].metrics},
    )
