"""Advantage estimators: rewards of a whole rollout batch to advantages per token.

`AdvantageEstimator` is the contract. `TokenAdvantage` (a number per token), `RowAdvantage` (one
number per response) and `GroupAdvantage` (compared with the other responses to the same prompt)
spare an estimator the parts that all of their kind share: broadcasting, masking, whitening, groups
of one, all-equal groups.

Axes: B sequences, T response tokens, G compared sequences of one group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts.base import ConfigT, PluginConfig, StatefulPlugin
from posttrain.core.contracts.columns import REWARD_COLUMNS
from posttrain.core.errors import RunError
from posttrain.core.math import groups
from posttrain.core.math.masking import masked, whiten_row_means, whiten_rows, whiten_tokens
from posttrain.core.math.returns import ValuedSteps
from posttrain.core.math.turns import on_tokens, sampled_turns


@dataclass(frozen=True, slots=True)
class Advantages:
    """`advantages` [B, T], exactly 0 where `mask` is 0; `returns` [B, T] only for a critic."""

    advantages: Tensor
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AdvantageEstimator(StatefulPlugin[ConfigT]):
    """Turns the rewards of a whole rollout batch into per-token advantages, without gradient."""

    kind = "advantage"
    needs: ClassVar[frozenset[str]] = frozenset({"token_rewards", "scored"})
    is_zero: ClassVar[bool] = False
    """It is 0 on purpose, whatever the rewards are."""
    takes_branches: ClassVar[bool] = True
    """Rows that are branches of one episode may come. False: a stage whose environment is a
    program that plays its episodes, which may branch, is refused."""

    def required_columns(self) -> frozenset[str]:
        """Columns of the batch that `estimate` reads; `needs`, and more if the config asks."""
        return self.needs

    def reads_token_rewards(self) -> bool:
        """Whether rewards of single tokens, such as KL in the reward, reach the result.

        False: they would be lost, so a batch that has them is refused.
        """
        return True

    def reward_columns(self) -> frozenset[str]:
        """Those of `REWARD_COLUMNS` that the result depends on.

        A reward with a weight that reaches none of them is refused, because it would change
        nothing.
        """
        columns = self.required_columns() & REWARD_COLUMNS
        if self.reads_token_rewards():
            return columns
        # Both may stand there only to be checked.
        return columns - {"token_rewards"} - ({"rewards"} - self.needs)

    def smallest_group(self) -> int:
        """Responses per prompt below which this estimator has nothing to compare (1 = any)."""
        return 1

    @abstractmethod
    def estimate(self, batch: RolloutBatch) -> Advantages:
        """Advantages of every row of `batch`; group statistics run over its scored rows."""


class AdvantageConfig(PluginConfig):
    """Settings of every built-in estimator: what happens to the advantages at the end."""

    whiten: Literal["off", "tokens", "sequences"] = Field(
        default="off",
        description="shift and scale at the end: over all tokens (long responses weigh more), or "
        "over responses",
    )
    whiten_ddof: Literal[0, 1] = Field(
        default=1, description="variance of the whitening: 1 = unbiased, 0 = population (OpenRLHF)"
    )
    whiten_eps: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="null = 1e-8 in the variance of tokens, 1e-4 on the deviation of sequences",
    )


class WhitenedConfig(AdvantageConfig):
    """Settings of the estimators that whiten unless they are set not to."""

    whiten: Literal["off", "tokens", "sequences"] = Field(
        default="tokens",
        description="shift and scale over all tokens of the rollout batch (long responses weigh "
        "more), over responses, or not at all; `returns` never are",
    )


AdvantageConfigT = TypeVar("AdvantageConfigT", bound=AdvantageConfig)


class TokenAdvantage(AdvantageEstimator[AdvantageConfigT]):
    """Estimators whose advantage may differ from token to token."""

    def required_columns(self) -> frozenset[str]:
        """`needs`, and `rewards` to tell whether token rewards hold more than the outcome."""
        return self.needs if self.reads_token_rewards() else self.needs | {"rewards"}

    @abstractmethod
    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Advantages [B, T] in float64, not whitened; masked positions may hold anything."""

    def estimate(self, batch: RolloutBatch) -> Advantages:
        """Whiten as configured, and cut to the mask of the scored rows."""
        if not self.reads_token_rewards():
            _refuse_token_terms(batch, self.name)
        found = self.token_advantages(batch)
        # A row kept in the loss although nobody scored it still teaches nothing.
        taken = masked(batch.mask.bool(), batch.column("scored")[:, None])
        dtype = batch.column("token_rewards").dtype
        returns = found.returns
        return Advantages(
            masked(self.whitened(found.advantages, taken, batch.first_branches()).to(dtype), taken),
            returns=None if returns is None else masked(returns.to(dtype), taken),
            metrics=found.metrics,
        )

    def whitened(self, tokens: Tensor, taken: Tensor, firsts: Tensor | None) -> Tensor:
        """`tokens` [B, T] shifted and scaled over those `taken` [B, T], as `whiten` says.

        `firsts` [B] is the first row of each row's episode, None where every row is an episode.
        """
        config, eps = self.config, self.config.whiten_eps
        if config.whiten == "tokens":
            floor = 1e-8 if eps is None else eps
            return whiten_tokens(tokens, taken, ddof=config.whiten_ddof, eps=floor)
        if config.whiten == "sequences":
            added = 1e-4 if eps is None else eps
            return whiten_row_means(tokens, taken, firsts, ddof=config.whiten_ddof, eps=added)
        return tokens


