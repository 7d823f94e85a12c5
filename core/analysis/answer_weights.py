"""How much the loss of a step on given answers pulls at each token: d loss / d logprob.

Of preferences, demonstrations, and what a reward model is trained on; there the weight is d loss /
d score, at the token where the model reads its score. No model is needed. A negative weight makes
its token likelier, or raises its score. Axes: B answers, T answer tokens, N pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.token_weights import CLIP_STATES, TokenWeights
from posttrain.core.contracts import PairLoss, PairScores
from posttrain.core.errors import ConfigError
from posttrain.core.math.likelihood import TokenWeight, token_nll
from posttrain.core.training.preference_objective import (
    LabelTokens,
    MiniCounts,
    PairTokens,
    PreferenceObjective,
    Tokens,
)

_DROPPED, _NO_LOSS = CLIP_STATES.index("dropped"), CLIP_STATES.index("no loss")


@dataclass(frozen=True, slots=True)
class AnswerWeights:
    """A step under one loss. `losses` [B] are of each answer, or of the pair that it belongs to.

    `rewards` [B] are those that a preference loss implies, or a reward model's scores. `kinds` [B]
    is 1 for chosen and desirable answers, 0 for the others, and None where there is one kind.
    `of_scores`: the weights are those of a reward model's scores.
    """

    tokens: TokenWeights
    losses: Tensor
    rewards: Tensor | None = None
    kinds: Tensor | None = None
    verdicts: tuple[str, str] = ("rejected", "chosen")
    of_scores: bool = False


# --- what a page and a table show ----------------------------------------------------------------


def answer_columns(evidence: StepEvidence) -> dict[str, Tensor]:
    """Of each token what the model said [B, T], NaN where nothing: log-prob and entropy (nats).

    Of a reward model its score, and the label of a step.
    """
    given, takes_loss = evidence.given, evidence.batch.mask.bool()
    if "scored" in given:
        read = given["scored"].bool()
        found = {"score": given["scores"], "label": given.get("labels")}
        return {
            n: torch.where(read, v.float(), torch.nan) for n, v in found.items() if v is not None
        }
    said = {"logprobs": evidence.seen_logprobs, "entropy": evidence.seen_entropy}
    return {name: torch.where(takes_loss, values, torch.nan) for name, values in said.items()}


def answer_rows(
    evidence: StepEvidence, answers: AnswerWeights, limit: int
) -> list[dict[str, object]]:
    """What stands above the first `limit` answers on the page, one more to have whole pairs."""
    batch = evidence.batch
    takes_loss = evidence.given.get("scored", batch.mask)
    return [
        {
            "group": int(batch.group_id[index]),
            "prompt": batch.problems[index].prompt,
            "correct": None if answers.kinds is None else float(answers.kinds[index]),
            "loss": float(answers.losses[index]),
            "reward": None if answers.rewards is None else float(answers.rewards[index]),
            "parts": {},
            "seen_by": 0,
            "loss_tokens": int(takes_loss[index].sum()),
        }
        for index in range(min(len(batch), limit + limit % 2))
    ]


def answer_samples(
    evidence: StepEvidence, answers: AnswerWeights, limit: int
) -> list[dict[str, object]]:
    """The same as rows of a table."""
    found: list[dict[str, object]] = []
    for index, row in enumerate(answer_rows(evidence, answers, limit)):
        shown: dict[str, object] = {
            "group": row["group"],
            "example": evidence.batch.problems[index].key,
            "response": evidence.batch.texts[index],
        }
        if answers.kinds is not None:
            shown["answer"] = answers.verdicts[int(answers.kinds[index])]
        if answers.rewards is not None:
            shown["reward"] = row["reward"]
        found.append(shown | {"loss": row["loss"], "tokens": row["loss_tokens"]})
    return found


# --- weights -------------------------------------------------------------------------------------


def preference_weights(evidence: StepEvidence, objective: PreferenceObjective) -> AnswerWeights:
    """Under a loss on preferences; raises `ConfigError` where it reads what the stage did not."""
    if objective.needs_reference and evidence.batch.ref_logprobs is None:
        raise ConfigError(
            "it is relative to a reference, of which this stage has computed no log-probs"
        )
    if objective.scoring.wpo and "log_sum_sq" not in evidence.given:
        raise ConfigError("it reads the policy's squared probabilities, which were not computed")
    if objective.needs_kl_completions and "kl_scores" not in evidence.given:
        raise ConfigError("it reads mismatched answers, which this stage has not scored")
    leaf = evidence.seen_logprobs.double().requires_grad_()
    with torch.enable_grad():
        tokens = _tokens(evidence, leaf, objective)
        counts = MiniCounts.of(tokens)
        prepared = objective.nothing_prepared()
        if objective.needs_prepare or objective.needs_kl_completions:
            prepared = objective.prepare(_with_mismatched(evidence, tokens))
        loss = objective.loss(tokens, counts, prepared)
        (grad,) = torch.autograd.grad(loss.total, leaf)
        losses = loss.losses.detach()
        if isinstance(tokens, LabelTokens):
            rewards = objective.rewards.scale * objective.scoring.labelled(tokens, counts).scores
            kinds, verdicts = tokens.desirable, ("undesirable", "desirable")
        else:
            rewards = _alternating(*objective.rewards.of(objective.scoring.pairs(tokens, counts)))
            kinds, verdicts = _first_of_pairs(evidence), ("rejected", "chosen")
            losses = losses.repeat_interleave(2)
    weights = _token_weights(evidence, grad)
    return AnswerWeights(weights, losses, rewards.detach(), kinds, verdicts)


def likelihood_weights(evidence: StepEvidence, weighting: TokenWeight) -> AnswerWeights:
    """Under the negative log-likelihood of the learned tokens, as an `sft` stage has it."""
    leaf, mask = evidence.seen_logprobs.double().requires_grad_(), evidence.batch.mask
    with torch.enable_grad():
        values = token_nll(leaf, mask, weighting)
        (grad,) = torch.autograd.grad(values.sum() / mask.sum(), leaf)
    losses = values.detach().sum(dim=1) / mask.sum(dim=1)
    return AnswerWeights(_token_weights(evidence, grad), losses)


def reward_weights(evidence: StepEvidence, loss: PairLoss[Any]) -> AnswerWeights:
    """Of a reward model's scores, under a loss on pairs."""
    scores = evidence.given["scores"].double().sum(dim=1).requires_grad_()
    with torch.enable_grad():
        pairs = PairScores.of_rewards(scores[0::2], scores[1::2], evidence.given["margin"])
        losses = loss.pair_loss(pairs)
        (grad,) = torch.autograd.grad(losses.sum() / pairs.num_pairs, scores)
    at_end = grad[:, None] * evidence.given["scored"]
    weights = _token_weights(evidence, at_end, evidence.given["scored"])
    return AnswerWeights(
        weights,
        losses.detach().repeat_interleave(2),
        scores.detach(),
        _first_of_pairs(evidence),
        of_scores=True,
    )


