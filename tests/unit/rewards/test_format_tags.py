"""The reward `"format"` with tags; its patterns are tested in test_rewards_and_sampling.py."""

from __future__ import annotations

import pytest

from posttrain.core.errors import ConfigError
from tests.helpers.rewards import sample, score

TAGS = ("think", "answer")
RIGHT = "<think>a\n<b></think>\n<answer>2</answer>\n"


@pytest.mark.parametrize(
    ("text", "whole", "anywhere", "partial"),
    [
        (RIGHT, 1, 1, 1),
        ("so: " + RIGHT, 0, 1, 2 / 3),
        (RIGHT + "and more", 0, 1, 2 / 3),
        ("<think>a</think> so <answer>2</answer>", 0, 1, 2 / 3),
        ("<answer>2</answer><think>a</think>", 0, 0, 1 / 3),  # wrong order: think alone is right
        ("<think><answer>2</answer></think>", 0, 0, 1 / 3),  # one inside the other
        ("<think><think>a</think></think><answer>2</answer>", 0, 0, 1 / 3),  # twice
        ("<think>a</think><answer>2", 0, 0, 1 / 3),  # cut off
        ("</think><think><answer>2</answer>", 0, 0, 1 / 3),
        ("<answer>2</answer>", 0, 0, 1 / 3),
        ("", 0, 0, 0),
        ("\x00", 0, 0, 0),
    ],
)
def test_tags_stand_once_each_in_order(
    text: str, whole: float, anywhere: float, partial: float
) -> None:
    one = sample(text)
    assert score("format", one, tags=TAGS).value == whole
    assert score("format", one, tags=TAGS, match="anywhere").value == anywhere
    assert score("format", one, tags=TAGS, partial_credit=True).value == pytest.approx(partial)


def test_each_tag_is_a_component_and_the_wrong_ones_are_named() -> None:
    found = score("format", sample("<think></think>2"), tags=TAGS)
    assert found.components == {"think": 1.0, "answer": 0.0, "nothing else": 0.0}
    assert found.detail == "not in form: answer, nothing else"
    found = score("format", sample(RIGHT), tags=TAGS, match="anywhere")
    assert found.components == {"think": 1.0, "answer": 1.0} and found.detail == ""


def test_forms_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="not both"):
        score("format", sample(), tags=TAGS, pattern="x")
    with pytest.raises(ConfigError, match="'partial_credit' needs 'tags'"):
        score("format", sample(), partial_credit=True)
    with pytest.raises(ConfigError, match="stands twice"):
        score("format", sample(), tags=("a", "a"))
