"""A fresh folder, 60 rows of one's own: init, validate, run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import run_command


def test_sixty_rows_of_ones_own_become_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "tiny")
    rows = [{"prompt": f"Say {n}.", "completion": f"{n}!"} for n in range(60)]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments in (
        ["init", "--model", "tiny", "--yes"],
        ["validate", "posttrain.yaml"],
    ):
        done = run_command(*arguments)
        assert done.code == 0, done.text
    done = run_command("run", "posttrain.yaml", "--json")
    assert done.code == 0, done.text
    assert done.result["stages"]["sft"]["status"] == "ran"
    assert (tmp_path / ".posttrain").is_dir()
