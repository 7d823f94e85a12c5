"""A model verified against its record, and what is said of each thing that somebody changed.

One real run; each test works on a copy of its home. Some attackers rewrite the digests as well.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.store.attestation import Check
from posttrain.core.store.manifests import (
    ATTESTATION,
    digests_below,
    file_digest,
    model_digest,
    tree_digests,
)
from posttrain.core.training.digests import tensor_digest
from posttrain.pipelines.analysis.verify import Asked, Verified, draw, verify
from posttrain.pipelines.cli.common import text_console
from posttrain.pipelines.run.progress import PlainReporter
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

STEP, ROW = 3, 5
REWARD = '''"""A reward in a file."""

from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.types import Score


class OddConfig(PluginConfig):
    """Settings of `odd`."""


class Odd(Reward[OddConfig]):
    """1 for an odd number of characters. Source: a test."""

    name = "odd"
    Config = OddConfig

    def score(self, samples):
        """One score a sample."""
        return [Score(1.0 if len(sample.text) % 2 else 0.0) for sample in samples]
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a plugin's file, and a home whose run `RUN` made an `sft` and an `rl`."""
    folder = tmp_path_factory.mktemp("verify")
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(8)]
    lines = [json.dumps(row | {"completion": row["answer"]}) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(lines[:60]))
    (folder / "held.jsonl").write_text("".join(lines[60:]))
    chats = [{"prompt": row["prompt"], "completion": f"It is {row['answer']}"} for row in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "odd.py").write_text(REWARD)
    config = tiny_config(make_tiny_model(folder / "model"))
    paths = {"path": str(folder / "train.jsonl"), "held_out_path": str(folder / "held.jsonl")}
    config["task"] = {"name": "jsonl", **paths}
    rewards = ["accuracy", {"name": f"{folder / 'odd.py'}:Odd", "weight": 0.5}]
    stages = config["stages"]
    stages["rl"] |= {"rewards": rewards, "inputs": {"model": "sft"}}
    stages["rl"] |= {"checkpoint_every": 0, "evaluate_every": 0}
    stages["sft"]["data"] = [str(folder / "chats.jsonl")]
    config["stages"] = {name: stages[name] for name in ("sft", "rl")}
    home = prepared(folder / "home")
    done = run_command(
        "run", str(write_config(folder / "run.yaml", config)), "--home", str(home), "--json"
    )
    assert done.code == 0, done.text
    (folder / "run.id").write_text(done.result["run_id"])
    return folder


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the home to be changed; the data are put back afterwards."""
    data = {name: (made / name).read_bytes() for name in ("train.jsonl", "chats.jsonl")}
    yield shutil.copytree(made / "home", tmp_path / "home")
    for name, content in data.items():
        (made / name).write_bytes(content)


def run_id(made: Path) -> str:
    return (made / "run.id").read_text()


def checked(model: str, home: Path, steps: int = 100, expected: str = "") -> Verified:
    asked = Asked(model, steps, 1, expected)
    return verify(asked, home, home / "artifacts", PlainReporter(text_console(as_json=False)))


def different(found: Verified) -> dict[str, str]:
    """What differs, with what is said of it."""
    return {check.what: check.detail for check in found.checks if check.outcome == "differs"}


def outcome(found: Verified, what: str) -> Check:
    return next(check for check in found.checks if check.what == what)


def stage_folder(home: Path, stage: str) -> Path:
    (folder,) = (home / "artifacts").glob(f"{stage}-*")
    return folder


def flip(path: Path, place: int = -1) -> None:
    """Change one bit of one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def rewrite_manifest(folder: Path) -> None:
    """What an attacker does who knows the store: every digest as the files now are."""
    path = folder / "manifest.json"
    manifest: Any = json.loads(path.read_text())
    manifest["files"] = tree_digests(folder)
    for row in manifest["artifacts"]:
        row["digest"] = model_digest(digests_below(manifest["files"], row["uri"]))
    path.write_text(json.dumps(manifest))


