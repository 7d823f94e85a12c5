"""The files of tests/data/formats: two of each format, and what they hold written by hand.

`tests/bench/chat_files.py` compares their tokens with TRL's.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from posttrain.core.contracts.preference_rows import PreferenceRow
from posttrain.core.data.formats import FORMATS, examples
from posttrain.core.data.preference_files import read_preference_rows
from posttrain.core.data.rows import data_rows
from posttrain.core.types import Message, ToolSchema

FILES = Path(__file__).resolve().parents[1] / "data" / "formats"
NAMES = sorted(path.stem for path in FILES.glob("*-[12].jsonl"))
SFT = {form.name for form in FORMATS}
BY_HAND = sorted(path.name.partition(".")[0] for path in FILES.glob("*.by-hand.jsonl"))
Chat = tuple[tuple[Message, ...], tuple[ToolSchema, ...]]


def kind(name: str) -> str:
    return name.partition("-")[0]


def chats(path: Path) -> list[Chat]:
    return [(each.messages, each.tools) for _, each in examples(data_rows(str(path), "data"))]


def preferences(path: Path) -> list[PreferenceRow]:
    return read_preference_rows(path, "data", ("pairs", "labels")).rows


def test_every_format_has_two_files() -> None:
    assert set(Counter(map(kind, NAMES)).values()) == {2}
    assert {kind(name) for name in NAMES} >= SFT
    read = Counter(
        next(examples(data_rows(str(FILES / f"{name}.jsonl"), "data")))[0].name
        for name in NAMES
        if kind(name) in SFT
    )
    assert read == dict.fromkeys(SFT, 2)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_file_says_the_same_as_the_one_by_hand(name: str) -> None:
    file, by_hand = FILES / f"{name}.jsonl", FILES / f"{name}.by-hand.jsonl"
    if kind(name) in SFT:
        assert chats(file) == chats(by_hand)
        return
    for own, other in zip(preferences(file), preferences(by_hand), strict=True):
        assert (own.prompt, own.answers, own.tools) == (other.prompt, other.answers, other.tools)
        assert own.label is other.label
