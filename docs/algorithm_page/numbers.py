"""The numbers in docs/algorithms.md, every one computed by calling plugins.

Axes: B responses, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import (
    AdvantageEstimator,
    Aggregator,
    KlEstimator,
    PairLoss,
    PairScores,
    PolicyLoss,
    TokenLoss,
)
from posttrain.core.plugin_manager import PluginManager

from .plugins import built_in

SHORT, VALUES = 2, (1.0, 0.7)
"""Tokens of the short response, and the token loss of the short and of the long one."""
LONG = (8, 88)


def number(value: float) -> str:
    """Six decimals at most, and none that say nothing."""
    return f"{value + 0.0:.6f}".rstrip("0").rstrip(".")


def batch(mask: Tensor, **columns: Tensor) -> RolloutBatch:
    """Rows of one group with this mask [B, T]."""
    rows, width = mask.shape
    return RolloutBatch(
        prompt_ids=torch.ones(rows, 1, dtype=torch.int64),
        prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
        response_ids=torch.ones(rows, width, dtype=torch.int64),
        response_mask=mask,
        mask=mask,
        rollout_logprobs=torch.zeros(rows, width),
        policy_version=torch.zeros(rows, width, dtype=torch.int64),
        group_id=torch.zeros(rows, dtype=torch.int64),
        seq_id=torch.arange(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
    ).with_columns(**columns)


def ragged(lengths: Sequence[int]) -> Tensor:
    """Mask [B, T] of responses of these lengths."""
    columns = torch.arange(max(lengths))
    return (columns[None, :] < torch.tensor(lengths)[:, None]).double()


# --- aggregation ------------------------------------------------------------------------------


def token_weights(manager: PluginManager, long: int) -> dict[str, tuple[float, float, float]]:
    """By aggregator: weight of a token of the short response, of the long one, and the loss.

    Each response answers a prompt of its own, and L is the length of the long one.
    """
    mask, found = ragged([SHORT, long]), {}
    losses = torch.tensor(VALUES, dtype=torch.float64)[:, None].expand(mask.shape)
    prompts = torch.arange(2)
    for entry in built_in(manager, "aggregator"):
        fields = {"norm_length": long} if "norm_length" in entry.cls.Config.model_fields else {}
        aggregator = manager.build(Aggregator, entry.name, fields)
        counts = aggregator.count(mask, prompts)
        weights = aggregator.weights(mask, counts)
        loss = aggregator.aggregate(TokenLoss(losses, mask), mask, counts, prompts)
        found[entry.name] = (float(weights[0, 0]), float(weights[1, 0]), float(loss))
    return found


def long_shares(manager: PluginManager) -> dict[str, tuple[float, float]]:
    """By aggregator: the long response's share of all weight, for 8 and for 88 tokens."""
    by_length = []
    for long in LONG:
        weights = token_weights(manager, long).items()
        by_length.append({k: long * b / (SHORT * a + long * b) for k, (a, b, _) in weights})
    return {name: (by_length[0][name], by_length[1][name]) for name in by_length[0]}


