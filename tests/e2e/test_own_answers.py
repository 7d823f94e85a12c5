"""Pairs of a model's own answers, of which the length limit cuts some that are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.analysis.evidence import read_step, steps_in
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")
LIMIT = 10
"""Tokens of "6 + 2 = 8" with its end; "6 + 8 = 14" has as many without."""


@pytest.mark.slow
def test_an_answer_without_an_end_is_chosen_with_a_warning_or_never(tmp_path: Path) -> None:
    config = tiny_config(make_tiny_model(tmp_path / "model"))
    taught = config["stages"]["sft"] | {"steps": 100, "batch_size": 32}
    rewards = {
        "kind": "reward_model",
        "inputs": {"model": "taught"},
        "num_prompts": 32,
        "num_generations": 16,
        "generation": {"max_response_length": LIMIT},
    }
    ended = rewards | {"unfinished": "rejected"}
    config["stages"] = {"taught": taught, "judged": rewards, "ended": ended}
    path, home = write_config(tmp_path / "run.yaml", config), prepared(tmp_path / "home")
    done = run_command("run", str(path), "--home", str(home), "--json")
    assert done.code == 0, done.text
    warned = [line for line in done.text.splitlines() if "chosen answers were cut" in line]
    assert warned and all("judged: " in line and "unfinished: rejected" in line for line in warned)
    end = ChatTokenizer.load(tmp_path / "model").eos_token_id
    assert not all(has_ends(home, "judged", end)), "some that are right were cut"
    assert all(has_ends(home, "ended", end))


def has_ends(home: Path, stage: str, end: int) -> list[bool]:
    """Of each chosen answer that the stage trained on, whether it has its end."""
    (folder,) = (home / "artifacts").glob(f"{stage}-*/evidence")
    found = []
    for step in steps_in(folder):
        batch = read_step(folder, step).batch
        ids = batch.response_ids[0::2]
        lengths = batch.mask[0::2].sum(dim=1)
        found += [int(row[n - 1]) == end for row, n in zip(ids, lengths.tolist(), strict=True)]
    return found
