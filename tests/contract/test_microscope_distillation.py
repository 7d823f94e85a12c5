"""What the microscope says of a distillation loss equals autograd through the policy's logits.

The reference takes a random policy's logits at every token, and the loss and the aggregator as a
plugin's author would; the microscope is given what a stage keeps of the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.analysis.evidence import StepEvidence, read_step, write_step
from posttrain.core.analysis.token_weights import token_weights
from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import DistillationLoss, RowLoss, TeacherRows, TextLoss
from posttrain.core.kit.batches import ragged_batch
from posttrain.core.math.masking import masked
from posttrain.core.training.distillation import LOGIT_GRADIENT, rows_with_slopes
from posttrain.core.training.objective import DistillationTerm, Objective
from posttrain.core.training.updates import UpdateSettings
from tests.helpers.losses import MANAGER, build_aggregator

SIZE = 11  # of the vocabulary
COEF = 0.7
WHOLE = UpdateSettings(epochs=1, num_mini_batches=1, micro_batch_size=3, temperature=1.0, seed=0)
AGGREGATORS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
SAMPLED: list[dict[str, Any]] = [
    {"divergence": "reverse", "support": "sampled"},
    {"divergence": "reverse", "support": "sampled", "ratio_cap": 1.1},
    {"divergence": "forward", "support": "topk", "of": "sampled", "top_k": 1},
    {"divergence": "jsd", "support": "topk", "of": "sampled", "top_k": 1},
]
WIDE: dict[str, list[dict[str, Any]]] = {
    "gkd": [
        {},
        {"divergence": "forward", "temperature": 2.0, "scale_tau2": True},
        {"divergence": "reverse", "ratio_cap": 1.1},
        {"divergence": "forward", "support": "topk", "top_k": 3},
        {"divergence": "reverse", "support": "topk", "top_k": 3, "rest": "sampled_tail"},
    ],
    "uld": [{"hybrid": False}, {"divergence": "forward"}],
}


def policy(seed: int) -> tuple[RolloutBatch, Tensor, Tensor]:
    """A batch whose sampled tokens are of logits [B, T, V], and a teacher's logits."""
    draw = torch.Generator().manual_seed(seed)
    batch = ragged_batch(0.0)
    shape = (*batch.mask.shape, SIZE)
    logits, teacher = (
        torch.randn(shape, generator=draw, dtype=torch.float64) * 2 for _ in range(2)
    )
    ids = torch.randint(0, SIZE, batch.mask.shape, generator=draw)
    said = torch.log_softmax(teacher, -1)
    best = said.topk(3, dim=-1)
    own = _of(logits, ids)
    batch = replace(
        batch,
        response_ids=ids,
        teacher_id=None,
        teacher_logprobs=_of(teacher, ids),
        teacher_topk_ids=best.indices,
        teacher_topk_logprobs=best.values,
        old_logprobs=own + 0.3 * torch.randn(own.shape, generator=draw),
        advantages=torch.zeros_like(own),
    )
    return batch, logits, teacher


