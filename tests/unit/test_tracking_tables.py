"""Sample tables: which rows, what they hold, and what is left empty rather than made up."""

import json
import math

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.tracking.tables import MAX_TAG, logged_tables_tag, sample_rows, table_json
from posttrain.core.types import Problem


def batch() -> RolloutBatch:
    """Three groups of two responses; the last response is unscored and has no token."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]]).float()
    problem = Problem("k", "What is 2+3?", "5", "2+3=5")
    return RolloutBatch(
        prompt_ids=torch.zeros(6, 4, dtype=torch.int64),
        prompt_mask=torch.ones(6, 4),
        response_ids=torch.zeros(6, 3, dtype=torch.int64),
        response_mask=mask,
        mask=mask,
        rollout_logprobs=torch.zeros(6, 3),
        policy_version=torch.full((6, 3), 7),
        group_id=torch.tensor([0, 0, 1, 1, 2, 2]),
        seq_id=torch.arange(6),
        truncated=torch.tensor([False, True, False, False, False, False]),
        problems=(problem,) * 6,
        texts=("5", "6 6 6", "5", "7", "5", ""),
    )


def filled() -> RolloutBatch:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    return batch().with_columns(
        scored=torch.tensor([True] * 5 + [False]),
        rewards=rewards,
        acc=rewards,
        reward_components=torch.stack([rewards, torch.full((6,), math.nan)], dim=1),
        advantages=batch().mask * torch.tensor([1.0, -1, 1, -1, 0.5, -0.5])[:, None],
    )


def test_a_row_holds_what_was_sampled_scored_and_learned_from() -> None:
    row = sample_rows(filled(), ["accuracy", "learned"])[1]
    assert row == {
        "group": 0,
        "prompt": "What is 2+3?",
        "response": "6 6 6",
        "reward": 0.0,
        "reward/accuracy": 0.0,
        "reward/learned": None,
        "advantage": -1.0,
        "correct": 0.0,
        "finish_reason": "length",
        "policy_version": 7,
    }


def test_an_unscored_response_has_no_reward_and_an_empty_one_no_advantage() -> None:
    row = sample_rows(filled())[5]
    assert row["reward"] is None and row["advantage"] is None and row["policy_version"] is None


def test_the_limit_never_cuts_a_group() -> None:
    assert [row["group"] for row in sample_rows(filled(), limit=3)] == [0, 0, 1, 1]
    assert len(sample_rows(filled(), limit=4)) == 4
    assert sample_rows(filled(), limit=0) == []


def test_columns_that_are_not_filled_yet_are_empty() -> None:
    row = sample_rows(batch(), ["accuracy"])[0]
    assert row["reward"] is row["reward/accuracy"] is row["advantage"] is row["correct"] is None


def test_table_json_is_strict_json_with_the_union_of_columns() -> None:
    rows: list[dict[str, object]] = [{"a": 1.5, "b": "ü\n"}, {"c": math.nan, "a": math.inf}]

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    table = json.loads(table_json(rows), parse_constant=refuse)
    assert table == {"columns": ["a", "b", "c"], "data": [[1.5, "ü\n", None], [None, None, None]]}


def test_the_tag_of_tables_stays_within_mlflows_limit_and_keeps_the_newest() -> None:
    paths = [f"tables/samples/step-{step:06d}.json" for step in range(500)]
    tag = logged_tables_tag(paths)
    entries = json.loads(tag)
    assert len(tag) <= MAX_TAG and len(entries) > 80
    assert entries[-1] == {"path": paths[-1], "type": "table"}
