"""Process reward model: a score at the end of each step, and one optimizer step on labelled ones.

The score of step j is the logit of P(step j is right), read by a scalar head at the token that ends
it; the loss is the mean over steps of the cross entropy with the label (arXiv:2312.08935, eq. 1).

N answers, M steps of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.steps import StepRow
from posttrain.core.data.tokens import response_batch
from posttrain.core.models.sharded import put_away
from posttrain.core.training.finite import note_suspects
from posttrain.core.training.forward import response_states
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.ranks import ALONE, Ranks, add_gradients
from posttrain.core.training.readings import StepReadings
from posttrain.core.training.splitting import micro_size


def step_logits(model: PreTrainedModel, rows: Sequence[StepRow]) -> Tensor:
    """Logits [M] of the rows' steps, float32, row after row."""
    hidden, _, _, _ = response_states(model, step_batch(rows), include_last=True)
    row_of, columns = places(rows)
    ends = [column + 1 for column in columns]  # the state after that token
    scores: Tensor = model.get_submodule("score")(hidden[row_of, ends])
    return scores.squeeze(-1).float()


def step_batch(rows: Sequence[StepRow]) -> RolloutBatch:
    numbers: dict[tuple[int, ...], int] = {}
    return response_batch(
        prompts=[row.prompt_ids for row in rows],
        responses=[row.response_ids for row in rows],
        group_ids=[numbers.setdefault(row.prompt_ids, len(numbers)) for row in rows],
        pad_token_id=0,
        problems=(),
    )


def places(rows: Sequence[StepRow]) -> tuple[list[int], list[int]]:
    """Row and token [M] that each step ends at."""
    row_of = [number for number, row in enumerate(rows) for _ in row.places]
    return row_of, [place for row in rows for place in row.places]


def process_step(
    model: PreTrainedModel,
    optimizer: MasterOptimizer,
    rows: Sequence[StepRow],
    *,
    micro_batch_size: int,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    readings: StepReadings | None = None,
) -> dict[str, float]:
    """One optimizer step on the mean loss over all steps of `rows`, however they are split."""
    sums, total_steps = MetricSums(), sum(len(row.places) for row in rows)
    if readings is not None:
        batch = step_batch(rows)
        scored = torch.zeros_like(batch.mask)
        scored[places(rows)] = 1
        known = torch.zeros(scored.shape, dtype=torch.float64)
        known[places(rows)] = torch.tensor(
            [v for row in rows for v in row.labels], dtype=known.dtype
        )
        readings.begin(batch, ["scores"], {"scored": scored, "labels": known})
    size = micro_size(len(rows), micro_batch_size, ranks.size)
    for start, counts in ranks.share(range(0, len(rows), size)):
        check()
        part = rows[start : start + size]
        logits = step_logits(model, part)
        labels = torch.tensor([label for row in part for label in row.labels]).to(logits)
        share = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / total_steps
        own = sums if counts else MetricSums()
        if readings is not None and counts:
            index = torch.arange(start, start + len(part))
            said = torch.zeros(len(part), readings.seen["scores"].shape[1])
            said[places(part)] = logits.detach().cpu()
            readings.put(index, scores=said)
        everywhere = torch.ones_like(logits, dtype=torch.bool)
        right = (logits > 0) == (labels > 0.5)
        own.add_scalar("loss/process_reward", share.detach())
        own.add("prm/step_accuracy", right.double(), everywhere)
        own.add("prm/score_mean", logits.detach().sigmoid(), everywhere)
        own.add("prm/label_mean", labels, everywhere)
        note_suspects(own, share, range(start, start + len(part)), logits)
        add_gradients(share, counts)
    if readings is not None:
        readings.merge(ranks)
    sums = ranks.merge(sums)
    total = sums.mean("loss/process_reward", default=0.0)
    report = optimizer.step(loss=total, rows=sums.suspects or range(len(rows)))
    return sums.result() | report.metrics()


@dataclass(frozen=True, slots=True)
class StepRanking:
    """How well steps are kept apart: (on the right side of 1/2, all) of the steps of each problem;
    `ordered` of `pairs` of a better and a worse step of one problem have the better one's score
    higher."""

    problems: Sequence[tuple[int, int]]
    ordered: int
    pairs: int


@torch.no_grad()
def rank_steps(
    model: PreTrainedModel,
    rows: Sequence[StepRow],
    batch_size: int,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> StepRanking:
    """How the model's scores of the rows' steps go with their labels."""
    logits = torch.zeros(sum(len(row.places) for row in rows))
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.places))
    for start, counts in ranks.share(range(0, len(rows), batch_size)):
        check()
        part = rows[start : start + batch_size]
        found = step_logits(model, part)
        if counts:
            logits[starts[start] : starts[start + len(part)]] = found.cpu()
    put_away(model)
    logits = ranks.add(logits)
    labels = torch.tensor([label for row in rows for label in row.labels])
    right = (logits > 0) == (labels > 0.5)
    steps: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        steps.setdefault(row.key, []).extend(range(starts[number], starts[number + 1]))
    ordered = pairs = 0
    for mine in steps.values():
        label_gaps = labels[mine][:, None] - labels[mine][None, :]
        score_gaps = logits[mine][:, None] - logits[mine][None, :]
        better = label_gaps > 0
        pairs += int(better.sum())
        ordered += int((better & (score_gaps > 0)).sum())
    problems = [(int(right[mine].sum()), len(mine)) for mine in steps.values()]
    return StepRanking(problems, ordered, pairs)
