"""The `gdpo` advantage: components are normalised before they are added."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.errors import RunError
from posttrain.core.rewards.scoring import weighted_sum
from tests.helpers.advantages import estimate, outcome_batch

NAN = float("nan")
OFF = {"whiten": "off"}


def component_batch(
    components: list[list[float]], group_id: list[int] | None = None
) -> RolloutBatch:
    columns = torch.tensor(components, dtype=torch.float64)
    rewards, scored = weighted_sum(columns, [1.0] * columns.shape[1])
    return outcome_batch(rewards, group_id, scored=scored.tolist(), reward_components=columns)


def z(values: list[float]) -> Tensor:
    column = torch.tensor(values, dtype=torch.float64)
    return (column - column.mean()) / (column.std() + 1e-6)


def test_a_component_is_not_drowned_by_anothers_scale() -> None:
    batch = component_batch([[1.0, 0.0], [0.0, 100.0], [0.0, 100.0]])
    got = estimate("gdpo", batch, **OFF).advantages[:, 0]
    torch.testing.assert_close(got, z([1.0, 0.0, 0.0]) + z([0.0, 100.0, 100.0]))
    weighted = estimate("gdpo", batch, weights=[2.0, 0.5], **OFF).advantages[:, 0]
    torch.testing.assert_close(weighted, 2 * z([1.0, 0.0, 0.0]) + 0.5 * z([0.0, 100.0, 100.0]))
    centred = estimate("gdpo", batch, component_norm="centre", **OFF).advantages[:, 0]
    assert centred.tolist() == pytest.approx([2 / 3 - 200 / 3, 99 / 3, 99 / 3])


def test_a_missing_component_adds_nothing_and_is_out_of_its_statistics() -> None:
    batch = component_batch([[1.0, NAN], [0.0, 3.0], [0.5, 1.0], [NAN, NAN]])
    got = estimate("gdpo", batch, **OFF).advantages[:, 0]
    first, second = z([1.0, 0.0, 0.5]), z([3.0, 1.0])
    wanted = [first[0], first[1] + second[0], first[2] + second[1], 0.0]
    assert got.tolist() == pytest.approx([float(x) for x in wanted])


def test_the_sum_is_whitened_over_scored_responses_by_default() -> None:
    batch = component_batch([[1.0, 0.3], [0.0, 0.1], [0.5, 0.2], [NAN, NAN]], [0, 0, 0, 0])
    raw = estimate("gdpo", batch, **OFF).advantages[:3, 0]
    got = estimate("gdpo", batch).advantages[:, 0]
    torch.testing.assert_close(got[:3], (raw - raw.mean()) / (raw.std() + 1e-4))
    assert got[3] == 0.0


def test_an_all_equal_component_leaves_the_others_alone() -> None:
    batch = component_batch([[0.1 + 0.2, 1.0], [0.3, 0.0], [0.3, 0.0]])
    got = estimate("gdpo", batch, **OFF).advantages[:, 0]
    torch.testing.assert_close(got, z([1.0, 0.0, 0.0]))


def test_a_group_of_one_is_zero_or_its_raw_sum() -> None:
    batch = component_batch([[1.0, 2.0]])
    assert estimate("gdpo", batch, **OFF).advantages.tolist() == [[0.0]]
    raw = estimate("gdpo", batch, singleton="raw", weights=[1.0, 0.5], eps=0.0, **OFF)
    assert raw.advantages.tolist() == [[2.0]]
    assert raw.metrics == {"group/zero_adv_frac": 0.0, "adv/singleton_groups": 1.0}


def test_a_wrong_number_of_weights_is_refused() -> None:
    batch = component_batch([[1.0, 2.0], [0.0, 0.0]])
    with pytest.raises(RunError, match="3 weights for 2 rewards"):
        estimate("gdpo", batch, weights=[1.0, 1.0, 1.0])


def test_kl_in_the_reward_is_refused_because_it_would_be_lost() -> None:
    batch = component_batch([[1.0, 2.0], [0.0, 0.0]])
    penalised = batch.with_columns(token_rewards=batch.column("token_rewards") - 0.1)
    with pytest.raises(RunError, match="'gdpo' reads no rewards of single tokens"):
        estimate("gdpo", penalised)
