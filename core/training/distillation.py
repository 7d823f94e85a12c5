"""The divergence of the policy from its teachers: token by token, or over stretches of text.

Logits are made chunk by chunk; those of a batch never exist. Axes: B rows, T response tokens, N
tokens of all rows that take loss, or groups of tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import DistillationLoss, RowLoss, TeacherRows, TextLoss
from posttrain.core.math.alignment import TokenGroups, members, products, whole_groups
from posttrain.core.math.teacher_gap import taught
from posttrain.core.models.paths import OutputHead
from posttrain.core.training.exact_kl import no_tokens, over_logits
from posttrain.core.training.forward import States, policy_head, response_states
from posttrain.core.training.objective import Distilled

LOGIT_GRADIENT = "distil/logit_gradient"
"""The metric that is the norm of a token's d loss / d logits, before the aggregator."""
GAP = "distil/gap"
"""The metric that is the teacher's log-prob of a sampled token minus the policy's, in nats."""

_Found = tuple[Tensor, Tensor, RowLoss]
"""Rows [N] and columns [N] of the batch, and the losses [N] there."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """`loss` of `model` against the rows' `teachers`, in order, at the sampling temperature.

    A teacher is None where only its columns are known. `matched` are, for a loss of texts, the
    tokens [M, 2] that each shares with the policy.
    """

    model: PreTrainedModel
    loss: DistillationLoss[Any]
    teachers: Mapping[str, PreTrainedModel | None]
    matched: Mapping[str, Tensor]
    temperature: float

    def of(self, batch: RolloutBatch, states: States, *, slopes: bool) -> Distilled:
        """The values at the places of `batch` that the loss counts, on the CPU.

        The value of a group of tokens stands at the one that `loss.counted` has for it. `states`
        are what `response_states` gave for `model`. With `slopes` the metrics have
        `LOGIT_GRADIENT`, of a group that of the logits that stand for it.
        """
        shape = batch.response_ids.shape
        total, scored = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        metrics: dict[str, Tensor] = {}
        for rows, name in by_teacher(batch, list(self.teachers)):
            hidden, mask = (each[rows.to(each.device)] for each in (states.hidden, states.mask))
            micro, teacher = batch.select(rows), self.teachers[name]
            if isinstance(self.loss, TextLoss):
                assert teacher is not None, "texts are compared by a teacher's logits"
                found = self._of_groups(self.loss, micro, hidden, teacher, name, slopes)
            else:
                found = self._of_tokens(micro, hidden, mask, teacher, slopes)
            at, columns, losses = found
            places = rows[at.cpu()], columns.cpu()
            value = losses.loss.cpu()
            # Out of place: gradients flow through what was put there before.
            total = total.to(value.dtype).index_put(places, value, accumulate=True)
            scored[places] = losses.scored.cpu()
            for metric, column in losses.metrics.items():
                metrics.setdefault(metric, torch.zeros(shape))[places] = column.float().cpu()
        return Distilled(total, scored, metrics)

    def _of_tokens(
        self,
        batch: RolloutBatch,
        hidden: Tensor,
        mask: Tensor,
        teacher: PreTrainedModel | None,
        slopes: bool,
    ) -> _Found:
        """At each token, from the policy's states [B, n, H] of the tokens `mask` [B, n]."""
        loss, device, length = self.loss, hidden.device, mask.shape[1]
        take = taught(batch)[:, :length].bool().to(device) & mask
        where, own = take.cpu(), hidden[:, :length][take]

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
            theirs = None if other is None else other_head.logits(other[rows]) / self.temperature
            here = said.part(rows, theirs)
            return rows_with_slopes(loss, logits, here) if slopes else loss.rows(logits, here)

        found = row_losses(own, policy_head(self.model), of_chunk, self.temperature)
        rows, columns = take.nonzero(as_tuple=True)
        return rows, columns, found

    def _of_groups(
        self,
        loss: TextLoss[Any],
        batch: RolloutBatch,
        hidden: Tensor,
        teacher: PreTrainedModel,
        name: str,
        slopes: bool,
    ) -> _Found:
        """At each group of tokens, from the policy's states [B, n, H]."""
        keys = whole_groups(batch.column("text_group"), taught(batch))
        device, width, temperature = hidden.device, batch.response_ids.shape[1], self.temperature
        group, other_group = batch.column("text_group"), batch.column("teacher_text_group")
        own, theirs = (members(each, keys, width, loss.at) for each in (group, other_group))
        read = batch.for_teachers()
        with torch.no_grad():
            seen = response_states(teacher, read, include_last=False).hidden.to(device)
        taus = [temperature * each for each in loss.temperatures()]
        head, other_head = policy_head(self.model), policy_head(teacher).detached(device)
        with torch.no_grad():
            their_others = _others(seen, other_head, theirs, read.response_ids, len(keys), taus[1])
        others = _others(hidden, head, own, batch.response_ids, len(keys), taus[0])
        states, their_states = (
            _at(each, tokens.rows, tokens.columns)
            for each, tokens in ((hidden, own), (seen, theirs))
        )
        said = TeacherRows(
            _at(batch.response_ids, own.rows, own.columns).to(device),
            others=others,
            teacher_others=their_others,
            matched=self.matched[name].to(device),
        )

        def of_chunk(logits: Tensor, rows: slice) -> RowLoss:
            with torch.no_grad():
                there = other_head.logits(their_states[rows]) / temperature
            here = said.part(rows, there)
            return rows_with_slopes(loss, logits, here) if slopes else loss.rows(logits, here)

        return own.rows, own.columns, row_losses(states, head, of_chunk, temperature)


def by_teacher(batch: RolloutBatch, names: Sequence[str]) -> Iterator[tuple[Tensor, str]]:
    """Rows [n] of each teacher; all rows where there is one, so that ranks make equal passes."""
    if batch.teacher_id is None or len(names) == 1:
        yield torch.arange(len(batch)), names[0]
        return
    for index, name in enumerate(names):
        rows = (batch.teacher_id == index).nonzero().squeeze(1)
        if len(rows):
            yield rows, name


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


def _at(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`values` [B, T, ...] at the places `rows` and `columns` [N]."""
    return values[rows.to(values.device), columns.to(values.device)]


def _others(
    hidden: Tensor, head: OutputHead, tokens: TokenGroups, ids: Tensor, count: int, tau: float
) -> Tensor:
    """The product [G] of the probabilities of each group's other tokens, from states [B, T, H]."""
    states = _at(hidden, tokens.other_rows, tokens.other_columns)
    targets = _at(ids, tokens.other_rows, tokens.other_columns).to(states.device)

    def of_chunk(logits: Tensor, rows: slice) -> Tensor:
        return torch.log_softmax(logits, dim=-1).gather(1, targets[rows, None]).squeeze(1)

    parts = over_logits(states, head, of_chunk, temperature=tau)
    logprobs = torch.cat(parts) if parts else no_tokens(states, head)
    return products(logprobs, tokens.other_group.to(states.device), count)