class RowAdvantage(TokenAdvantage[AdvantageConfigT]):
    """Estimators with one advantage per response, the same on each of its tokens."""

    @abstractmethod
    def row_advantages(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, float]]:
        """Advantages [B] in float64 (unscored rows may hold anything), and metrics.

        Of an episode the first row alone is `scored`, however many branches it has.
        """

    def episode_advantages(
        self, batch: RolloutBatch, *, whitened: bool = False
    ) -> tuple[Tensor, dict[str, float]]:
        """Advantages [B], those of its episode on each branch, and metrics.

        `whitened` over scored rows, those without a token of loss included: they are in the groups
        too.
        """
        firsts, scored = batch.first_branches(), batch.column("scored").bool()
        if firsts is not None:
            scored = scored & batch.leads()
            batch = batch.with_columns(scored=scored)
        rows, metrics = self.row_advantages(batch)
        if whitened:
            config = self.config
            eps = 1e-4 if config.whiten_eps is None else config.whiten_eps
            rows = whiten_rows(rows, scored, ddof=config.whiten_ddof, eps=eps)
        return (rows if firsts is None else masked(rows, scored)[firsts]), metrics

    def per_token(self, rows: Tensor, batch: RolloutBatch) -> Tensor:
        return rows[:, None].expand(batch.response_mask.shape)

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        by_rows = self.config.whiten == "sequences"
        rows, metrics = self.episode_advantages(batch, whitened=by_rows)
        return Advantages(self.per_token(rows, batch), metrics=metrics)

    def whitened(self, tokens: Tensor, taken: Tensor, firsts: Tensor | None) -> Tensor:
        by_rows = self.config.whiten == "sequences"
        return tokens if by_rows else super().whitened(tokens, taken, firsts)


class ComparisonConfig(AdvantageConfig):
    """Settings of every estimator that compares a response with its group."""

    singleton: Literal["zero", "raw"] = Field(
        default="zero", description="a group of one: no signal, or its reward as it is (verl)"
    )
    zero_tol: float = Field(
        default=1e-6, ge=0, le=1, description="max - min below this * max(1, max abs) is all-equal"
    )


class GroupConfig(ComparisonConfig):
    """Settings of every estimator that gives a response one number, compared with its group."""

    attribution: Literal["soft", "hard"] = Field(
        default="soft",
        description="tokens shared by several responses of a tree: each copy keeps its own "
        "response's advantage, or all take their mean (ARPO)",
    )
    dedup_prefix: bool = Field(
        default=False, description="weigh a token shared by d responses of a tree 1/d (ARPO)"
    )


GroupConfigT = TypeVar("GroupConfigT", bound=GroupConfig)


