"""Preference learning: mini-batches of pairs or labels, one optimizer step, held-out ranking.

Axes: N pairs or labelled rows of a mini-batch, B rows of its batch (two for each pair), T response
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.preference import LabelledAnswer, Pair, mismatched_answers
from posttrain.core.data.tokens import response_batch
from posttrain.core.math.intervals import tallied
from posttrain.core.training.exact_kl import response_sum_pi_squared
from posttrain.core.training.finite import note_suspects
from posttrain.core.training.forward import forward_only, response_logprobs
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.preference_objective import (
    LabelTokens,
    MiniCounts,
    PairTokens,
    PreferenceObjective,
    PreparedTerms,
    Tokens,
    with_margin,
)
from posttrain.core.training.ranks import ALONE, Ranks, add_gradients
from posttrain.core.training.readings import StepReadings
from posttrain.core.training.splitting import micro_size


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
            sampled=[own for pair in pairs for own in (pair.chosen_learned, pair.rejected_learned)],
        )
        return cls(batch, torch.tensor([pair.margin for pair in pairs], dtype=torch.float64))

    def counts(self) -> MiniCounts:
        return MiniCounts(float(len(self.margin)), float(self.batch.mask[0::2].sum()))

    def given(self) -> dict[str, Tensor]:
        return {"margin": self.margin}

    def rows(self, index: Tensor) -> Tensor:
        """Rows of `batch` that pairs `index` [n] have."""
        return torch.stack([2 * index, 2 * index + 1], dim=1).flatten()

    def micro_batches(self, size: int) -> Iterator[tuple[Tensor, PairMini]]:
        for index in torch.split(torch.arange(len(self.margin)), size):
            yield index, PairMini(self.batch.select(self.rows(index)), self.margin[index])

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
        batch = answer_batch(rows, rows, pad_token_id)
        return cls(batch, torch.tensor([row.desirable for row in rows]))

    def counts(self) -> MiniCounts:
        return MiniCounts(float(len(self.desirable)))

    def given(self) -> dict[str, Tensor]:
        return {"desirable": self.desirable}

    def rows(self, index: Tensor) -> Tensor:
        return index

    def micro_batches(self, size: int) -> Iterator[tuple[Tensor, LabelMini]]:
        for index in torch.split(torch.arange(len(self.desirable)), size):
            yield index, LabelMini(self.batch.select(index), self.desirable[index])

    def tokens(self, logprobs: Tensor, log_sum_sq: Tensor | None = None) -> LabelTokens:
        return LabelTokens(logprobs, self.batch.mask, self.desirable, self.batch.ref_logprobs)


Mini = PairMini | LabelMini


def answer_batch(
    rows: Sequence[LabelledAnswer], answers: Sequence[LabelledAnswer], pad_token_id: int
) -> RolloutBatch:
    """The rows' prompts with the answers of `answers`; rows of one prompt share it."""
    numbers = {row.prompt_ids: number for number, row in enumerate(rows)}
    return response_batch(
        prompts=[row.prompt_ids for row in rows],
        responses=[row.answer_ids for row in answers],
        group_ids=[numbers[row.prompt_ids] for row in rows],
        pad_token_id=pad_token_id,
        problems=(),
        sampled=[row.answer_learned for row in answers],
    )


def with_mismatched(tokens: Tokens, logprobs: Tensor, batch: RolloutBatch) -> Tokens:
    """`tokens` with the log-probs [N, T] of mismatched answers, which are the rows of `batch`."""
    assert isinstance(tokens, LabelTokens), "only losses of labelled rows ask for these"
    return replace(
        tokens, kl_logprobs=logprobs, ref_kl_logprobs=batch.ref_logprobs, kl_mask=batch.mask
    )


