"""A damaged database of Prefect's is moved aside; a sound one stays."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from posttrain.core.runtime.files import create_database
from posttrain.pipelines.run.prefect_program import SCHEMA, damage, move_if_damaged


def _made(folder: Path) -> Path:
    database = folder / "prefect.db"
    assert create_database(database, SCHEMA, "prefect")
    with sqlite3.connect(database) as connection:
        connection.execute("create table rows (a text)")
        connection.executemany("insert into rows values (?)", [("x" * 500,)] * 200)
    connection.close()
    return database


@pytest.mark.parametrize("kind", ["header", "text", "cut", "page"])
def test_a_damaged_database_is_moved_aside_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    database = _made(tmp_path)
    content = bytearray(database.read_bytes())
    if kind == "header":
        content[:16] = bytes(16)
    elif kind == "text":
        content = bytearray(b"not a database")
    elif kind == "cut":
        content = content[: len(content) // 2]
    else:
        middle = len(content) // 2 // 4096 * 4096
        content[middle : middle + 8192] = b"\xff" * 8192
    database.write_bytes(content)
    database.with_name("prefect.db-wal").write_bytes(b"")
    move_if_damaged(database)
    moved = [path for path in tmp_path.iterdir() if ".damaged-" in path.name]
    assert not database.exists()
    assert any(path.read_bytes() == bytes(content) for path in moved)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(database) in said and "results are not affected" in said
    assert create_database(database, SCHEMA, "prefect") and damage(database) is None


def test_a_sound_an_empty_and_a_missing_database_stay(tmp_path: Path) -> None:
    assert damage(_made(tmp_path)) is None
    empty = tmp_path / "empty.db"
    empty.touch()
    assert damage(empty) is None and damage(tmp_path / "missing.db") is None


def test_a_locked_database_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = _made(tmp_path)
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("begin exclusive")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(path, timeout=0.1))
    assert damage(database) is None
    holder.close()
