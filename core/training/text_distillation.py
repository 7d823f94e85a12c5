"""The distance of the policy from teachers of other tokenizers, over stretches of text.

As with other distances, logits are made chunk by chunk. Axes: B rows, T response tokens, G groups
of tokens, M their other tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import RowLoss, TeacherRows, TextLoss
from posttrain.core.math.alignment import TokenGroups, members, products, whole_groups
from posttrain.core.math.teacher_gap import taught
from posttrain.core.models.paths import OutputHead
from posttrain.core.training.distillation import by_teacher, row_losses, rows_with_slopes
from posttrain.core.training.exact_kl import no_tokens, over_logits
from posttrain.core.training.forward import States, policy_head, response_states
from posttrain.core.training.objective import Distilled


def text_distillation(
    model: PreTrainedModel,
    batch: RolloutBatch,
    loss: TextLoss[Any],
    teachers: Sequence[tuple[PreTrainedModel, Tensor]],
    temperature: float,
    *,
    states: States | None = None,
    slopes: bool = False,
) -> Distilled:
    """`loss` of `model` against the rows' `teachers`, each with the tokens [M, 2] that it shares.

    The value of a group stands at the token that `loss.counted` has for it. `states` are what
    `response_states` gave for `model`, when a forward pass was made already. With
    `slopes` the metrics have `LOGIT_GRADIENT`, of the logits that stand for the group. All tensors
    are on the CPU.
    """
    states = states or response_states(model, batch, include_last=False)
    shape = batch.response_ids.shape
    total, scored = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    metrics: dict[str, Tensor] = {}
    for rows, (teacher, matched) in by_teacher(batch, teachers):
        micro = batch.select(rows)
        keys = whole_groups(micro.column("text_group"), taught(micro))
        own, found = _groups(
            model,
            states.hidden[rows.to(states.hidden.device)],
            micro,
            keys,
            loss,
            teacher,
            matched,
            temperature,
            slopes,
        )
        places = rows[own.rows], own.columns
        # Out of place: gradients flow through what was put there before.
        total = total.index_put(places, found.loss.float().cpu(), accumulate=True)
        scored[places] = found.scored.cpu()
        for name, column in found.metrics.items():
            metrics.setdefault(name, torch.zeros(shape))[places] = column.float().cpu()
    return Distilled(total, scored, metrics)


def _groups(
    model: PreTrainedModel,
    hidden: Tensor,
    batch: RolloutBatch,
    keys: Tensor,
    loss: TextLoss[Any],
    teacher: PreTrainedModel,
    matched: Tensor,
    temperature: float,
    slopes: bool,
) -> tuple[TokenGroups, RowLoss]:
    """The groups `keys` [G] of `batch`, and their losses [G] from the policy's states [B, T, H]."""
    device, width = hidden.device, batch.response_ids.shape[1]
    group, other_group = batch.column("text_group"), batch.column("teacher_text_group")
    own, theirs = (members(each, keys, width, loss.at) for each in (group, other_group))
    read = batch.for_teachers()
    with torch.no_grad():
        seen = response_states(teacher, read, include_last=False).hidden.to(device)
    taus = [temperature * each for each in loss.temperatures()]
    head, teacher_head = policy_head(model), policy_head(teacher).detached(device)
    others = _others(hidden, head, own, batch.response_ids, len(keys), taus[0])
    with torch.no_grad():
        their_others = _others(seen, teacher_head, theirs, read.response_ids, len(keys), taus[1])
    states, their_states = (_at(h, g.rows, g.columns) for h, g in ((hidden, own), (seen, theirs)))
    said = TeacherRows(
        _at(batch.response_ids, own.rows, own.columns).to(device),
        others=others,
        teacher_others=their_others,
        matched=matched.to(device),
    )

    def of_chunk(logits: Tensor, rows: slice) -> RowLoss:
        with torch.no_grad():
            logits_there = teacher_head.logits(their_states[rows]) / temperature
        here = said.part(rows, logits_there)
        return rows_with_slopes(loss, logits, here) if slopes else loss.rows(logits, here)

    return own, row_losses(states, head, of_chunk, temperature)


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