Rows = Sequence[Pair | LabelledAnswer]
"""Pairs, or labelled answers; never both."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How many answers the policy puts in the right order, and the mean gap of their rewards.

    `prompts` has (in order, all) of the pairs of each prompt. Labelled rows make a pair of every
    wanted and unwanted answer to one prompt; where no prompt has both, single rows are counted,
    right when the reward has the sign of the label, and `by_pairs` is false.
    """

    prompts: Sequence[tuple[int, int]]
    gap: float
    by_pairs: bool = True

    @classmethod
    def of(cls, gaps: Sequence[tuple[str, float]], *, by_pairs: bool = True) -> Ranking:
        """From the gaps with their prompts' keys, right where positive; a tie counts as wrong."""
        values = [gap for _, gap in gaps]
        in_order = tallied((key for key, _ in gaps), (gap > 0 for gap in values))
        return cls(in_order, sum(values) / len(values), by_pairs)


@dataclass(frozen=True, slots=True)
class PreferenceLearner:
    """A policy, its frozen reference (when a loss is relative to one) and the objective.

    `micro_batch_size` counts pairs or labelled rows; it changes memory, never the result. `check`
    runs between micro-batches (it raises to stop).
    """

    model: PreTrainedModel
    objective: PreferenceObjective
    pad_token_id: int
    micro_batch_size: int
    reference: PreTrainedModel | None = None
    check: Callable[[], None] = lambda: None
    ranks: Ranks = ALONE

    def step(
        self, rows: Rows, optimizer: MasterOptimizer, readings: StepReadings | None = None
    ) -> dict[str, float]:
        """One optimizer step on the mean loss over `rows`, however it is split."""
        metrics, suspects = self.accumulate(rows, readings)
        total = metrics.get("loss/preference", 0.0)
        report = optimizer.step(loss=total, rows=suspects or range(len(rows)))
        return metrics | report.metrics() | {"grad/clipped": float(report.grad_clipped)}

    def accumulate(
        self, rows: Rows, readings: StepReadings | None = None
    ) -> tuple[dict[str, float], set[int]]:
        """Add the gradient of the mini-batch's loss to the model.

        Returns the metrics, and the rows whose part of the loss is not finite.
        """
        mini, sums = self._mini(rows), MetricSums()
        counts, prepared = mini.counts(), self._prepare(rows, mini)
        if readings is not None:
            seen = ["logprobs", "entropy", *(["log_sum_sq"] if self.objective.scoring.wpo else [])]
            readings.begin(mini.batch, seen, {**mini.given(), "kl_scores": prepared.kl_scores})
        size = micro_size(len(rows), self.micro_batch_size, self.ranks.size)
        micros: list[tuple[Tensor, Mini]] = list(mini.micro_batches(size))
        for (index, micro), is_own in self.ranks.share(micros):
            self.check()
            out = response_logprobs(self.model, micro.batch, temperature=1.0)
            squares = self._log_sum_sq(micro.batch)
            tokens = micro.tokens(out.logprobs.cpu(), squares)
            share = self.objective.loss(tokens, counts, prepared.rows(index))
            if readings is not None and is_own:
                said = {"logprobs": out.logprobs, "entropy": out.entropy, "log_sum_sq": squares}
                readings.put(mini.rows(index), **said)
            if is_own:
                share.record(sums)
                note_suspects(sums, share.total, index.tolist(), out.logprobs)
            add_gradients(share.total, is_own)
        if readings is not None:
            readings.merge(self.ranks)
        sums = self.ranks.merge(sums)
        metrics = with_margin(sums.result()) | dict(prepared.metrics)
        return metrics | {"tokens/response": float(mini.batch.mask.sum())}, sums.suspects

    def _mini(self, rows: Rows) -> Mini:
        """The mini-batch, with the reference's log-probs if any loss reads them."""
        mini: Mini
        if isinstance(rows[0], Pair):
            pairs = [row for row in rows if isinstance(row, Pair)]
            mini = PairMini.of(pairs, self.pad_token_id)
        else:
            mini = LabelMini.of(_labelled(rows), self.pad_token_id)
        return replace(mini, batch=self._with_reference(mini.batch))

    def _with_reference(self, batch: RolloutBatch) -> RolloutBatch:
        if not self.objective.needs_reference:
            return batch
        assert self.reference is not None, "a loss relative to a reference needs its model"
        return batch.with_columns(ref_logprobs=self.forward_only(self.reference, batch))

    def _prepare(self, rows: Rows, mini: Mini) -> PreparedTerms:
        """What the losses take from the whole mini-batch; log-probs nobody asked for are NaN."""
        objective = self.objective
        if not (objective.needs_prepare or objective.needs_kl_completions):
            return objective.nothing_prepared()
        logprobs = torch.full(mini.batch.response_ids.shape, float("nan"))
        if objective.needs_prepare:
            logprobs = self.forward_only(self.model, mini.batch)
        tokens = mini.tokens(logprobs)
        if objective.needs_kl_completions:
            labelled = _labelled(rows)
            other = answer_batch(labelled, mismatched_answers(labelled), self.pad_token_id)
            other = self._with_reference(other)
            tokens = with_mismatched(tokens, self.forward_only(self.model, other), other)
        return objective.prepare(tokens)

    def _log_sum_sq(self, batch: RolloutBatch) -> Tensor | None:
        if not self.objective.scoring.wpo:
            return None
        return response_sum_pi_squared(self.model, batch, temperature=1.0).log()

    def forward_only(self, model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
        """Log-probs [B, T] of `model` without gradient, in micro-batches."""
        size, ranks = 2 * self.micro_batch_size, self.ranks
        return forward_only(model, batch, size, 1.0, self.check, ranks=ranks).logprobs

    @torch.no_grad()
    def rank(self, rows: Rows) -> Ranking:
        mini, objective = self._mini(rows), self.objective
        logprobs = self.forward_only(self.model, mini.batch)
        if isinstance(mini, PairMini):
            scores = objective.scoring.pairs(mini.tokens(logprobs), mini.counts())
            chosen, rejected = objective.rewards.of(scores)
            keys = [row.key for row in rows]
            return Ranking.of(list(zip(keys, (chosen - rejected).tolist(), strict=True)))
        scored = objective.scoring.labelled(mini.tokens(logprobs), mini.counts())
        rewards = (objective.rewards.scale * scored.scores).tolist()
        prompts: dict[str, tuple[list[float], list[float]]] = {}
        signed = []
        for row, reward in zip(_labelled(rows), rewards, strict=True):
            prompts.setdefault(row.key, ([], []))[0 if row.desirable else 1].append(reward)
            signed.append((row.key, reward if row.desirable else -reward))
        gaps = [(k, a - b) for k, (wanted, other) in prompts.items() for a in wanted for b in other]
        return Ranking.of(gaps) if gaps else Ranking.of(signed, by_pairs=False)


def _labelled(rows: Rows) -> Sequence[LabelledAnswer]:
    found = [row for row in rows if isinstance(row, LabelledAnswer)]
    assert len(found) == len(rows), "a config check keeps pairs and labelled rows apart"
    return found


class BothFallingAlarm:
    """Tells when the loss falls only because rejected answers lose more than chosen ones do.

    It is `ringing` when `pref/both_falling` was above `limit` in each of the last `window` steps,
    and is reported once.
    """

    def __init__(self, limit: float, window: int) -> None:
        self.limit = limit
        self._recent: deque[float] = deque(maxlen=window)
        self._rung = self.ringing = False

    def after(self, metrics: Mapping[str, float]) -> str | None:
        """What is to be reported, if the step with these metrics is the first at which it rings."""
        self._recent.append(metrics.get("pref/both_falling", 0.0))
        full = len(self._recent) == self._recent.maxlen
        self.ringing = full and min(self._recent) > self.limit
        if self._rung or not self.ringing:
            return None
        self._rung = True
        return (
            f"in each of the last {len(self._recent)} steps more than "
            f"{self.limit:.0%} of pairs lost probability in both answers (pref/both_falling "
            f"{self._recent[-1]:.2f}): the chosen answers become less likely while the loss falls; "
            "add the loss 'sft' to preference_loss, set dpop_lambda of 'dpo', or lower "
            "optimizer.learning_rate"
        )