def process_weights(evidence: StepEvidence) -> AnswerWeights:
    """Of a process reward model's scores, under the cross entropy with the steps' labels."""
    given, scored = evidence.given, evidence.given["scored"].bool()
    scores = given["scores"].double().requires_grad_()
    with torch.enable_grad():
        values = binary_cross_entropy_with_logits(scores, given["labels"], reduction="none")
        (grad,) = torch.autograd.grad(values[scored].sum() / scored.sum(), scores)
    losses = (values.detach() * scored).sum(dim=1) / scored.sum(dim=1)
    return AnswerWeights(_token_weights(evidence, grad, scored), losses, of_scores=True)


def _first_of_pairs(evidence: StepEvidence) -> Tensor:
    """1 for chosen answers, 0 for rejected ones [B]."""
    return 1 - torch.arange(len(evidence.batch)) % 2


def _alternating(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[2N] of two [N], in turn."""
    return torch.stack([chosen, rejected], dim=1).flatten()


def _tokens(evidence: StepEvidence, logprobs: Tensor, objective: PreferenceObjective) -> Tokens:
    batch, given = evidence.batch, evidence.given
    ref = batch.ref_logprobs if objective.needs_reference else None
    if "desirable" in given:
        return LabelTokens(logprobs, batch.mask, given["desirable"], ref)
    squares = given.get("log_sum_sq")
    return PairTokens(
        chosen=logprobs[0::2],
        rejected=logprobs[1::2],
        chosen_mask=batch.mask[0::2],
        rejected_mask=batch.mask[1::2],
        ref_chosen=None if ref is None else ref[0::2],
        ref_rejected=None if ref is None else ref[1::2],
        chosen_log_sum_sq=None if squares is None else squares[0::2],
        rejected_log_sum_sq=None if squares is None else squares[1::2],
        margin=given["margin"],
    )


def _with_mismatched(evidence: StepEvidence, tokens: Tokens) -> Tokens:
    """`tokens` with each mismatched answer as one token that has its whole log-ratio."""
    scores = evidence.given.get("kl_scores")
    if scores is None or isinstance(tokens, PairTokens):
        return tokens
    column = scores[:, None]
    return replace(tokens, kl_logprobs=column, kl_mask=torch.ones_like(column))


def _token_weights(
    evidence: StepEvidence, grad: Tensor, where: Tensor | None = None
) -> TokenWeights:
    takes_loss = (evidence.batch.mask if where is None else where).bool()
    total = torch.where(takes_loss, grad, 0.0).float()
    clip = torch.full(total.shape, _NO_LOSS, dtype=torch.uint8)
    clip[takes_loss] = 0
    clip[takes_loss & (total == 0)] = _DROPPED
    return TokenWeights(total, total, clip)
