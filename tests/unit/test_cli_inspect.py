"""`posttrain inspect` on a run whose evidence is there, and on everything it has to refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from posttrain.core.analysis.evidence import FOLDER, StepEvidence, tensors_path, write_step
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.store.run_record import RunRecorder
from posttrain.core.training.splitting import mini_rows
from posttrain.pipelines.cli.main import app
from posttrain.pipelines.stage.files import checkpoint_folder
from tests.helpers.microscope import meta_of, synthetic_evidence, weights_of

RUN = "0123456789abcdef"
CONFIG = """\
task: {name: arithmetic}
seed: 3
stages:
  sft: {kind: sft, inputs: {model: base}}
  rl:
    kind: rl
    inputs: {model: sft}
    algorithm: %s
    num_mini_batches: 2
    generation: {max_response_length: 16}
"""


def evidence(step: int, seed: int) -> StepEvidence:
    """A step of a stage that cuts its batch into two mini-batches by `seed`."""
    made = synthetic_evidence(16, 16, group_size=4)
    seen_by = torch.full((16,), -1)
    for number, rows in enumerate(mini_rows(made.batch, 1, 2, seed, "mini_batches", step)):
        seen_by[rows] = number
    batch = replace(made.batch, texts=("a\nb",) * 16)
    return replace(made, step=step, seen_by=seen_by, batch=batch)


def home_of(folder: Path, algorithm: str = "grpo") -> Path:
    home = folder / "home"
    recorder = RunRecorder(home, RUN, "r", "now", CONFIG % algorithm)
    recorder.stage("rl", "f" * 64)
    kept = checkpoint_folder(home, "rl", "f" * 64) / FOLDER
    for step in (1, 5):
        write_step(kept, evidence(step, derive_seed(3, "rl", "learner")))
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return home_of(tmp_path)


def inspected(home: Path, *arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["inspect", RUN[:6], "--home", str(home), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_without_a_step_the_steps_are_listed_with_what_they_were(home: Path) -> None:
    shown, _ = inspected(home)
    assert "Steps of stage rl" in shown and "reward" in shown and "kl_old" in shown
    reported = json.loads(inspected(home, "--json")[0])
    assert [row["step"] for row in reported["steps"]] == [1, 5]
    batch = evidence(1, 0).batch
    assert reported["steps"][0]["reward"] == pytest.approx(float(batch.column("rewards").mean()))
    assert reported["steps"][0]["tokens"] == int(batch.mask.sum())
    assert not (home / "reports").exists()


def test_a_step_is_a_page_a_table_of_samples_and_one_of_tokens(home: Path) -> None:
    shown, _ = inspected(home, "--step", "5")
    assert "Question 0?" in shown and "a\\nb" in shown and "reward/accuracy" in shown
    assert "Tokens of largest |weight|" in shown and "own@token-mean" in shown
    (page,) = (home / "reports").iterdir()
    assert f"page: {page}" in shown.replace("\n", "")
    meta = meta_of(page.read_text("utf-8"))
    assert meta["title"] == "run 01234567 · stage rl · step 5"


def test_the_json_is_of_the_page(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    stdout, stderr = inspected(
        home, "--step", "1", "--json", "--out", str(out),
        "--what-if", "ppo_clip,clip_high=0.01@token-mean", "--what-if", "own,clip_low=0.01",
    )  # fmt: skip
    reported = json.loads(stdout)
    assert reported["page"] == str(out) and "Tokens of largest" in stderr
    page = out.read_text("utf-8")
    names = [variant["name"] for variant in reported["variants"]]
    assert names[:3] == ["own", "ppo_clip,clip_high=0.01@token-mean", "own,clip_low=0.01"]
    assert "own@token-mean" in names and "gspo@seq-mean-token-mean" in names
    assert reported["variants"][1]["clipped"] > reported["variants"][0]["clipped"]
    first = reported["top_tokens"][0]
    weights = weights_of(page, "own")
    assert first["weight"] == pytest.approx(weights[first["row"]][first["token"]], rel=1e-6)
    assert abs(first["weight"]) == pytest.approx(max(abs(w) for row in weights for w in row))
    assert len(reported["samples"]) == 16 and reported["samples"][0]["reward/accuracy"] in (0, 1)


def test_the_mini_batches_are_those_of_the_runs_seed(home: Path) -> None:
    """Each mini-batch has two of four groups: their weights are each a mean over eight rows."""
    meta = json.loads(inspected(home, "--step", "1", "--json")[0])
    own = next(v for v in meta["variants"] if v["name"] == "own")
    sums = next(v for v in meta["variants"] if v["name"] == "own@seq-sum-token-mean")
    assert sums["size"] == pytest.approx(8 * own["size"])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--step", "2"), 2, "there is evidence of the steps 1, 5"),
        (("--what-if", "cispo"), 2, "--what-if and --out are about one step"),
        (("--stage", "evaluate"), 2, "stage 'evaluate' is none of this run's"),
        (("--stage", "sft"), 4, "stage 'sft' never began"),
        (("--stage", "rll"), 2, "did you mean 'rl'?"),
        (("--step", "1", "--what-if", "cipso"), 2, "did you mean 'cispo'?"),
        (("--step", "1", "--what-if", ""), 2, "must begin with a plugin's name"),
        (("--step", "1", "--what-if", "own@"), 2, "must begin with a plugin's name"),
        (
            ("--step", "1", "--what-if", "ppo_clip,clip_high"),
            2,
            "'clip_high' must look like",
        ),
        (("--step", "1", "--what-if", "ppo_clip,clip_hihg=1"), 2, "clip_hihg"),
        (("--step", "1", "--what-if", "ppo_clip,clip_high=x"), 2, "clip_high"),
        (
            ("--step", "1", "--what-if", "ppo_clip,clip_high=[1"),
            2,
            "'clip_high' is not YAML",
        ),
        (("--step", "1", "--what-if", "own@mean"), 2, "no aggregator named 'mean'"),
        (("--step", "1", "--what-if", "gspo@token-mean"), 2, "write gspo@seq-mean-token-mean"),
        (("--step", "1", "--what-if", "ptx"), 2, "reads batches of its own"),
        (("--step", "1", "--what-if", "own"), 2, "'own' is on the page already"),
        (("--step", "1", "--what-if", "cispo", "--what-if", "cispo"), 2, "name each once"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence_and_nothing_is_written(
    home: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    result = CliRunner().invoke(app, ["inspect", RUN, "--home", str(home), *arguments])
    assert result.exit_code == code, result.output
    assert says in result.stderr and result.stderr.count("error: ") == 1
    assert "Traceback" not in result.output
    assert not (home / "reports").exists()


def test_a_page_that_cannot_be_written_leaves_nothing(home: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_text("")
    for out in (folder, file / "page.html"):
        given = ["inspect", RUN, "--home", str(home), "--step", "1", "--out", str(out)]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 4 and "cannot write the page" in result.stderr
    assert not list(folder.iterdir()) and not list(tmp_path.glob("**/*.partial"))


def test_a_damaged_step_and_an_unknown_run_are_refused(home: Path) -> None:
    kept = checkpoint_folder(home, "rl", "f" * 64) / FOLDER
    tensors_path(kept, 1).write_bytes(b"nothing")
    result = CliRunner().invoke(app, ["inspect", RUN, "--home", str(home), "--step", "1"])
    assert result.exit_code == 1 and "cannot be read" in result.stderr
    result = CliRunner().invoke(app, ["inspect", "77", "--home", str(home), "--step", "1"])
    assert result.exit_code == 2 and "no run '77'" in result.stderr


DISTIL = """\
task: {name: arithmetic}
seed: 3
stages:
  teacher: {kind: sft, inputs: {model: base}}
  rl:
    kind: distill
    inputs: {model: base, teacher: teacher}
    generation: {max_response_length: 16}
