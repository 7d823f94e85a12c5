"""A frozen step under other algorithms: mini-batches as the run cut them, weights by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.core.analysis.compare import compare_pair
from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.frozen import Variant, evaluate, freeze
from posttrain.core.contracts import AdvantageEstimator, Aggregator, KlEstimator, PolicyLoss
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.shaping import place_on_last_token
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.splitting import mini_rows
from posttrain.core.training.updates import UpdateSettings
from tests.helpers.rollouts import ragged_batch

SETTINGS = UpdateSettings(epochs=1, num_mini_batches=2, micro_batch_size=3, temperature=1.0, seed=5)
STEP = 4


def frozen_evidence(settings: UpdateSettings = SETTINGS, moved: float = 0.0) -> StepEvidence:
    """Two groups of three; the second mini-batch saw log-probs moved by `moved` nats."""
    batch = ragged_batch([3, 2], group_size=3)
    batch = replace(batch, advantages=None).with_columns(mask=batch.response_mask)
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0, 0.0])
    old = torch.full(batch.mask.shape, -1.0)
    batch = batch.with_columns(
        rewards=rewards,
        scored=torch.ones(6, dtype=torch.bool),
        token_rewards=place_on_last_token(rewards, batch.response_mask),
        old_logprobs=old,
    )
    seen_by = torch.full((6,), -1)
    parts = mini_rows(
        batch, settings.epochs, settings.num_mini_batches, settings.seed, "mini_batches", STEP
    )
    for number, rows in enumerate(parts):
        seen_by[rows] = number
    seen = old + moved * (seen_by > 0)[:, None]
    return StepEvidence(STEP, batch, seen, torch.ones_like(seen), seen_by)


def interrupted() -> tuple[StepEvidence, UpdateSettings]:
    """Two epochs over four groups, given up after the first mini-batch of the second."""
    settings = replace(SETTINGS, epochs=2)
    batch = ragged_batch([3, 2, 4, 2], group_size=3)
    batch = replace(batch, advantages=None).with_columns(mask=batch.response_mask)
    rewards = torch.tensor([1.0, 0.0, 0.0] * 4)
    old = torch.full(batch.mask.shape, -1.0)
    batch = batch.with_columns(
        rewards=rewards,
        scored=torch.ones(12, dtype=torch.bool),
        token_rewards=place_on_last_token(rewards, batch.response_mask),
        old_logprobs=old,
    )
    seen_by = torch.full((12,), -1)
    for number, rows in enumerate(mini_rows(batch, 2, 2, settings.seed, "mini_batches", STEP)):
        if number < 3:
            seen_by[rows] = number
    return StepEvidence(STEP, batch, old, torch.ones_like(old), seen_by), settings


def variant(
    manager: PluginManager,
    loss: str = "ppo_clip",
    aggregator: str = "seq-mean-token-mean",
    advantage: str = "grpo",
    **fields: object,
) -> Variant:
    average = manager.build(Aggregator, aggregator)
    term = LossTerm(manager.build(PolicyLoss, loss, fields), average)
    objective = Objective((term,), average)
    return Variant(loss, manager.build(AdvantageEstimator, advantage), objective)


def by_hand(evidence: StepEvidence, *, tokens: bool) -> Tensor:
    """-A / (sequences x length), or -A / tokens of the mini-batch, where all ratios are 1."""
    lengths = evidence.batch.mask.sum(dim=1).double()
    found = torch.zeros(evidence.batch.mask.shape, dtype=torch.float64)
    for rows in (torch.arange(3), torch.arange(3, 6)):
        rewards = evidence.batch.column("rewards")[rows].double()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        share = lengths[rows].sum() if tokens else 3 * lengths[rows]
        found[rows] = (-advantages / share)[:, None].expand(3, found.shape[1])
    return found * evidence.batch.mask


@pytest.mark.parametrize("tokens", [False, True])
def test_weights_of_tokens_are_divided_by_the_counts_of_their_own_mini_batch(
    manager: PluginManager, tokens: bool
) -> None:
    evidence = frozen_evidence()
    frozen = freeze(evidence, SETTINGS)
    name = "token-mean" if tokens else "seq-mean-token-mean"
    found = evaluate(frozen, variant(manager, aggregator=name))
    torch.testing.assert_close(
        found.weights.double(), by_hand(evidence, tokens=tokens), rtol=1e-5, atol=1e-8
    )
    assert [mini.number for mini in frozen.minis] == [0, 1]


def test_rows_that_no_update_read_count_in_their_mini_batch(manager: PluginManager) -> None:
    evidence = frozen_evidence()
    seen_by = evidence.seen_by.clone()
    seen_by[1] = -1
    holes = evidence.seen_logprobs.clone()
    holes[1] = float("nan")
    frozen = freeze(replace(evidence, seen_by=seen_by, seen_logprobs=holes), SETTINGS)
    found = evaluate(frozen, variant(manager))
    torch.testing.assert_close(
        found.weights.double(), by_hand(evidence, tokens=False), rtol=1e-5, atol=1e-8
    )
    assert not frozen.read[1]


def test_a_mini_batch_counts_rows_that_a_later_one_read_again(manager: PluginManager) -> None:
    evidence, settings = interrupted()
    frozen = freeze(evidence, settings)
    assert any(not mini.taken.all() for mini in frozen.minis)
    weights = evaluate(frozen, variant(manager)).weights.double()
    lengths = evidence.batch.mask.sum(dim=1)
    for row in range(0, 12, 3):  # reward 1 of 1, 0, 0: advantage (2 / 3) / sqrt(1 / 3)
        advantage = (2 / 3) / (3**-0.5 + 1e-6)
        assert float(weights[row, 0]) == pytest.approx(-advantage / (6 * int(lengths[row])))


def test_a_clip_acts_only_where_the_policy_has_moved(manager: PluginManager) -> None:
    frozen = freeze(frozen_evidence(moved=0.3), SETTINGS)
    wide, tight = (
        evaluate(frozen, variant(manager, clip_low=bound, clip_high=bound)) for bound in (0.9, 0.2)
    )
    # exp(0.3) = 1.35 is beyond 1.2, on the tokens of a positive advantage in the second mini-batch.
    second = next(mini for mini in frozen.minis if mini.number == 1).rows
    cut = (wide.weights != 0) & (tight.weights == 0)
    expected = torch.zeros_like(cut)
    expected[second] = (tight.advantages[second] > 0) & frozen.tokens[second]
    assert torch.equal(cut, expected)
    assert cut.any()
    share = float(cut.sum() / frozen.tokens.sum())
    assert tight.metrics["clip/high_frac"] == pytest.approx(share)
    assert wide.metrics["clip/high_frac"] == 0.0


def test_a_pair_says_where_the_weights_differ(manager: PluginManager) -> None:
    frozen = freeze(frozen_evidence(moved=0.3), SETTINGS)
    first = evaluate(frozen, variant(manager, clip_low=0.9, clip_high=0.9))
    second = evaluate(frozen, variant(manager, clip_low=0.2, clip_high=0.2))
    pair = compare_pair(first, second, frozen.tokens)
    gaps = (first.weights - second.weights).abs()
    row, column = divmod(int(gaps.argmax()), gaps.shape[1])
    assert (pair.largest[0].row, pair.largest[0].column) == (row, column)
    assert pair.advantage_rank == pytest.approx(1.0)
    assert pair.weights.cosine is not None and pair.weights.cosine < 1


@pytest.mark.parametrize(("advantage", "column"), [("gae", "values"), ("remax", "baseline_reward")])
def test_a_variant_whose_columns_are_not_there_is_refused_by_their_name(
    manager: PluginManager, advantage: str, column: str
) -> None:
    frozen = freeze(frozen_evidence(), SETTINGS)
    with pytest.raises(ConfigError, match=rf"ppo_clip needs the column\(s\) {column}, .*step 4"):
        evaluate(frozen, variant(manager, advantage=advantage))


def test_kl_without_the_reference_is_refused_by_name(manager: PluginManager) -> None:
    frozen = freeze(frozen_evidence(), SETTINGS)
    plain = variant(manager)
    objective = replace(plain.objective, kl=manager.build(KlEstimator, "k3"))
    with pytest.raises(ConfigError, match="ref_logprobs.*--no-kl"):
        evaluate(frozen, replace(plain, objective=objective, kl_coef=0.1))
    assert evaluate(frozen, replace(plain, objective=objective)).parts.keys() == {"loss/policy"}


def test_evidence_of_another_config_is_refused() -> None:
    evidence = frozen_evidence()
    with pytest.raises(RunError, match="seen_by"):
        freeze(replace(evidence, seen_by=1 - evidence.seen_by), SETTINGS)
    with pytest.raises(RunError, match="seen_by"):
        freeze(evidence, replace(SETTINGS, num_mini_batches=1))
