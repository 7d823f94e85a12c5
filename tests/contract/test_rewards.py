"""Every reward that needs no model, on any text: no exception, one sound score per sample."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.contracts import Reward
from posttrain.core.plugin_manager import PluginEntry
from posttrain.core.types import RewardSample, ScoreStatus
from tests.helpers.plugins import build, of_kind
from tests.helpers.rewards import sample

PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"),
        *("#### ", "\\boxed{", "}", "\\frac{1}{2}", "$", "1,234", "-3.5%", "x^2", "½", "١", "\x00"),
        *('{"name": "f", "arguments": {}}', "[1, 2]", "```json\n", "\n```", "{{{", "\\", "\n\n"),
        *("[END RESPONSE]", "{response}", "Score: 10", "\U0001f600", "\ud800", " word " * 50),
    ]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=12).map("".join))
SAMPLES = st.builds(
    lambda text, answer, prompt, tokens, truncated, correct: sample(
        text,
        answer,
        prompt_ids=(prompt,),
        response_ids=tokens,
        truncated=truncated,
        correct=correct,
    ),
    TEXTS,
    st.one_of(st.sampled_from(["2", "1/2", "", "blue", "\\frac{1}{2}", "((", "{}"]), TEXTS),
    st.integers(0, 2),
    st.lists(st.integers(0, 5), max_size=12),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
)


def needs_no_model() -> list[object]:
    """Rewards that can be built and asked as they are."""
    return [p for p in of_kind("reward") if not p.values[0].cls.needs_inputs]


@pytest.mark.parametrize("entry", needs_no_model())
@settings(max_examples=20)
@given(samples=st.lists(SAMPLES, max_size=4))
def test_any_text_gets_one_sound_score_in_order(
    entry: PluginEntry, samples: list[RewardSample]
) -> None:
    reward: Reward[object] = build(entry)  # type: ignore[type-var]
    found = reward.score(samples)
    assert len(found) == len(samples)
    for score in found:
        assert score.status in get_args(ScoreStatus)
        assert (score.value is None) == (score.status != "ok")
        assert score.value is None or math.isfinite(score.value)
        assert score.value is not None or score.detail  # nothing is unscored without a word
        assert all(math.isfinite(part) for part in score.components.values())
        assert len(score.detail) < 500
    # Scores stay with their samples, wherever these stand.
    assert reward.score(samples[::-1]) == found[::-1]


@pytest.mark.parametrize("entry", needs_no_model())
def test_a_text_of_a_megabyte_is_scored_too(entry: PluginEntry) -> None:
    texts = ["a " * 500_000, "{" * 1_000_000, "<think>" * 150_000, "1 + " * 250_000]
    samples = [sample(text, response_ids=range(1000)) for text in texts]
    assert len(build(entry).score(samples)) == len(samples)