def weight_table(manager: PluginManager) -> str:
    """The token weights of both examples as a Markdown table."""
    few, many = (token_weights(manager, long) for long in LONG)
    shares = long_shares(manager)
    lines = [
        "| aggregator | token of 2 | token of 8 | loss | token of 2 | token of 88 | loss "
        "| share of the 88 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in few:
        cells = [number(x) for x in (*few[name], *many[name])]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {100 * shares[name][1]:.1f} % |")
    return "\n".join(lines)


# --- KL estimates -----------------------------------------------------------------------------


def kl_table(manager: PluginManager) -> str:
    """Mean, variance and the two mean gradients of each sampled estimate, two outcomes.

    pi = (1/2, 1/2), q = (1/4, 3/4); gradients are in the logit of the first outcome.
    """
    q = torch.tensor([0.25, 0.75], dtype=torch.float64)
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    pi = logprobs.detach().exp()
    (true,) = torch.autograd.grad((logprobs.exp() * (logprobs - q.log())).sum(), logits)
    score = torch.tensor([1.0, 0.0]) - pi[0]  # of log pi, in the first logit
    lines = [
        f"| estimate | mean (KL = {number(float((pi * (pi / q).log()).sum()))}) | variance "
        f"| gradient in the loss (wanted: {number(float(true[0]))}) | gradient in the reward |",
        "|---|---|---|---|---|",
    ]
    for name in ("k1", "k2", "k3", "k3+", "abs"):
        logprobs = logits.log_softmax(0)
        values = manager.build(KlEstimator, name).kl(logprobs[None], q.log()[None])[0]
        (in_loss,) = torch.autograd.grad((pi * values).sum(), logits)
        held = values.detach()
        mean = float((pi * held).sum())
        spread = float((pi * (held - mean).square()).sum())
        in_reward = float((pi * held * score).sum())
        cells = (mean, spread, float(in_loss[0]), in_reward)
        lines.append(f"| `{name}` | {' | '.join(map(number, cells))} |")
    return "\n".join(lines)


# --- single facts -----------------------------------------------------------------------------


def _loss(
    manager: PluginManager, name: str, ratios: Sequence[float], advantage: float
) -> tuple[list[float], list[float]]:
    """Token losses of one response with these ratios, and minus their gradients in log-probs.

    The gradient is that of the mean over tokens, times the number of tokens.
    """
    old = torch.zeros(1, len(ratios), dtype=torch.float64)
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    rows = batch(torch.ones_like(old), old_logprobs=old, advantages=torch.full_like(old, advantage))
    result = manager.build(PolicyLoss, name).token_loss(logprobs, rows)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result.loss[0].tolist(), (-gradient[0]).tolist()


def _prefix_weights(manager: PluginManager) -> dict[str, float]:
    """Net weight of a prefix token shared by three answers (10, 11, 11 tokens; one is right)."""
    mask, found = ragged([10, 11, 11]), {}
    rewards = torch.zeros_like(mask)
    rewards[0, 9] = 1.0
    rows = batch(mask, token_rewards=rewards, scored=torch.ones(3, dtype=torch.bool))
    advantages = manager.build(AdvantageEstimator, "dr_grpo").estimate(rows).advantages
    for name in ("token-mean", "seq-mean-token-mean"):
        aggregator = manager.build(Aggregator, name)
        weights = aggregator.weights(mask, aggregator.count(mask))
        found[name] = float((weights * advantages)[:, 0].sum())
    return found


def _both_falling(manager: PluginManager) -> tuple[float, float]:
    """DPO's loss (beta 1) before and after both answers of a pair have lost probability."""
    chosen, rejected = math.log(0.3 / 0.4), math.log(0.1 / 0.3)
    loss = manager.build(PairLoss, "dpo", {"beta": 1.0})
    found = []
    for scale in (0.0, 1.0):
        scores = torch.tensor([[scale * chosen], [scale * rejected]], dtype=torch.float64)
        found.append(float(loss.pair_loss(PairScores.of_rewards(scores[0], scores[1]))))
    return found[0], found[1]


def facts(manager: PluginManager) -> Mapping[str, str]:
    """Single numbers that the prose quotes, by the name it quotes them under."""
    few, many = token_weights(manager, 8), token_weights(manager, 88)
    grpo, _ = _loss(manager, "ppo_clip", (2.0, 0.4), 1.0)
    gspo = manager.build(PolicyLoss, "gspo", {"clip_low": 0.2, "clip_high": 0.2})
    pair = batch(
        torch.ones(1, 2),
        old_logprobs=torch.zeros(1, 2, dtype=torch.float64),
        advantages=torch.ones(1, 2, dtype=torch.float64),
    )
    two = torch.tensor([[2.0, 0.4]], dtype=torch.float64).log()
    _, up = _loss(manager, "ppo_clip", (0.5, 1.5), 1.0)
    _, down = _loss(manager, "ppo_clip", (0.5, 1.5), -1.0)
    prefix, dpo = _prefix_weights(manager), _both_falling(manager)
    thousand = torch.zeros(1, 1000, dtype=torch.float64)
    thousand[0, 0] = math.log(1e-10)
    rows = batch(
        torch.ones(1, 1000),
        old_logprobs=torch.zeros_like(thousand),
        advantages=torch.ones_like(thousand),
    )
    shrunk = gspo.token_loss(thousand, rows).ratio
    assert shrunk is not None
    k1 = manager.build(KlEstimator, "k1").kl(torch.tensor([0.2, -0.1, 0.3]), torch.zeros(3))
    shaped = (torch.tensor([0.0, 0.0, 1.0]) - 0.1 * k1).tolist()
    numbers = {
        "short_weight": many["token-mean"][0],
        "long_share": long_shares(manager)["token-mean"][1],
        "two_level": few["seq-mean-token-mean"][2],
        "one_level": few["token-mean"][2],
        "grpo_second": -grpo[1],
        "grpo_mean": -sum(grpo) / 2,
        "gspo_value": -float(gspo.token_loss(two, pair).loss[0, 0]),
        "up_low": up[0],
        "up_high": up[1],
        "down_low": down[0],
        "down_high": down[1],
        "prefix_token": prefix["token-mean"],
        "prefix_seq": prefix["seq-mean-token-mean"],
        "dpo_before": dpo[0],
        "dpo_after": dpo[1],
        "gspo_shrunk": float(shrunk[0, 0]),
        "kl_first": shaped[0],
        "kl_second": shaped[1],
        "kl_last": shaped[2],
    }
    return {name: number(value) for name, value in numbers.items()}
