"""Supervised fine-tuning, and the same loss as a pre-training term of an RL update.

Source: InstructGPT (PPO-ptx), arXiv:2203.02155, eq. 2. The weights of tokens: `token_nll`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.math.likelihood import TokenWeight, token_nll
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.finite import note_suspects
from posttrain.core.training.forward import forward_only, response_logprobs
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.objective import LossTerm
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.ranks import ALONE, Ranks, add_gradients
from posttrain.core.training.readings import StepReadings
from posttrain.core.training.splitting import micro_rows
from posttrain.core.types import Problem


def worked_batch(
    tokenizer: ChatTokenizer, problems: Sequence[Problem], limit: int | None = None
) -> RolloutBatch:
    """Prompts with their worked answers as responses; the loss mask covers the response only.

    An answer is cut where it would pass `limit` tokens with its prompt.
    """
    prompts = [tokenizer.encode_prompt(p) for p in problems]
    answers = [tokenizer.encode_worked(p) for p in problems]
    if limit is not None:
        pairs = zip(prompts, answers, strict=True)
        answers = [answer[: max(0, limit - len(prompt))] for prompt, answer in pairs]
    return response_batch(
        prompts=prompts,
        responses=answers,
        group_ids=list(range(len(problems))),
        pad_token_id=tokenizer.pad_token_id,
        problems=problems,
    )


def sft_step(
    model: PreTrainedModel,
    optimizer: MasterOptimizer,
    batch: RolloutBatch,
    *,
    micro_batch_size: int,
    weighting: TokenWeight = "none",
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    readings: StepReadings | None = None,
) -> dict[str, float]:
    """One optimizer step on the mean over all response tokens of `batch`, however it is split.

    `weighting` is that of `token_nll`; the number of tokens divides whatever they weigh.
    """
    num_tokens = float(batch.mask.sum())
    sums = MetricSums()
    if readings is not None:
        readings.begin(batch, ["logprobs", "entropy"], {})
    for rows, counts in ranks.share(micro_rows(batch, micro_batch_size, None, ranks.size)):
        check()
        micro = batch.select(rows)
        out = response_logprobs(model, micro, temperature=1.0)
        if readings is not None and counts:
            readings.put(rows, logprobs=out.logprobs, entropy=out.entropy)
        logprobs, mask = out.logprobs, micro.mask.to(out.logprobs.device)
        loss = token_nll(logprobs, mask, weighting).sum() / num_tokens
        if counts:
            if weighting != "none":
                sums.add_scalar("sft/nll", token_nll(logprobs.detach(), mask).sum() / num_tokens)
            sums.add_scalar("sft/loss", loss.detach())
            note_suspects(sums, loss, rows.tolist(), out.logprobs)
            sums.add_scalar("entropy/mean", out.entropy.detach().sum() / num_tokens)
        add_gradients(loss, counts)
    if readings is not None:
        readings.merge(ranks)
    sums = ranks.merge(sums)
    rows_of_loss = sums.suspects or range(len(batch))
    report = optimizer.step(loss=sums.mean("sft/loss", default=0.0), rows=rows_of_loss)
    return {**sums.result(), **report.metrics(), "tokens/response": num_tokens}


def negative_log_likelihood(
    model: PreTrainedModel,
    batch: RolloutBatch,
    *,
    micro_batch_size: int,
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> tuple[float, float]:
    """The sum over all response tokens of `batch`, in nats, and their number; no gradient."""
    out = forward_only(model, batch, micro_batch_size, 1.0, check, ranks=ranks)
    return -float(out.logprobs.double().sum()), float(batch.mask.sum())


@dataclass(slots=True)
class BestLoss:
    """The lowest held-out loss so far, and how many evaluations in a row did not improve it.

    An improvement lowers it by more than `min_improvement`.
    """

    min_improvement: float = 0.0
    loss: float = math.inf
    step: int = 0
    since: int = 0

    def after(self, step: int, loss: float) -> bool:
        """Take the loss after `step`; whether it is the lowest."""
        self.since = 0 if loss < self.loss - self.min_improvement else self.since + 1
        lowest = loss < self.loss
        if lowest:
            self.loss, self.step = loss, step
        return lowest


@dataclass(frozen=True, slots=True)
class PtxTerm:
    """A loss term on `examples`, `batch_size` of them drawn for every optimizer step.

    `make_batch` turns examples (their indices) into a batch of prompts and responses; the loss is
    taken over the responses, and divided by their own counts, never by the rollout's.
    """

    term: LossTerm
    num_examples: int
    make_batch: Callable[[Sequence[int]], RolloutBatch]
    batch_size: int
    micro_batch_size: int
    seed: int

    def draw(self, step: int, number: int) -> list[int]:
        """Indices of the examples of optimizer step `number` on the rollout batch `step`."""
        chance = generator(self.seed, "ptx", step, number)
        order = torch.randperm(self.num_examples, generator=chance).tolist()
        return [order[i % len(order)] for i in range(self.batch_size)]

    def accumulate(
        self,
        model: PreTrainedModel,
        step: int,
        number: int,
        sums: MetricSums,
        check: Callable[[], None],
        ranks: Ranks = ALONE,
    ) -> None:
        """Add this term's gradient to what the policy terms left on `model`."""
        batch = self.make_batch(self.draw(step, number))
        totals = self.term.aggregator.count(batch.mask, batch.group_id)
        own, coef = MetricSums(), self.term.coef_at(step)
        sums.add_means(self.term.moving_coef(step))
        for rows, counts in ranks.share(micro_rows(batch, self.micro_batch_size, None, ranks.size)):
            check()
            micro = batch.select(rows)
            out = response_logprobs(model, micro, temperature=1.0)
            token_loss = self.term.loss.token_loss(out.logprobs.cpu(), micro)
            loss = coef * self.term.aggregator.aggregate(
                token_loss, micro.mask, totals.rows(rows), micro.group_id
            )
            if counts:
                own.add_scalar("loss/term/ptx", loss.detach())
            add_gradients(loss, counts)
        sums.merge(ranks.merge(own))
