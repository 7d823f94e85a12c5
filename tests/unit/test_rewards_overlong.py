"""Rewards `"soft_overlong"` and `"dapo_rule"`, against the numbers of DAPO's own lengths."""

from __future__ import annotations

import pytest

from posttrain.core.contracts import Reward
from posttrain.core.errors import ConfigError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Problem, RewardSample, Verdict

MANAGER = PluginManager()
PROBLEM = Problem("k", "What is 1 + 1?", "2", "1 + 1 = 2")


def samples_of_length(lengths: list[int]) -> list[RewardSample]:
    right = Verdict(1.0, "2")
    return [RewardSample(PROBLEM, (1,), (7,) * n, "2", n >= 20480, right) for n in lengths]


def penalties(lengths: list[int], **fields: object) -> list[float]:
    reward = MANAGER.build(Reward, "soft_overlong", fields)
    scores = reward.score(samples_of_length(lengths))
    assert all(score.status == "ok" for score in scores)
    return [score.value for score in scores if score.value is not None]


def test_the_defaults_are_dapo_s_lengths() -> None:
    expected = {
        0: 0.0,
        16384: 0.0,
        16385: -0.000244140625,
        17408: -0.25,
        18432: -0.5,
        19456: -0.75,
        20479: -0.999755859375,
        20480: -1.0,
        20481: -1.0,
    }
    assert penalties(list(expected)) == list(expected.values())


def test_the_prompt_s_tokens_and_the_verdict_play_no_part() -> None:
    reward = MANAGER.build(Reward, "soft_overlong", {"max_length": 8, "buffer_length": 4})
    wrong = RewardSample(PROBLEM, (1,) * 50, (7,) * 6, "no", False, Verdict(0.0, None))
    right = RewardSample(PROBLEM, (1,), (7,) * 6, "2", False, Verdict(1.0, "2"))
    assert [score.value for score in reward.score([wrong, right])] == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"factor": 0.5}, [0.0, -0.25, -0.5, -0.5]),
        ({"floor": None}, [0.0, -0.5, -1.0, -1.5]),
        ({"floor": -0.25}, [0.0, -0.25, -0.25, -0.25]),
        ({"factor": 2.0, "floor": None}, [0.0, -1.0, -2.0, -3.0]),
        ({"buffer_length": 0}, [0.0, 0.0, 0.0, -1.0]),
    ],
)
def test_factor_floor_and_a_step(fields: dict[str, object], expected: list[float]) -> None:
    lengths = [4, 6, 8, 10]
    assert penalties(lengths, **{"max_length": 8, "buffer_length": 4, **fields}) == expected


def test_a_buffer_longer_than_the_limit_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"reward 'soft_overlong': .*buffer_length \(9\)"):
        MANAGER.build(Reward, "soft_overlong", {"max_length": 8, "buffer_length": 9})


def test_dapo_rule_is_plus_one_only_for_a_fully_right_answer() -> None:
    verdicts = [Verdict(1.0, "2"), Verdict(0.0, "3"), Verdict(0.75, "2 or 3"), Verdict(0.0, None)]
    samples = [RewardSample(PROBLEM, (1,), (2,), "", False, verdict) for verdict in verdicts]
    scores = MANAGER.build(Reward, "dapo_rule").score(samples)
    assert [(score.value, score.detail) for score in scores] == [
        (1.0, ""),
        (-1.0, ""),
        (-1.0, ""),
        (-1.0, "no answer found"),
    ]
