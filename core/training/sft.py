"""Supervised fine-tuning: token-mean negative log-likelihood of the response alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.packing import response_batch
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.training.forward import response_logprobs
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.ranks import ALONE, Ranks
from posttrain.core.training.splitting import micro_rows
from posttrain.core.types import Problem


def worked_batch(tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> RolloutBatch:
    """Prompts with their worked answers as responses; the loss mask covers the response only."""
    return response_batch(
        prompts=[tokenizer.encode_prompt(p) for p in problems],
        responses=[tokenizer.encode_response(p.worked) for p in problems],
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
    check: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """One optimizer step on the mean over all response tokens of `batch`, however it is split."""
    num_tokens = float(batch.mask.sum())
    sums = MetricSums()
    for rows, counts in ranks.share(micro_rows(batch, micro_batch_size, None, ranks.size)):
        check()
        micro = batch.select(rows)
        out = response_logprobs(model, micro, temperature=1.0)
        loss = -out.logprobs.sum() / num_tokens  # log-probs are 0 outside the response
        if counts:
            sums.add_scalar("sft/loss", loss.detach())
            sums.add_scalar("entropy/mean", out.entropy.detach().sum() / num_tokens)
        (loss if counts else 0.0 * loss).backward()  # type: ignore[no-untyped-call]
    report = optimizer.step()
    return {
        **ranks.merge(sums).result(),
        "grad/norm": report.grad_norm,
        "lr": report.learning_rate,
        "tokens/response": num_tokens,
    }