def test_an_untouched_model_is_as_recorded_by_the_command(made: Path, tmp_path: Path) -> None:
    """All steps of both stages, bit for bit; the export carries the result, which a copy shows."""
    home = shutil.copytree(made / "home", tmp_path / "home")
    model, out = run_id(made)[:8], tmp_path / "out"
    done = run_command("verify", model, "--home", str(home), "--steps", "99", "--json")
    assert done.code == 0, done.text
    found = done.result
    assert found["differs"] == found["not_checked"] == 0 and found["equal"] > 20
    assert found["steps"] == {"rl": [1, 2, 3, 4], "sft": [1, 2, 3]}
    assert found["reached"] == {"rl": "exact", "sft": "exact"}
    (final,) = [c for c in found["checks"] if c["what"] == "stage rl: weights after the last step"]
    assert final["how"] == "every value, with those of step 4 computed again"
    statement = json.loads(Path(found["attestation"]).read_text())
    assert statement["verification"]["checks"] == found["checks"]
    exported = run_command("export", model, str(out), "--home", str(home))
    assert exported.code == 0 and f"{found['equal']} equal, 0 differs" in exported.text
    alone = checked(str(out), tmp_path / "elsewhere")
    assert not alone.failed and different(alone) == {}
    unchecked = {check.what for check in alone.checks if check.outcome == "not checked"}
    assert {"stage rl: steps and rewards", "stage sft: files", ATTESTATION} <= unchecked
    assert "this is a claim until it is made again" in alone.notes[0]
    assert outcome(checked(str(out), home, 0), "model").outcome == "equal", "with the home, all"


def test_steps_that_were_not_drawn_are_not_called_equal(made: Path, home: Path) -> None:
    found = checked(run_id(made), home, 0)
    for stage in ("rl", "sft"):
        check = outcome(found, f"stage {stage}: steps")
        assert check.outcome == "not checked" and "none of its" in check.detail
    assert "2 not checked" in found.verdict() and not found.failed


def test_a_changed_byte_of_the_weights_is_named(made: Path, home: Path) -> None:
    flip(stage_folder(home, "rl") / "model" / "model.safetensors")
    done = run_command("verify", run_id(made), "--home", str(home), "--steps", "0", "--json")
    assert done.code == 1, done.text
    (named,) = [c for c in done.result["checks"] if "files" in c["what"] and c["detail"]]
    assert "model/model.safetensors was changed" in named["detail"]


def test_weights_changed_with_their_digests_are_named(made: Path, home: Path) -> None:
    """MLflow and the record of the last step know better; so does computing it again."""
    folder = stage_folder(home, "rl")
    flip(folder / "model" / "model.safetensors")
    rewrite_manifest(folder)
    found = different(checked(f"{run_id(made)}/rl", home, 99))
    assert "MLflow has" in found["model"]
    assert "is not as recorded" in found["stage rl: weights after the last step"]
    assert "first at" in found["stage rl: 4 steps recomputed"]
    assert "stage rl: manifest" not in found, "the attacker was thorough"


def test_an_ancestor_changed_with_its_digests_breaks_the_chain(made: Path, home: Path) -> None:
    folder = stage_folder(home, "sft")
    flip(folder / "model" / "model.safetensors")
    rewrite_manifest(folder)
    found = checked(run_id(made), home, 0)
    said = different(found)["stage rl: input model"]
    assert "which no stage of the store made" in said and "'sft'" in said


