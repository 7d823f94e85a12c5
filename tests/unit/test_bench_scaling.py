"""`tests/bench/scaling.py` still runs: it takes the learner's benchmark for its work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "scaling.py"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_one_rank_and_two_are_measured(tmp_path: Path) -> None:
    options = ("--json", "--axes", "ranks", "--rounds", "1", "--prompts", "1")
    done = subprocess.run(
        [sys.executable, str(BENCH), *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["axes"]["ranks"]
    assert [row["ranks"] for row in rows] == [1, 2]
    assert all(row["seconds"] > 0 and row["share_of_gemm"] > 0 for row in rows)
