"""Rollout dumps of verl and TRL: their formats, what is odd in them, and the tools on them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from posttrain.core.analysis.evidence import read_step
from posttrain.core.data.dumps import read_dump
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.cli.main import app

DUMPS = Path(__file__).parents[1] / "data" / "dumps"
Json = dict[str, Any]


def test_a_dump_of_verl_is_read() -> None:
    dump = read_dump(DUMPS / "verl")
    assert dump.format == "verl" and list(dump.steps) == [1, 2] and dump.rows == 24
    assert dump.reward_names == ("score", "acc"), "pred and request_id are no rewards"
    first = dump.steps[1][0]
    assert first.prompt.endswith("What is 1 + 2?\nassistant\n") and first.answer == "3"
    assert (first.total, first.verdict, first.advantage) == (1.0, 1.0, None)
    assert dump.steps[2][1].total is None
    assert dump.notes() == ["1 responses without a score (NaN or null), which are unscored"]


def test_a_dump_of_trl_is_read_with_its_weights() -> None:
    dump = read_dump(DUMPS / "trl", {"brevity": 2.0})
    assert dump.format == "trl" and list(dump.steps) == [5, 10] and dump.rows == 16
    assert dump.reward_names == ("correctness", "brevity")
    second, last = dump.steps[5][1], dump.steps[5][3]
    assert second.total == pytest.approx(0.0 + 2 * 0.25) and second.advantage == -0.5
    assert last.rewards["brevity"] is None and last.total == 0.0, "as TRL's nansum"
    assert second.answer == "5", "the reward function logged it"
    with pytest.raises(DataError, match="no reward 'other', only"):
        read_dump(DUMPS / "trl", {"other": 1.0})


def test_a_conversational_dump_of_trl_is_read() -> None:
    row = read_dump(DUMPS / "trl_chat").steps[5][0]
    assert [m.role for m in row.messages] == ["system", "user"]
    assert row.prompt == "system: Be brief.\nuser: What is 0 + 5?" and row.response == "It is 5"


def write(folder: Path, *rows: Json, name: str = "1.jsonl") -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(text)
    return folder


ROW: Json = {"input": "a", "output": "b", "gts": "1", "score": 1.0, "step": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("output"), "has no field 'output', only"),
        (lambda row: row.update(score="high"), "score is 'high', expected a number"),
        (lambda row: row.update(step="one"), "step is 'one', expected a whole number"),
        (lambda row: row.update(step=-1), "expected 0 or more"),
        (lambda row: row.update(step=10**12), "expected 0 or more, up to"),
        (lambda row: row.update(step=math.inf), "step is inf, expected a whole number"),
        (lambda row: row.update(score=10**400), "score is a number of 401 digits, too large"),
        (lambda row: row.update(input=[{"role": 1}]), "1.jsonl:2: input"),
    ],
)
def test_an_odd_row_is_one_sentence_with_its_place(
    change: Callable[[Json], object], said: str, tmp_path: Path
) -> None:
    row = dict(ROW)
    change(row)
    with pytest.raises(DataError) as raised:
        read_dump(write(tmp_path, ROW, row))
    assert said in str(raised.value) and "1.jsonl:2" in str(raised.value)


def test_odd_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no dump"):
        read_dump(tmp_path)
    write(tmp_path, ROW)
    (tmp_path / "1.jsonl").write_text(json.dumps(ROW)[:-9])
    with pytest.raises(DataError, match="1.jsonl:1 is not JSON"):
        read_dump(tmp_path)
    (tmp_path / "2.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"has .jsonl and .parquet files"):
        read_dump(tmp_path)
    with pytest.raises(DataError, match="not a Parquet file"):
        read_dump(tmp_path / "2.parquet")
    frame = pd.DataFrame([{"step": 1, "prompt": "a", "reward": 1.0}])
    frame.to_parquet(tmp_path / "3.parquet")
    with pytest.raises(DataError, match="has no field 'completion'"):
        read_dump(tmp_path / "3.parquet")


def test_mixed_and_missing_steps_are_counted(tmp_path: Path) -> None:
    without = {name: value for name, value in ROW.items() if name != "step"}
    write(tmp_path, ROW, ROW | {"step": 3}, without, name="7.jsonl")
    dump = read_dump(tmp_path)
    assert {step: len(rows) for step, rows in dump.steps.items()} == {1: 1, 3: 1, 7: 1}
    assert dump.counts.most_common() == [
        ("responses whose step is not that of their file's name; the field is taken", 2),
        ("responses without a field 'step', which have that of their file's name", 1),
    ]


# --- the tools on them ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    make_tiny_model(folder / "model")
    return folder / "home"


def command(home: Path, *arguments: str, code: int = 0) -> Json:
    done = CliRunner().invoke(app, [*arguments, "--home", str(home), "--json"])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    found: Json = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def imported(home: Path, dump: str, *more: str) -> Json:
    return command(home, "import", str(DUMPS / dump), "--model", str(home.parent / "model"), *more)


def evidence_of(home: Path, run: Json, step: int) -> Any:
    return read_step(home / "artifacts" / f"rl-{run['run_id'][:16]}" / "evidence", step)


def test_the_tools_read_a_dump_of_verl(home: Path) -> None:
    run = imported(home, "verl")
    assert run["steps"] == [1, 2] and run["responses"] == 24
    assert any("every ratio is 1" in note for note in run["notes"])
    batch = evidence_of(home, run, 1).batch
    assert batch.group_id.tolist() == [g for g in range(3) for _ in range(4)], "groups together"
    assert batch.advantages[:4, 0].tolist() == pytest.approx([0.866, -0.866] * 2, abs=1e-3)
    patterns = command(home, "forensics", run["run_id"])["patterns"]
    assert {p["subject"] for p in patterns} == {"score", "acc", "total", "responses"}
    scored = command(home, "rescore", run["run_id"], "--reward", "accuracy")
    assert scored["before"]["score"]["mean"] == pytest.approx(
        scored["after"]["accuracy"]["mean"], abs=0.05
    )
    assert scored["before"]["score"]["unscored"] == 1
    step = command(home, "inspect", run["run_id"], "--step", "1")
    assert len(step["samples"]) == 12 and step["top_tokens"]
    pairs = (
        "compare",
        run["run_id"],
        "--step",
        "2",
        "--algorithm",
        "dr_grpo",
        "--no-kl",
        "--model",
    )
    found = command(home, *pairs)
    norms = found["gradients"]["norms"]
    assert norms["as run"] > 0, "bfloat16 models too"
    assert imported(home, "verl")["run_id"] == run["run_id"], "the same run again"


def test_a_dump_of_trl_keeps_its_advantages(home: Path) -> None:
    """Prompts in its tables are text or messages: both give the same scores and advantages."""
    plain, chat = imported(home, "trl"), imported(home, "trl_chat", "--algorithm", "dapo")
    for run in (plain, chat):
        batch = evidence_of(home, run, 10).batch
        assert batch.advantages[:4, 0].tolist() == [1.0, -0.5, 0.5, -1.0]
        assert batch.reward_components[3].isnan().tolist() == [False, True]
        assert batch.acc.tolist() == [1.0, 0.0] * 4, "by the logged solution"
    found = command(home, "compare", plain["run_id"], chat["run_id"])
    assert len(found["runs"]) == 2


def test_validation_dumps_begin_at_step_0(home: Path) -> None:
    run = imported(home, "verl_validation", "--no-logprobs")
    assert run["steps"] == [1] and run["rewards"] == ["score", "acc"]
    assert any("steps are counted from 1" in note for note in run["notes"])
    assert any("4 prompts with another number of responses than 2" in n for n in run["notes"])


def test_what_needs_more_than_the_dump_has_is_refused(home: Path, tmp_path: Path) -> None:
    run = imported(home, "trl", "--no-logprobs")
    for tool in (("inspect",), ("compare", "--algorithm", "dapo")):
        said = command(home, *tool, run["run_id"], "--step", "5", code=2)["error"]
        assert "import it again without that option" in said
    command(home, "forensics", run["run_id"])
    said = command(
        home, "import", str(DUMPS / "verl"), "--model", str(home.parent / "model"),
        "--algorithm", "ppo", code=2,
    )["error"]  # fmt: skip
    assert "needs values, which a dump does not have" in said
    folder = shutil.copytree(DUMPS / "trl" / "completions", tmp_path / "unanswered")
    for file in folder.glob("*.parquet"):
        pd.read_parquet(file).drop(columns="solution").to_parquet(file)
    given = ("import", str(folder), "--model", str(home.parent / "model"), "--no-logprobs")
    other = command(home, *given)
    said = command(home, "rescore", other["run_id"], "--reward", "accuracy", code=2)["error"]
    assert "compares with the answers of problems" in said
    for tool in ("replay", "fork"):
        said = command(home, tool, run["run_id"], "--step", "5", code=4)["error"]
        assert "was imported from another trainer's dump" in said
    said = command(home, "verify", run["run_id"], code=2)["error"]
    assert "none makes one (['rl'])" in said
