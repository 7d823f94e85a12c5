"""Reward model: scores of whole responses, and one Bradley-Terry step on (right, wrong) pairs.

N sequences, B pairs, S padded width of prompt and response together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PreferenceLoss
from posttrain.core.data.packing import pad_right
from posttrain.core.training.forward import response_states
from posttrain.core.training.optim import MasterOptimizer


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids of a right and a wrong answer to one problem, prompt included."""

    problem_key: str
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


def score_sequences(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Rewards [N], float32, read at the last token of each sequence (prompt and response)."""
    ids, mask = (t.to(model.device) for t in pad_right(rows, 0))
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    last = mask.sum(dim=1) - 1
    head = model.get_submodule("score")
    scores: Tensor = head(hidden[torch.arange(len(rows), device=hidden.device), last])
    return scores.squeeze(-1).float()


def score_batch_rows(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Rewards [B] of a batch's rows, float32; the prompt of a group is computed once.

    Read at the last sampled token, as `score_sequences` does; a row without any is read at the end
    of its prompt.
    """
    hidden, _, mask = response_states(model, batch, include_last=True)
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (columns * mask).amax(dim=1) if mask.shape[1] else mask.sum(dim=1)
    rows = torch.arange(len(batch), device=hidden.device)
    scores: Tensor = model.get_submodule("score")(hidden[rows, last])
    return scores.squeeze(-1).float()


def split_pairs(pairs: Sequence[Pair], held_out_fraction: float) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs; all pairs of one problem land on the same side."""
    keys = list(dict.fromkeys(pair.problem_key for pair in pairs))
    num_held_out = max(1, round(len(keys) * held_out_fraction))
    held_out_keys = set(keys[-num_held_out:])
    train = [p for p in pairs if p.problem_key not in held_out_keys]
    return train, [p for p in pairs if p.problem_key in held_out_keys]


def _balanced(
    count: int, right: Sequence[tuple[int, ...]], wrong: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Up to `count` (right, wrong) combinations that reuse each answer as evenly as possible."""
    limit = min(count, len(right) * len(wrong))
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for chosen, rejected in zip(itertools.cycle(right), itertools.cycle(wrong), strict=False):
        if len(seen) >= limit:
            return
        if (chosen, rejected) in seen:  # both cycles came round: walk the rest in order
            for pair in itertools.product(right, wrong):
                if len(seen) < limit and pair not in seen:
                    seen.add(pair)
                    yield pair
            return
        seen.add((chosen, rejected))
        yield chosen, rejected


def make_pairs(
    problem_key: str,
    prompt_ids: Sequence[int],
    answers: Sequence[tuple[tuple[int, ...], bool]],
    max_pairs: int,
) -> list[Pair]:
    """Pairs of distinct (right, wrong) answers of one problem; none when all are alike."""
    distinct = dict(answers)
    right = [ids for ids, correct in distinct.items() if correct]
    wrong = [ids for ids, correct in distinct.items() if not correct]
    if not right or not wrong:
        return []
    prompt = tuple(prompt_ids)
    return [
        Pair(problem_key, prompt + chosen, prompt + rejected)
        for chosen, rejected in _balanced(max_pairs, right, wrong)
    ]


def preference_step(
    model: PreTrainedModel,
    optimizer: MasterOptimizer,
    pairs: Sequence[Pair],
    loss: PreferenceLoss[Any],
    *,
    micro_batch_size: int,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """One optimizer step on the mean pair loss over `pairs`, however it is split."""
    total, hits, margin = 0.0, 0, 0.0
    for start in range(0, len(pairs), micro_batch_size):
        check()
        part = pairs[start : start + micro_batch_size]
        rows = [p.chosen_ids for p in part] + [p.rejected_ids for p in part]
        chosen, rejected = score_sequences(model, rows).chunk(2)
        micro_loss = loss.pair_loss(chosen, rejected, torch.zeros_like(chosen)).sum() / len(pairs)
        micro_loss.backward()  # type: ignore[no-untyped-call]
        total += float(micro_loss.detach())
        hits += int((chosen > rejected).sum())
        margin += float((chosen - rejected).detach().sum()) / len(pairs)
    report = optimizer.step()
    return {
        "loss/preference": total,
        "rm/pair_accuracy": hits / len(pairs),
        "rm/margin": margin,
        "grad/norm": report.grad_norm,
        "lr": report.learning_rate,
    }


@torch.no_grad()
def pair_hits(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    batch_size: int,
    check: Callable[[], None] = lambda: None,
) -> int:
    """How many pairs the model orders rightly; ties count as wrong."""
    hits = 0
    for start in range(0, len(pairs), batch_size):
        check()
        part = pairs[start : start + batch_size]
        rows = [p.chosen_ids for p in part] + [p.rejected_ids for p in part]
        chosen, rejected = score_sequences(model, rows).chunk(2)
        hits += int((chosen > rejected).sum())
    return hits