class GroupAdvantage(RowAdvantage[GroupConfigT]):
    """Estimators that compare each response with the others to its prompt.

    An all-equal group gets exactly 0, by a test before any division. A group of one gets 0, or with
    `singleton: raw` what `alone` says; so does any group smaller than `smallest_group`.
    """

    def required_columns(self) -> frozenset[str]:
        """`needs`, and the tree's node ids when the config looks at shared prefixes."""
        on_tree = self.config.attribution == "hard" or self.config.dedup_prefix
        needs = super().required_columns()
        return needs | {"node_id"} if on_tree else needs

    def keeps_singletons(self) -> bool:
        return self.config.singleton == "raw"

    def smallest_group(self) -> int:
        return 1 if self.keeps_singletons() else 2

    def row_rewards(self, batch: RolloutBatch) -> Tensor:
        """R [B] in float64: what is compared; the outcome reward unless overridden."""
        return groups.outcome_rewards(batch)

    def compared(self, batch: RolloutBatch) -> Tensor:
        """Rows [B], boolean, that enter their group: the scored ones unless overridden."""
        return batch.column("scored").bool()

    @abstractmethod
    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Advantages [G] of a group with rewards [G] that differ, at least two; `rows` [G]."""

    def alone(self, rewards: Tensor) -> Tensor:
        """Advantage [1] of a group of one under `singleton: raw`."""
        return rewards

    def divisor(self, rewards: Tensor) -> float:
        """What the advantages of all groups are divided by, from all compared rewards [N]."""
        return 1.0

    def compare(self, rewards: Tensor, compared: Tensor, batch: RolloutBatch) -> Tensor:
        """Advantages [B] from `rewards` [B], read where `compared` [B]; 0 for the other rows."""
        result = torch.zeros_like(rewards)
        divisor, smallest = self.divisor(rewards[compared]), max(2, self.smallest_group())
        for rows in groups.scored_groups(batch.group_id, compared):
            values = rewards[rows]
            if rows.numel() == 1 and self.keeps_singletons():
                result[rows] = self.alone(values)
            elif rows.numel() >= smallest and not groups.all_equal(values, self.config.zero_tol):
                result[rows] = self.group_advantages(values, rows, batch) / divisor
        return result

    def row_advantages(self, batch: RolloutBatch) -> tuple[Tensor, dict[str, float]]:
        """Advantages [B], and how many groups had no signal or too few rows."""
        compared = self.compared(batch)
        result = self.compare(self.row_rewards(batch), compared, batch)
        return result, self.group_metrics(result, compared, batch)

    def group_metrics(
        self, advantages: Tensor, compared: Tensor, batch: RolloutBatch
    ) -> dict[str, float]:
        """Share of groups whose `advantages` [B] are all 0, and groups with too few rows."""
        members = list(groups.scored_groups(batch.group_id, compared))
        smallest = max(2, self.smallest_group())
        num_zero = sum(not advantages[rows].any() for rows in members)
        return {
            "group/zero_adv_frac": num_zero / max(1, len(members)),
            "adv/singleton_groups": float(sum(rows.numel() < smallest for rows in members)),
        }

    def per_token(self, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """The row's number everywhere, but for what `over_tree` does."""
        return self.over_tree(super().per_token(rows, batch), batch)

    def over_tree(self, tokens: Tensor, batch: RolloutBatch) -> Tensor:
        """`tokens` [B, T] as `attribution` and `dedup_prefix` say; unchanged without a tree."""
        taken = masked(batch.mask, batch.column("scored")[:, None])
        if self.config.attribution == "hard":
            tokens = groups.mean_over_nodes(tokens, batch.column("node_id"), batch.group_id, taken)
        if self.config.dedup_prefix:
            sharers = groups.node_sharers(batch.column("node_id"), batch.group_id, taken)
            tokens = tokens / sharers
        return tokens


class TurnConfig(GroupConfig):
    """Settings of every estimator that compares episodes, and turns of episodes."""

    outcome_weight: float = Field(
        default=1.0, ge=0, le=1_000, description="factor of the episode's advantage"
    )
    turn_weight: float = Field(
        default=1.0, ge=0, le=1_000, description="factor of the turn's advantage"
    )
    norm_by_std: bool = Field(
        default=True, description="divide by a standard deviation, of episodes and of turns"
    )
    ddof: Literal[0, 1] = Field(default=1, description="1 = unbiased (n - 1), 0 = population")
    eps: float = Field(default=1e-6, ge=0, le=1, description="added to the deviation")


TurnConfigT = TypeVar("TurnConfigT", bound=TurnConfig)


