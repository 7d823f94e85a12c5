"""The lists that say in which order files of tests run name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.order import FIRST, TOGETHER, rank, unit_of

REPO = Path(__file__).parents[2]
TYPES = {"running_nodes": r"\w: TwoNodes\b", "services": r"\w: Services\b"}


def test_files_that_run_first_are_there_and_named_once() -> None:
    assert [file for file in FIRST if not (REPO / file).is_file()] == []
    assert len(set(FIRST)) == len(FIRST)


def test_files_that_use_what_many_processes_serve_run_one_after_another() -> None:
    for fixture, files in TOGETHER.items():
        ranks = [rank(file) for file in files]
        assert ranks == list(range(ranks[0], ranks[0] + len(files)))
        assert {unit_of(f"{file}::test[a::b]") for file in files} == {fixture}
        users = [
            path.relative_to(REPO).as_posix()
            for path in sorted((REPO / "tests").rglob("test_*.py"))
            if path != Path(__file__) and re.search(TYPES[fixture], path.read_text("utf-8"))
        ]
        assert set(users) <= set(files), "a file that is not named would start it once more"
