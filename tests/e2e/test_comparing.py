"""Looking back at real runs by the real commands: steps, runs, rewards, forensics."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.manifests import tree_digests
from posttrain.core.tracking.journal import read_journal
from posttrain.pipelines.cli.main import app
from tests.helpers.pipeline import prepared, run_command, tiny_config, write_config

pytestmark = pytest.mark.usefixtures("shared_prefect")

Json = dict[str, Any]
STEPS = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `a` and `b` of one config and two seeds."""
    folder = tmp_path_factory.mktemp("comparing")
    config = tiny_config(make_tiny_model(folder / "model"))
    stages = config["stages"]
    stages["rl"] |= {"inputs": {"model": "sft"}, "steps": STEPS, "checkpoint_every": 0}
    stages["rl"]["rewards"] = [
        "accuracy",
        {"name": "repetition", "ngram": 1, "weight": 0.5},
        {"name": "repetition", "ngram": 2, "weight": 0},
    ]
    stages["rl"]["reward_pool"] = {"workers": 2, "timeout_s": 1.0}
    stages["evaluate"]["inputs"] = {"model": "rl"}
    config["stages"] = {name: stages[name] for name in ("sft", "rl", "evaluate")}
    write_config(folder / "run.yaml", config)
    prepared(folder / "home")
    add_run(folder, "a")
    add_run(folder, "b", "seed=1")
    return folder / "home"


@pytest.fixture(scope="module")
def three(home: Path) -> Path:
    """The same home with run `c` of another config, which keeps its checkpoints."""
    # What sampling computed is rounded otherwise, by more than a test of the update allows.
    other = ("keep.every=1", "stages.rl.reuse_outputs=false", "stages.rl.num_mini_batches=1")
    add_run(home.parent, "c", *other, "stages.rl.optimizer.learning_rate=0.002")
    return home


def add_run(folder: Path, name: str, *changes: str) -> None:
    options = [word for change in changes for word in ("--set", change)]
    where = ("--home", str(folder / "home"), "--json")
    done = run_command("run", str(folder / "run.yaml"), *where, *options)
    assert done.code == 0, done.text
    (folder / f"{name}.id").write_text(done.result["run_id"])


def run_id(home: Path, name: str) -> str:
    return (home.parent / f"{name}.id").read_text()


def ask(home: Path, *arguments: str, code: int = 0) -> Json:
    """The command in this process; its JSON object, after a look at its page."""
    result = CliRunner().invoke(app, [*arguments, "--home", str(home), "--json"])
    assert "Traceback" not in result.output
    assert result.exit_code == code, result.output
    found: Json = json.loads(result.stdout.splitlines()[-1])
    if code == 0:
        page = Path(found["page"]).read_text()
        assert page.endswith("</html>\n")
        assert not re.search(r"(src|href)=[\"'](?!data:)", page)
        assert "NaN" not in result.stdout
    return found


def test_records_of_runs_are_compared_without_their_plugins(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PluginManager, "_load_entry_points", lambda _: None)
    report = ask(home, "compare", run_id(home, "a"), run_id(home, "b"))
    assert report["page"]


def journal(home: Path, run: str, stage: str = "rl") -> dict[int, dict[str, float]]:
    record = json.loads((home / "runs" / run / "run.json").read_text())
    path = home / "runs" / f"metrics-{stage}-{record['stages'][stage][:16]}.jsonl"
    return {row.step: dict(row.metrics) for row in read_journal(path)}


def all_but_reports(home: Path) -> dict[str, str]:
    found = tree_digests(home)
    left_out = ("-wal", "-shm")
    return {n: d for n, d in found.items() if not n.endswith(left_out) and "reports/" not in n}


def test_the_runs_own_loss_on_a_frozen_step_is_the_loss_it_had(home: Path) -> None:
    before, run = all_but_reports(home), run_id(home, "a")
    for step in (1, STEPS):
        found = ask(home, "compare", run, "--step", str(step), "--algorithm", "gspo")
        own, gspo = found["variants"]
        recorded = journal(home, run)[step]
        assert own["loss"] == pytest.approx(recorded["loss/total"], rel=1e-5)
        assert own["parts"]["loss/kl"] == pytest.approx(recorded["loss/kl"], rel=1e-5)
        assert own["metrics"]["clip/frac"] == pytest.approx(recorded["clip/frac"], abs=1e-6)
        assert found["advantage_gap"] == 0.0
        assert gspo["loss"] != own["loss"]
        (pair,) = found["pairs"]
        assert 0 < pair["weights"]["cosine"] < 1
        assert pair["advantage_rank"] == pytest.approx(1.0)
    assert all_but_reports(home) == before


