"""PRIME: implicit process rewards and the outcome, each against the group (arXiv:2502.01456)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import AdvantageConfig, Advantages, TokenAdvantage
from posttrain.core.math import groups
from posttrain.core.math.masking import masked, row_sums
from posttrain.core.math.returns import rewards_to_go
from posttrain.core.rewards.shaping import place_on_last_token

EPS = 1e-6  # as in verl's recipe


class PrimeConfig(AdvantageConfig):
    """Settings of the `prime` advantage."""

    process_coef: float = Field(
        default=5.0, ge=0, le=1_000, description="factor of the tokens' rewards"
    )
    outcome_coef: float = Field(
        default=5.0, ge=0, le=1_000, description="factor of the outcome on the last token"
    )
    process_norm: Literal["off", "batch"] = Field(
        default="off",
        description="batch = the tokens' rewards are divided by the largest |sum from a token to "
        "the end| of the batch (verl's prime_norm: batch_norm)",
    )
    process_last: bool = Field(
        default=True, description="false = the last token has no reward of its own (verl)"
    )
    whiten: Literal["off", "tokens", "sequences"] = Field(
        default="tokens",
        description="shift and scale at the end, which makes only the ratio of the factors matter",
    )

    @model_validator(mode="after")
    def _some_factor(self) -> PrimeConfig:
        if self.process_coef == 0 and self.outcome_coef == 0:
            raise ValueError("process_coef and outcome_coef are both 0, so nothing can be learned")
        return self


class PrimeAdvantage(TokenAdvantage[PrimeConfig]):
    """A_it = whiten(c_o R'_i + sum_{k >= t} c_p q'_ik), R' and q' leave-one-out.

    Of the G scored responses of a group: R'_i = G / (G - 1) (R_i - mean R), R_i the sum of
    `token_rewards` [B, T]; q'_it = G / (G - 1) q_it - sum_j mean_t(q_jt) / (G - 1), q [B, T] the
    `process_rewards`. A group of one has 0 for both. An episode of several branches is one
    response: mean_t is over the tokens of all of them, and each ends with the outcome.
    Source: PRIME, arXiv:2502.01456, and its recipe in verl, which is `process_norm: batch` and
    `process_last: false`.
    """

    name = "prime"
    Config = PrimeConfig
    needs: ClassVar[frozenset[str]] = frozenset({"token_rewards", "scored", "process_rewards"})

    def smallest_group(self) -> int:
        """Two: each response is compared with the others."""
        return 2

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Sums [B, T] from each token to the end of its response, not whitened yet."""
        mask, config = batch.response_mask, self.config
        process = self._process_rewards(batch)
        outcome, means = groups.outcome_rewards(batch), _means(process, batch)
        tokens, last = torch.zeros_like(process), torch.zeros_like(outcome)
        firsts, leads = batch.first_branches(), batch.leads()
        for rows in groups.scored_groups(batch.group_id, batch.column("scored")):
            episodes = rows[leads[rows]]
            if (size := episodes.numel()) < 2:
                continue
            scale = size / (size - 1)
            tokens[rows] = scale * process[rows] - means[episodes].sum() / (size - 1)
            last[episodes] = scale * (outcome[episodes] - outcome[episodes].mean())
        if firsts is not None:
            last = last[firsts]
        rewards = config.process_coef * masked(tokens, mask)
        rewards = rewards + place_on_last_token(config.outcome_coef * last, mask)
        return Advantages(rewards_to_go(rewards, mask), metrics=_spread(tokens, mask))

    def _process_rewards(self, batch: RolloutBatch) -> Tensor:
        """q [B, T], 0 outside responses and of responses without a score."""
        mask = batch.response_mask * batch.column("scored")[:, None]
        process = masked(batch.column("process_rewards").double(), mask)
        if not self.config.process_last:
            process = process * (1 - place_on_last_token(torch.ones(len(batch)), mask))
        if self.config.process_norm == "batch":
            process = process / (rewards_to_go(process, mask).abs().max() + EPS)
        return process


def _means(process: Tensor, batch: RolloutBatch) -> Tensor:
    """Mean [B] of `process` [B, T] over the tokens of an episode, where its first row is."""
    sums, lengths = row_sums(process, batch.response_mask), batch.response_mask.double().sum(dim=1)
    if (firsts := batch.first_branches()) is not None:
        sums = torch.zeros_like(sums).index_add(0, firsts, sums)
        lengths = torch.zeros_like(lengths).index_add(0, firsts, lengths)
    return sums / lengths.clamp(min=1)


def _spread(tokens: Tensor, mask: Tensor) -> dict[str, float]:
    own = tokens[mask.bool()]
    return {"prm/process_std": float(own.std(correction=0))} if own.numel() else {}