class TurnAdvantage(GroupAdvantage[TurnConfigT]):
    """Estimators that compare episodes by their outcome, and turns by the turns' own rewards.

    A token has the advantage of its episode and that of its turn. Branches of one episode enter
    each statistic once: the episode by its first row, a turn by the row that has its tokens.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"token_rewards", "scored", "turn_end", "turn_reward"}
    )

    @abstractmethod
    def turn_scores(self, batch: RolloutBatch, valid: Tensor) -> tuple[Tensor, list[int]]:
        """Advantages [B, S] of the `valid` turns in float64, and sizes of the groups of turns."""

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """The episode's advantage and the turn's, each with its weight."""
        episodes, metrics = self.episode_advantages(batch)
        ends, mask = batch.column("turn_end"), batch.response_mask
        valid = sampled_turns(ends, mask) & self.compared(batch)[:, None]
        turns, sizes = self.turn_scores(batch, valid)
        tokens = self.config.outcome_weight * episodes[:, None]
        tokens = tokens + self.config.turn_weight * on_tokens(turns, ends, mask.shape[1])
        some = masked(tokens, mask).any(dim=1)
        members = list(groups.scored_groups(batch.group_id, self.compared(batch)))
        num_zero = sum(not some[rows].any() for rows in members)
        metrics["group/zero_adv_frac"] = num_zero / max(1, len(members))
        metrics["adv/turn_groups"] = float(len(sizes))
        metrics["adv/turn_groups_lt_4"] = float(sum(size < 4 for size in sizes))
        return Advantages(self.over_tree(tokens, batch), metrics=metrics)

    def whitened(self, tokens: Tensor, taken: Tensor, firsts: Tensor | None) -> Tensor:
        """Of tokens or of rows' means: a row has more than one advantage."""
        return TokenAdvantage.whitened(self, tokens, taken, firsts)

    def scores(self, values: Tensor) -> Tensor:
        """Deviations of `values` [G] from their mean, in standard deviations unless turned off."""
        if self.config.norm_by_std:
            return groups.z_scores(values, self.config.ddof, self.config.eps)
        return values - values.mean()

    def group_advantages(self, rewards: Tensor, rows: Tensor, batch: RolloutBatch) -> Tensor:
        """Deviations [G] of the episodes' rewards from the group's mean."""
        return self.scores(rewards)

    def alone(self, rewards: Tensor) -> Tensor:
        """Mean 0 and deviation 1 stand for what a group of one does not have."""
        return rewards / (1 + self.config.eps) if self.config.norm_by_std else rewards


def _refuse_token_terms(batch: RolloutBatch, who: str) -> None:
    """Raise `RunError` when the token rewards of a scored row are more than its outcome reward."""
    has_tokens = batch.response_mask.bool().any(dim=1)
    rows = batch.column("scored").bool() & has_tokens
    outcome = batch.column("rewards")[rows].double()
    total = groups.outcome_rewards(batch)[rows]
    if not torch.allclose(total, outcome, rtol=1e-5, atol=1e-6):
        raise RunError(
            f"advantage '{who}' reads no rewards of single tokens, so KL in the reward would be "
            "lost: use kl.place: loss, or an advantage such as 'rloo'"
        )


class ValueConfig(AdvantageConfig):
    """Settings of every estimator that reads values."""

    gamma: float = Field(
        default=1.0, ge=0, le=1, description="discount per token (NeMo examples: 0.99 to 1)"
    )
    bootstrap_truncated: bool = Field(
        default=False,
        description="a response cut by the length limit goes on: the critic's value after its last "
        "token stands for what is missing (AReaL); false: every response ends where it ends",
    )


ValueConfigT = TypeVar("ValueConfigT", bound=ValueConfig)


class ValueAdvantage(TokenAdvantage[ValueConfigT]):
    """Estimators of rewards and values; their `returns` are what the critic is trained on."""

    needs: ClassVar[frozenset[str]] = frozenset({"token_rewards", "scored", "values"})

    def required_columns(self) -> frozenset[str]:
        """`needs`, and the value after the last token if truncated responses go on."""
        needs = super().required_columns()
        return needs | {"bootstrap_value"} if self.config.bootstrap_truncated else needs

    @abstractmethod
    def advantages_and_targets(self, steps: ValuedSteps) -> tuple[Tensor, Tensor]:
        """Advantages and the critic's targets, both [B, T] in float64, neither whitened."""

    def token_advantages(self, batch: RolloutBatch) -> Advantages:
        """Over all sampled tokens, those of rows without loss included."""
        bootstrap = torch.zeros(len(batch), dtype=torch.float64)
        if self.config.bootstrap_truncated:
            after = batch.column("bootstrap_value").double()
            bootstrap = torch.where(batch.truncated.bool(), after, bootstrap)
        steps = ValuedSteps(
            rewards=batch.column("token_rewards"),
            values=batch.column("values"),
            mask=batch.response_mask,
            bootstrap=bootstrap,
        )
        advantages, targets = self.advantages_and_targets(steps)
        return Advantages(advantages, returns=targets)