def test_the_same_algorithm_again_differs_in_nothing(home: Path) -> None:
    arguments = ("--step", "2", "--algorithm", "grpo", "--clip", "0.2:0.2", "--clip", "0.001:0.9")
    found = ask(home, "compare", run_id(home, "a"), *arguments)
    same, also, _, *_ = found["pairs"]
    for pair in (same, also):
        assert pair["weights"] == {
            "cosine": pytest.approx(1.0), "norm_ratio": 1.0, "sign_differs": 0.0, "opposite": 0.0
        }  # fmt: skip
        assert pair["largest"] == []
    clips = {one["label"]: one["metrics"]["clip/frac"] for one in found["variants"]}
    assert clips["clip 0.001:0.9"] != clips["as run"] == clips["clip 0.2:0.2"]


@pytest.mark.parametrize(("step", "where"), [(1, "input model"), (2, "checkpoint after step 1")])
@pytest.mark.slow
def test_the_parameter_gradient_is_the_one_the_run_took(three: Path, step: int, where: str) -> None:
    run = run_id(three, "c")
    arguments = ("--step", str(step), "--model", "--algorithm", "grpo", "--algorithm", "dapo")
    found = ask(three, "compare", run, *arguments)
    gradients = found["gradients"]
    assert where in gradients["source"]
    assert gradients["exact"]
    assert gradients["logprob_gap"] < 1e-6
    recorded = journal(three, run)[step]["grad/norm"]
    assert gradients["norms"]["as run"] == pytest.approx(recorded, rel=1e-4)
    first = gradients["pairs"][0]
    assert (first["cosine"], first["norm_ratio"]) == pytest.approx((1.0, 1.0))
    assert gradients["pairs"][1]["cosine"] < 0.9999


@pytest.mark.slow
def test_variants_are_ranked_on_frozen_rollouts(three: Path) -> None:
    """Every aggregator next to the run's own; the numbers themselves are tested elsewhere."""
    before, run = all_but_reports(three), run_id(three, "c")
    few = ("--batches", "8", "--directions", "8")
    found = ask(three, "compare", run, "--frozen", "--no-kl", *few)
    aggregators = {entry.name for entry in PluginManager().entries("aggregator")}
    labels = [variant["label"] for variant in found["variants"]]
    own = {f"aggregation {name}" for name in aggregators} - set(labels)
    assert len(labels) == len(aggregators) and len(own) == 1 and "as run" in labels
    assert found["steps"] == [1, 2, 3] and found["policy"] == "the stage's input model"
    count = len(labels)
    assert len(found["predictions"]) == count * (count - 1) / 2
    aligned = [v["alignment"] for v in found["variants"] if v["alignment"] is not None]
    assert aligned == sorted(aligned, reverse=True) and aligned
    later = ask(three, "compare", run, "--frozen", "--step", "2", "--advantage", "rloo", *few)
    assert later["policy"] == "the checkpoint after step 1" and later["steps"] == [2, 3]
    assert {v["label"] for v in later["variants"]} == {"as run", "advantage rloo"}
    assert all_but_reports(three) == before


def test_token_weights_are_among_the_curves_of_whole_runs(home: Path) -> None:
    report = ask(home, "compare", run_id(home, "a"), run_id(home, "b"))
    curves = report["groups"][0]["curves"]
    assert len(curves["token_weight/peak"]) == STEPS
    assert all(point["mean"] >= 1 for point in curves["token_weight/peak"])
    assert "token_weight/share/long" in curves


def test_a_policy_that_was_not_kept_is_not_called_the_steps_own(home: Path) -> None:
    found = ask(home, "compare", run_id(home, "a"), "--step", "3", "--model", "--loss", "cispo")
    assert found["gradients"]["source"] == "the stage's trained model, after step 3"
    assert not found["gradients"]["exact"]
    assert any("keep.every=1" in note for note in found["notes"])