"""


def distilled_home(folder: Path, **columns: torch.Tensor) -> Path:
    home = folder / "home"
    recorder = RunRecorder(home, RUN, "r", "now", DISTIL)
    recorder.stage("rl", "f" * 64)
    kept = evidence(1, 0)
    kept = replace(kept, seen_by=torch.zeros(16, dtype=torch.int64), **columns)
    kept = replace(kept, batch=kept.batch.with_columns(advantages=torch.zeros(16, 16)))
    write_step(checkpoint_folder(home, "rl", "f" * 64) / FOLDER, kept)
    return home


def test_a_distillation_loss_has_norms_and_the_gap_to_its_teacher(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    value, slope, gap = (torch.rand(16, 16, generator=draw) for _ in range(3))
    home = distilled_home(tmp_path, seen_divergence=value, seen_slope=slope, seen_gap=gap)
    out = tmp_path / "page.html"
    stdout, _ = inspected(home, "--step", "1", "--json", "--out", str(out))
    reported = json.loads(stdout)
    assert any("norm of d loss / d logits" in note for note in reported["notes"])
    names = [variant["name"] for variant in reported["variants"]]
    assert names[0] == "own" and "own@token-sum" in names and "cispo" not in names
    mask = evidence(1, 0).batch.mask
    sums = next(v for v in reported["variants"] if v["name"] == "own@token-sum")
    assert sums["size"] == pytest.approx(float((slope * mask).sum()), rel=1e-5)
    first = reported["top_tokens"][0]
    place = first["row"], first["token"]
    assert first["teacher_gap"] == pytest.approx(float(gap[place]))
    assert first["divergence"] == pytest.approx(float(value[place]))
    meta = meta_of(out.read_text("utf-8"))
    assert meta["of_logits"] and {"teacher_gap", "divergence"} <= set(meta["quantities"])


def test_what_a_distillation_loss_cannot_be_asked_is_told(tmp_path: Path) -> None:
    zeros = torch.zeros(16, 16)
    there = distilled_home(tmp_path / "a", seen_divergence=zeros, seen_slope=zeros)
    bare = distilled_home(tmp_path / "b")
    for home, more, code, says in (
        (there, ("--what-if", "cispo"), 2, "this stage has no policy loss"),
        (bare, (), 1, "no gradients of its distillation loss"),
    ):
        arguments = ["inspect", RUN, "--home", str(home), "--step", "1", *more]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code and says in result.stderr, result.output


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "dr_grpo"])
def test_the_presets_have_pages(tmp_path: Path, algorithm: str) -> None:
    stdout, _ = inspected(home_of(tmp_path, algorithm), "--step", "1", "--json")
    names = [variant["name"] for variant in json.loads(stdout)["variants"]]
    assert names[0] == "own" and len(names) >= 4 and len(set(names)) == len(names)


def test_help_teaches_with_examples() -> None:
    shown = CliRunner().invoke(app, ["inspect", "--help"]).stdout
    assert "posttrain inspect 3f2a9c --step 12" in shown and "--what-if" in shown
    assert PluginManager().find("policy_loss", "ppo_clip")  # which the help speaks of
