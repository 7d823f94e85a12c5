"""infra/check_words.py: which words it finds, and where."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def load_check():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("check_words", REPO / "infra" / "check_words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = load_check()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.md", "Fine.\nIt is to" + "ld.\n", [(2, "reported, logged or said")]),
        (
            "a.md",
            "An" + "ew: a to" + "ld, untold and to" + "ld_by_name.",
            [(1, "again"), (1, None)],
        ),
        ("a.md", "There is no answer.\nIt is no longer so.\n", []),
        ("a.md", "A run is" + " no rank.\n", [(1, "is not a")]),
        ("a.md", "the la" + "w  <!-- words: allow -->\n", []),
        ("a.py", "to" + "ld = 1  # to" + "ld\n", [(1, "reported, logged or said")]),
        (
            "a.py",
            '"""One.\n\nTwo an' + 'ew.\n"""\nmend = f"me' + 'nd {1}"\n',
            [(3, "again"), (5, "fix")],
        ),
    ],
)
def test_words_are_found_in_text_and_not_in_identifiers(
    name: str, content: str, expected: list[tuple[int, str | None]], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    found = [(line, instead) for line, _, instead in CHECK.findings(path)]
    assert len(found) == len(expected)
    for (line, instead), (at, wanted) in zip(found, expected, strict=True):
        assert line == at and wanted in (None, instead)


def test_the_pages_of_the_repository_pass() -> None:
    assert CHECK.main(["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs", "infra"]) == 0