@pytest.mark.slow
def test_runs_are_grouped_by_experiment_and_laid_side_by_side(three: Path) -> None:
    runs = [run_id(three, name) for name in "abc"]
    found = ask(three, "compare", *runs)
    assert [group["runs"] for group in found["groups"]] == [runs[:2], runs[2:]]
    keys = {one["key"]: one["values"] for one in found["differences"]}
    assert keys["seed"] == {runs[0]: "0", runs[1]: "1", runs[2]: "0"}
    assert keys["stages.rl.num_mini_batches"][runs[2]] == "1"
    assert set(keys) == {
        "seed", "keep.every", "stages.rl.num_mini_batches", "stages.rl.optimizer.learning_rate",
        "stages.rl.reuse_outputs",
    }  # fmt: skip
    curve = found["groups"][0]["curves"]["resp_len/mean"]
    for point in curve:
        values = [journal(three, run)[point["step"]]["resp_len/mean"] for run in runs[:2]]
        assert point["mean"] == pytest.approx(sum(values) / 2)
        assert point["num_runs"] == 2
    assert [t["how"] for t in found["tests"]] == ["paired over problems"] * 2
    assert {(t["first"], t["second"]) for t in found["tests"]} == {(runs[0][:8], runs[2][:8])}
    assert found["runs"][0]["tokens"] == sum(
        row.get("tokens/response", 0.0) for row in journal(three, runs[0]).values()
    )


@pytest.mark.slow
def test_a_home_without_the_journal_reads_the_record_in_the_store(
    three: Path, tmp_path: Path
) -> None:
    runs = [run_id(three, name) for name in "ac"]
    shutil.copytree(three / "runs", tmp_path / "runs")
    for path in (tmp_path / "runs").glob("metrics-*"):
        path.unlink()
    store = ("--store", str(three / "artifacts"))
    found, known = ask(tmp_path, "compare", *runs, *store), ask(three, "compare", *runs)
    assert {run["source"] for run in found["runs"]} == {"record of steps in the store"}
    assert {run["seconds"] for run in found["runs"]} == {None}
    assert found["tests"] == known["tests"]
    assert found["runs"][0]["last"]["reward/mean"] == known["runs"][0]["last"]["reward/mean"]
    shutil.rmtree(tmp_path / "runs" / runs[0], ignore_errors=True)
    refused = ask(tmp_path, "compare", *runs, *store, code=2)
    assert runs[0] in refused["error"]


def test_the_same_rewards_again_flip_nothing_and_negated_ones_all(home: Path) -> None:
    before, run = all_but_reports(home), run_id(home, "a")
    rewards = ("accuracy", "repetition,ngram=1:0.5", "repetition,ngram=2:0")
    same = ask(home, "rescore", run, *(word for r in rewards for word in ("--reward", r)))
    assert [step["step"] for step in same["steps"]] == [1, 2, 3]
    assert sum(step["flipped"] + step["tied"] for step in same["steps"]) == 0
    assert same["before"] == same["after"]
    assert list(same["before"]) == ["accuracy", "repetition", "repetition_2", "total"]
    assert same["before"]["repetition"] != same["before"]["repetition_2"]
    negated = ("--reward", "accuracy:-1", "--reward", "repetition,ngram=1:-0.5")
    turned = ask(home, "rescore", run, *negated, "--step", "2")
    (step,) = turned["steps"]
    assert (step["pairs"], step["tied"], step["became_equal"]) == (24, 0, 0)
    assert 0 < step["flipped"] <= 24
    assert step["groups_with_sign_change"] > 0
    for example in turned["examples"]:
        assert example["new"] == pytest.approx(-example["old"])
    assert all_but_reports(home) == before


def test_rewards_in_worker_processes_and_their_failures_are_told(home: Path) -> None:
    run = run_id(home, "a")
    found = ask(home, "rescore", run, "--step", "1", "--reward", "format,tags=[a]")
    assert found["after"]["format"]["zeros"] == 16
    assert found["steps"][0]["became_equal"] > 0
    assert found["failures"] == []
    endless = f"format,match=anywhere,pattern=(?:{'|'.join('.' * 16)})*ZZZ"
    found = ask(home, "rescore", run, "--step", "1", "--reward", endless)
    timeouts = found["after"]["format"]["timeouts"]
    assert 0 < timeouts == len(found["failures"])
    assert found["after"]["format"]["scored"] == 16 - timeouts
    assert found["steps"][0]["scored_by_both"] == 16 - timeouts
    assert found["steps"][0]["pairs"] < 24  # four groups of four, all scored