def _of(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


def said_of(batch: RolloutBatch, teacher: Tensor, where: Tensor) -> TeacherRows:
    return TeacherRows(
        sampled=batch.response_ids[where],
        logits=teacher[where],
        topk_ids=batch.column("teacher_topk_ids")[where],
        topk_logprobs=batch.column("teacher_topk_logprobs")[where],
        old_logprobs=batch.column("old_logprobs")[where],
        logprobs=batch.column("teacher_logprobs")[where],
        matched=torch.tensor([[i, i] for i in range(SIZE - 2)]),
    )


def by_autograd(
    loss: DistillationLoss[Any], batch: RolloutBatch, logits: Tensor, said: TeacherRows, agg: str
) -> Tensor:
    """d loss / d logits [B, T, V], by the loss and the aggregator as they are."""
    leaf = logits.clone().requires_grad_()
    aggregator, mask = build_aggregator(agg), batch.mask
    found: RowLoss = loss.rows(leaf[mask.bool()], said)
    values = torch.zeros(mask.shape, dtype=torch.float64)
    values = values.index_put((mask.bool(),), found.loss)
    weights = aggregator.weights(mask, aggregator.count(mask, batch.group_id))
    (COEF * masked(values * weights, mask).sum()).backward()
    assert leaf.grad is not None
    return leaf.grad


def evidence_of(
    batch: RolloutBatch, logits: Tensor, seen: tuple[Tensor, Tensor] | None
) -> StepEvidence:
    own = _of(logits, batch.response_ids)
    zeros = torch.zeros(len(batch), dtype=torch.int64)
    evidence = StepEvidence(1, batch, own, torch.ones_like(own), zeros)
    if seen is None:
        return evidence
    columns = []
    for values in seen:
        column = torch.full(own.shape, float("nan"), dtype=torch.float64)
        column[batch.mask.bool()] = values.detach()
        columns.append(column)
    return replace(evidence, seen_divergence=columns[0], seen_slope=columns[1])


def objective(loss: DistillationLoss[Any], agg: str) -> Objective:
    aggregator = build_aggregator(agg)
    return Objective((), aggregator, distillation=DistillationTerm(loss, aggregator, COEF))


@pytest.mark.parametrize("agg", AGGREGATORS)
@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_weights_of_losses_on_sampled_tokens_are_those_of_autograd(
    fields: dict[str, Any], agg: str
) -> None:
    """d loss / d logits is weight * (one-hot - p), so the weight is what is left of it."""
    loss = MANAGER.build(DistillationLoss, "gkd", fields)
    assert loss.reads() == "sampled"
    batch, logits, teacher = policy(1)
    logits[0, 0, batch.response_ids[0, 0]] += 60  # certain: log p is 0
    where = batch.mask.bool()
    found = token_weights(evidence_of(batch, logits, None), objective(loss, agg), WHOLE)
    wanted = by_autograd(loss, batch, logits, said_of(batch, teacher, where), agg)
    onehot = torch.nn.functional.one_hot(batch.response_ids, SIZE).double()
    made = found.total[..., None] * (onehot - torch.softmax(logits, -1))
    assert not found.of_logits and found.divergence is None
    assert float(found.total.abs().max()) > 0.01
    torch.testing.assert_close(made, masked(wanted, where[..., None]), rtol=1e-6, atol=1e-9)
    assert abs(float(found.total[0, 0])) > 1e-3 or fields["support"] == "topk"


@pytest.mark.parametrize("agg", AGGREGATORS)
@pytest.mark.parametrize(
    ("name", "fields"), [(n, f) for n, given in WIDE.items() for f in given], ids=str
)
def test_norms_of_losses_on_the_vocabulary_are_those_of_autograd(
    name: str, fields: dict[str, Any], agg: str, tmp_path: Any
) -> None:
    loss = MANAGER.build(DistillationLoss, name, fields)
    batch, logits, teacher = policy(2)
    where = batch.mask.bool()
    if isinstance(loss, TextLoss):  # a stretch for each token
        groups = torch.where(where, torch.arange(where.shape[1])[None, :], -1)
        batch = replace(
            batch,
            text_group=groups,
            teacher_text_group=groups.clone(),
            teacher_response_ids=batch.response_ids,
            teacher_response_mask=batch.response_mask,
        )
    said = said_of(batch, teacher, where)
    rows = rows_with_slopes(loss, logits[where].requires_grad_(), said)
    evidence = evidence_of(batch, logits, (rows.loss, rows.metrics[LOGIT_GRADIENT]))
    write_step(tmp_path, evidence)
    evidence = replace(read_step(tmp_path, 1), token_texts={})
    found = token_weights(evidence, objective(loss, agg), WHOLE)
    wanted = by_autograd(loss, batch, logits, said, agg).norm(dim=-1)
    assert found.of_logits and float(wanted.max()) > 1e-3
    torch.testing.assert_close(found.total, masked(wanted, where), rtol=1e-6, atol=1e-9)


def test_every_installed_distillation_loss_is_here() -> None:
    assert {entry.name for entry in MANAGER.entries("distillation_loss")} == WIDE.keys()