def change_evidence(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "evidence" / f"step-{STEP:06d}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def one_more_reward(tensors: dict[str, Any]) -> None:
    tensors["rewards"][ROW] += 1


def test_a_changed_reward_in_the_record_is_named(made: Path, home: Path) -> None:
    change_evidence(stage_folder(home, "rl"), one_more_reward)
    found = different(checked(run_id(made), home))
    (files,) = (
        detail for what, detail in found.items() if re.fullmatch(r"stage rl: \d+ files", what)
    )
    assert f"evidence/step-00000{STEP}.safetensors was changed" in files
    assert f"step {STEP}: rewards in evidence" in found["stage rl: record of 4 steps"]
    (said,) = [text for what, text in found.items() if what.startswith("stage rl: rewards")]
    assert f"step {STEP}, response {ROW}: sum is" in said


def test_a_reward_changed_with_every_digest_is_refuted_by_computing(made: Path, home: Path) -> None:
    """Values, evidence, scores, the step's line and the manifest all tell the new story."""
    folder = stage_folder(home, "rl")

    def change(tensors: dict[str, Any]) -> None:
        one_more_reward(tensors)
        tensors["reward_components"][ROW, 0] += 1

    change_evidence(folder, change)
    path = folder / "evidence" / f"step-{STEP:06d}.parquet"
    table = pq.read_table(path)
    scores = table.column("scores").to_pylist()
    row = json.loads(scores[ROW])
    row[0]["value"] += 1
    scores[ROW] = json.dumps(row)
    place = table.column_names.index("scores")
    pq.write_table(table.set_column(place, "scores", [scores]), path)
    values = folder / "replay" / "values" / f"step-{STEP:06d}.safetensors"
    tensors = load_file(values)
    before = tensor_digest(tensors["rewards"])
    one_more_reward(tensors)
    save_file(tensors, values)
    record = folder / "replay" / "steps.jsonl"
    record.write_text(record.read_text().replace(before, tensor_digest(tensors["rewards"])))
    rewrite_manifest(folder)
    found = different(checked(run_id(made), home))
    assert not any(re.fullmatch(r"stage rl: \d+ files", what) for what in found)
    assert "stage rl: record of 4 steps" not in found
    assert (
        f"step {STEP}: rewards (16), max abs difference 1" in found["stage rl: 4 steps recomputed"]
    )
    assert f"first at [{ROW}]" in found["stage rl: 4 steps recomputed"]
    (said,) = [text for what, text in found.items() if what.startswith("stage rl: rewards")]
    assert f"step {STEP}, response {ROW}: accuracy is" in said


def test_a_changed_row_of_data_is_named(made: Path, home: Path) -> None:
    rows = (stage_folder(home, "rl") / "replay" / "rows.jsonl").read_text().splitlines()
    place = json.loads(rows[0])["row"]
    number = int(place.rpartition(":")[2])
    lines = (made / "train.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[number - 1])
    lines[number - 1] = json.dumps(row | {"answer": "77"}) + "\n"
    (made / "train.jsonl").write_text("".join(lines))
    found = different(checked(run_id(made), home, 0))
    assert "the task's data changed" in found["stage rl: data (1)"]
    (said,) = [text for what, text in found.items() if what.startswith("stage rl: 16 rows")]
    assert said == f"row {place} changed"


def test_a_changed_row_of_supervised_data_is_named(made: Path, home: Path) -> None:
    lines = (made / "chats.jsonl").read_text().splitlines(keepends=True)
    lines[6] = lines[6].replace("It is", "It was")
    (made / "chats.jsonl").write_text("".join(lines))
    found = different(checked(run_id(made), home, 0))
    assert "the content of data.0.path changed" in next(
        text for what, text in found.items() if what.startswith("stage sft: data")
    )
    assert found["stage sft: 64 rows of data"] == f"row {made / 'chats.jsonl'}:7 changed"


def test_a_changed_line_of_a_plugin_is_named(made: Path, home: Path) -> None:
    (path,) = (home / "runs" / run_id(made) / "plugins").rglob("odd.py")
    path.write_text(path.read_text().replace("% 2 else 0.0", "% 2 else 0.5"))
    found = different(checked(run_id(made), home))
    said = found["stage rl: plugins (14)"]
    assert "reward plugin odd.py:Odd changed" in said
    assert "odd.py:19 is" in said and "% 2 else 0.5" in said and "was '" in said
    assert "rewards (16)" in found["stage rl: 4 steps recomputed"], "and it scores otherwise"


def test_a_changed_setting_is_named(made: Path, home: Path) -> None:
    path = home / "runs" / run_id(made) / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002"))
    found = different(checked(run_id(made), home, 0))
    ((what, detail),) = found.items()
    assert re.fullmatch(r"stage rl: settings \(\d+\)", what)
    assert detail == "optimizer.learning_rate: 0.002, was 0.001"


def test_a_changed_exported_folder_is_found(made: Path, home: Path, tmp_path: Path) -> None:
    out, nowhere = tmp_path / "out", tmp_path / "elsewhere"
    assert run_command("export", run_id(made), str(out), "--home", str(home)).code == 0
    published = file_digest(out / ATTESTATION)
    assert checked(str(out), nowhere, 0, published[:20]).count("differs") == 0
    flip(out / "model.safetensors")
    assert (
        "model.safetensors was changed"
        in different(checked(str(out), nowhere))["exported folder: 7 files"]
    )
    statement: Any = json.loads((out / ATTESTATION).read_text())
    statement["files"]["model.safetensors"] = file_digest(out / "model.safetensors")
    (out / ATTESTATION).write_text(json.dumps(statement))
    assert (
        "model.safetensors is not the model's"
        in different(checked(str(out), nowhere))["exported model"]
    )
    files = statement["model"]["files"]
    files["model.safetensors"] = statement["files"]["model.safetensors"]
    old, statement["model"]["digest"] = statement["model"]["digest"], model_digest(files)
    text = json.dumps(statement).replace(old, statement["model"]["digest"])
    (out / ATTESTATION).write_text(text)
    thorough = checked(str(out), nowhere)
    assert outcome(thorough, ATTESTATION).outcome == "not checked", "it is not signed"
    assert different(checked(str(out), nowhere, 0, published[:20]))[ATTESTATION]


def test_steps_are_spread_over_the_stages_and_drawn_by_the_seed() -> None:
    steps = {"rl": range(1, 51), "sft": range(1, 6), "none": ()}
    one, other = draw(steps, 6, 1), draw(steps, 6, 2)
    assert [len(found) for found in one.values()] == [3, 3] and one != other
    assert one == draw(steps, 6, 1)
    assert draw(steps, 1000, 1) == {"rl": list(steps["rl"]), "sft": [1, 2, 3, 4, 5]}