def test_forensics_tell_each_reward_over_time(home: Path) -> None:
    run = run_id(home, "a")
    found = ask(home, "forensics", run)
    rows = journal(home, run)
    for step in found["steps"]:
        recorded = rows[step["step"]]
        for name in ("accuracy", "repetition", "repetition_2"):
            mean = step["rewards"][name]["mean"]
            assert mean == pytest.approx(recorded[f"reward/component/{name}"], abs=1e-6)
        assert step["rewards"]["total"]["mean"] == pytest.approx(recorded["reward/mean"], abs=1e-6)
        assert step["mean_length"] == pytest.approx(recorded["resp_len/mean"])
        assert step["accuracy"] == pytest.approx(recorded["acc/mean"])
    length = next(
        p
        for p in found["patterns"]
        if (p["name"], p["subject"]) == ("length_correlation", "repetition")
    )
    assert length["value"] < -0.5  # a long response repeats its tokens, which this reward punishes
    assert length["suspicious"]


REFUSED: list[tuple[list[str], int, str]] = [
    (["compare", "{a}", "--step", "9", "--algorithm", "grpo"], 2, "steps 1, 2, 3"),
    (["compare", "nosuch", "--step", "1", "--algorithm", "grpo"], 2, "no run 'nosuch'"),
    (["compare", "{a}", "--step", "1", "--algorithm", "grppo"], 2, "did you mean 'grpo'"),
    (["compare", "{a}", "--step", "1", "--algorithm", "ppo"], 2, "values"),
    (["compare", "{a}", "--step", "1", "--loss", "ptx"], 2, "ptx"),
    (["compare", "{a}", "--step", "1", "--algorithm", "grpo", "--stage", "sft"], 2, "kind 'sft'"),
    (["compare", "{a}", "--step", "1"], 2, "--algorithm"),
    (["compare", "{a}", "{b}", "--step", "1", "--clip", "0.1:0.1"], 2, "2 were given"),
    (["compare", "{a}"], 2, "one run was given"),
    (["compare", "{a}", "{a}"], 2, "given twice"),
    (["compare", "{a}", "{b}", "--frozen"], 2, "2 were given"),
    (["compare", "{a}", "--frozen", "--model"], 2, "leave --model out"),
    (["compare", "{a}", "--frozen", "--step", "9"], 2, "steps 1, 2, 3"),
    (["compare", "{a}", "--frozen", "--advantage", "gae"], 2, "values"),
    (["compare", "{a}", "{b}", "--pool", "3"], 2, "add it"),
    (["compare", "{a}", "{b}", "--stage", "evaluate"], 2, "evaluate"),
    (["rescore", "{a}"], 2, "--reward"),
    (["rescore", "{a}", "--reward", "acuracy"], 2, "did you mean 'accuracy'"),
    (["rescore", "{a}", "--reward", "reward_model"], 2, "reward_model"),
    (["rescore", "{a}", "--reward", "accuracy:0"], 2, "weight"),
    (["rescore", "{a}", "--reward", "accuracy", "--step", "7"], 2, "steps 1, 2, 3"),
    (["forensics", "{a}", "--stage", "nosuch"], 2, "nosuch"),
    (["forensics", "{a}", "--step", "7"], 2, "steps 1, 2, 3"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), REFUSED)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    home: Path, arguments: list[str], code: int, says: str
) -> None:
    shutil.rmtree(home / "reports", ignore_errors=True)
    names = {name: run_id(home, name) for name in "ab"}
    found = ask(home, *(word.format(**names) for word in arguments), code=code)
    assert says in found["error"]
    assert not (home / "reports").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("harm", [cut, change])
@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_damaged_evidence_is_said_in_a_sentence(
    home: Path, tmp_path: Path, suffix: str, harm: Callable[[Path], None]
) -> None:
    run = run_id(home, "a")
    shutil.copytree(home / "runs", tmp_path / "runs")
    shutil.copytree(home / "artifacts", tmp_path / "artifacts")
    identity = json.loads((home / "runs" / run / "run.json").read_text())["stages"]["rl"]
    folder = tmp_path / "artifacts" / f"rl-{identity[:16]}" / "evidence"
    harm(folder / f"step-000002.{suffix}")
    for command in (
        ["compare", run, "--step", "2", "--algorithm", "grpo"],
        ["rescore", run, "--reward", "accuracy"],
        ["forensics", run],
    ):
        assert "step 2" in ask(tmp_path, *command, code=1)["error"]
    assert not (tmp_path / "reports").exists()
    if suffix == "safetensors":
        (tmp_path / "artifacts" / f"rl-{identity[:16]}" / "manifest.json").unlink()
        assert "evidence" in ask(tmp_path, "forensics", run, code=4)["error"]
