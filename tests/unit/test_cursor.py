"""Rounds of rows: what is seen, what is open, what a kill at any moment leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.data.cursor import (
    Cursor,
    PinnedModel,
    read_cursor,
    row_digest,
    write_cursor,
)
from posttrain.core.errors import DataError
from posttrain.core.types import Problem

BASE = PinnedModel("/models/1", "ab" * 32, "m-1", "sums version 1")


def test_a_cursor_is_read_back_with_its_open_round(tmp_path: Path) -> None:
    path = tmp_path / "name" / "cursor.json"
    assert read_cursor(path) == Cursor()
    cursor = Cursor(3, frozenset({"x"})).begin(["b", "a"], BASE)
    write_cursor(path, cursor)
    assert read_cursor(path) == cursor
    assert cursor.round is not None and cursor.round.rows == ("b", "a"), "their order is kept"
    assert not list(path.parent.glob(".partial*"))


@pytest.mark.parametrize("text", ["", "{", '{"version": 9}', '{"version": 1}', "[]"])
def test_a_damaged_cursor_is_never_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cursor.json"
    path.write_text(text)
    with pytest.raises(DataError, match="every row counts as new"):
        read_cursor(path)


def test_a_row_is_its_content_and_not_its_place() -> None:
    row = Problem("2+3", "What is 2+3?", "5", "5", {"source": "a.jsonl:1"})
    moved = Problem("2+3", "What is 2+3?", "5", "5", {"source": "b.jsonl:9"})
    corrected = Problem("2+3", "What is 2+3?", "6", "6", {"source": "a.jsonl:1"})
    assert row_digest(row) == row_digest(moved) != row_digest(corrected)


@given(st.lists(st.tuples(st.sets(st.integers(0, 30)), st.booleans()), max_size=12))
def test_every_row_is_finished_in_exactly_one_round(days: list[tuple[set[int], bool]]) -> None:
    """Rows arrive; each round ends or is killed, and is then begun with the same rows again."""
    cursor, trained, arrived = Cursor(), list[str](), set[str]()
    for came, killed in days:
        arrived |= {str(n) for n in came}
        if cursor.round is None:
            cursor = cursor.begin(sorted(arrived - cursor.seen), None)
        assert cursor.round is not None
        if not killed:
            trained += cursor.round.rows
            cursor = cursor.finish()
            assert cursor.finish() == cursor, "finished twice is finished once"
    assert len(trained) == len(set(trained)), "no row twice"
    open_rows = set() if cursor.round is None else set(cursor.round.rows)
    assert set(trained) == cursor.seen and not open_rows & cursor.seen


def test_a_round_given_up_leaves_its_rows_new() -> None:
    cursor = Cursor().begin(["a"], None).begin(["a", "b"], BASE)
    assert cursor.seen == frozenset() and cursor.round is not None
    assert cursor.round.number == 1 and cursor.finish().seen == {"a", "b"}
