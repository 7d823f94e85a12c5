"""The commands on good input, the boundary that ends them, and the figures of `plan`."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.main import get_command
from typer.testing import CliRunner

from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.estimate.tokens import RunData
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.api.planned import arithmetic
from posttrain.pipelines.cli import doctor
from posttrain.pipelines.cli.common import Boundary, CommandContext, Result, command
from posttrain.pipelines.cli.main import app
from posttrain.pipelines.services.listening import check_port

PIPELINE = """\
task: {name: arithmetic}
stages:
  sft: {kind: sft, inputs: {model: base}}
  rl: {kind: rl, inputs: {model: sft}}
"""


def invoke(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert invoke("--version")[0].startswith("posttrain 0.")


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The names of every command below the group, and of the groups."""
    for name, part in getattr(group, "commands", {}).items():
        yield (*path, name)
        yield from commands(part, (*path, name))


@pytest.mark.parametrize("path", list(commands(get_command(app))), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    assert "Usage: " in invoke(*path, "--help")[0]


def test_commands_have_examples() -> None:
    for name in ("run", "validate", "plan", "ui", "doctor"):
        assert f"posttrain {name}" in invoke(name, "--help")[0]


def test_validate_shows_a_problem_of_each_split_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(PIPELINE)
    home = tmp_path / "home"
    shown, _ = invoke("validate", str(path), "--home", str(home))
    assert "train problem: " in shown and "held_out problem: " in shown
    assert "ok: 2 stages (sft, rl)" in shown
    assert not home.exists()


def test_validate_with_json_puts_only_json_on_stdout(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(PIPELINE)
    shown, text = invoke("validate", str(path), "--json")
    assert json.loads(shown)["order"] == ["sft", "rl"]
    assert "ok: 2 stages" in text


def test_plugins_are_listed_by_kind_with_their_package() -> None:
    shown, _ = invoke("plugins", "list", "--kind", "kl", "--json")
    rows = json.loads(shown.splitlines()[-1])["plugins"]
    assert {row["kind"] for row in rows} == {"kl"}
    assert {"k1", "k2", "k3"} <= {row["name"] for row in rows}
    assert all(row["package"] == "posttrain" and row["summary"] for row in rows)


def test_a_plugin_shows_fields_constraints_source_and_an_algorithm_its_expansion() -> None:
    shown, _ = invoke("plugins", "show", "ppo_clip")
    assert "clip_low (float, default 0.2" in shown and "ppo_clip.py" in shown
    assert "in a config also:\n  coef (" in shown
    shown, _ = invoke("plugins", "show", "grpo")
    assert "advantage 'grpo'" in shown and "algorithm 'grpo'" in shown  # both kinds
    assert "policy_loss:\n  name: ppo_clip" in shown


def test_doctor_finds_versions_plugins_and_a_port_in_use(tmp_path: Path) -> None:
    found = {item.name: item for item in doctor.examine(tmp_path / "home", tmp_path / "store")}
    assert found["python"].status == "ok"
    assert found["torch"].detail == torch.__version__
    assert found["plugins"].status == "ok"
    level = found["sandbox"].detail.split(",")[0]
    assert level == "bubblewrap" or "bubblewrap" in found["sandbox"].fix
    assert all(item.fix for item in found.values() if item.status == "bad")
    assert not (tmp_path / "home").exists()


def test_doctor_says_what_is_wrong_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:s3cr3t-Hunter2@127.0.0.1:9")
    statuses = [item.status for item in doctor.examine(tmp_path, tmp_path / "store")]
    order = ("bad", "warn", "ok")
    assert statuses == sorted(statuses, key=order.index) and statuses[0] == "bad"
    result = CliRunner().invoke(app, ["doctor", "--home", str(tmp_path)])
    assert result.exit_code == 4
    first, *rest = result.output.splitlines()
    assert first == (
        "MLFLOW_TRACKING_URI: http://***@127.0.0.1:9 does not answer; start that server, or unset "
        "MLFLOW_TRACKING_URI"
    )
    assert any(line.startswith("not usable: fix the ") for line in rest)
    assert "s3cr3t-Hunter2" not in result.output


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RunError("stage 'rl' diverged"), 1, "error: stage 'rl' diverged"),
        (ResourceError("no memory"), 4, "error: no memory"),
        (OSError(errno.ENOSPC, "full", "/data/x"), 4, "error: the disk is full at /data/x"),
        (
            OSError(errno.EISDIR, "Is a directory", "/h/x"),
            4,
            "error: cannot use /h/x: Is a directory",
        ),
        (OSError(errno.EACCES, "denied", "/h/x"), 4, "error: cannot use /h/x: denied; correct"),
        (OSError(errno.EEXIST, "File exists", "/h/x"), 4, "error: cannot use /h/x: File exists"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (ValueError("bad\nsecond line"), 1, "error: unexpected ValueError: bad; "),
    ],
)
def test_what_goes_wrong_becomes_one_sentence_and_a_code(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as stopped, Boundary():
        raise error
    assert stopped.value.exit_code == code
    reported = capsys.readouterr().err
    assert reported.startswith(says)
    assert reported.count("\n") == 1


def test_a_bug_leaves_its_traceback_in_a_file_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as stopped, Boundary(log_home=tmp_path):
        raise ZeroDivisionError("here")
    assert stopped.value.exit_code == 1
    (log,) = (tmp_path / "logs").iterdir()
    assert "Traceback" in log.read_text() and "ZeroDivisionError: here" in log.read_text()
    assert str(log) in capsys.readouterr().err


def test_a_command_has_the_common_options_and_its_result_alone_on_stdout(tmp_path: Path) -> None:
    made = typer.Typer()

    @made.command()
    @command(store=True)
    def double(context: CommandContext, number: int, fails: bool = False) -> Result:
        """Twice the number."""
        print("working")
        if fails:
            raise ZeroDivisionError("here")
        context.console().print("done")
        return Result({"twice": 2 * number, "store": context.store}, exit_code=number)

    common = ["--home", str(tmp_path), "--json"]
    result = CliRunner().invoke(made, ["3", *common])
    reported = {"twice": 6, "store": str(tmp_path.resolve() / "artifacts")}
    assert (result.exit_code, json.loads(result.stdout)) == (3, reported)
    assert result.stderr.split() == ["working", "done"]
    result = CliRunner().invoke(made, ["0"])
    assert (result.exit_code, result.stdout.split(), result.stderr) == (0, ["working", "done"], "")
    result = CliRunner().invoke(made, ["3", "--fails", *common])
    assert (result.exit_code, json.loads(result.stdout)["exit_code"]) == (1, 1)
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_the_arithmetic_of_a_stage_is_told_in_words() -> None:
    config = RunConfig.model_validate(
        {"task": "arithmetic", "stages": {"s": {"kind": "sft"}, "r": {"kind": "rl"}}}
    )
    rl = config.stages["r"]
    assert isinstance(rl, RlStage)
    data = RunData(config, PluginManager())
    reported = arithmetic(rl.model_copy(update={"num_mini_batches": 4}), data)
    assert "16 prompts x 8 generations = 128 sequences per step" in reported
    assert "4 mini-batch(es) of 32 = 4 optimizer step(s) per rollout" in reported
    assert "61,440 tokens" in reported


def test_plan_has_figures_for_each_stage_or_none_and_writes_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    path, home = tmp_path / "a.yaml", tmp_path / "home"
    path.write_text(PIPELINE + f"model: {{source: {model}}}\nlimits: {{num_threads: 1}}\n")
    shown, text = invoke("plan", str(path), "--home", str(home), "--json")
    reported = json.loads(shown)
    assert [row["stage"] for row in reported["stages"]] == ["sft", "rl"]
    for row in reported["stages"]:
        rounding = 1e-4 * row["steps"] + 0.01
        assert row["steps"] * row["step_s"] <= row["seconds"] + rounding < 3600
        assert 0 < row["memory_gb"] and 0 < row["disk_gb"] <= row["disk_peak_gb"]
    assert reported["total"]["seconds"] == pytest.approx(
        sum(row["seconds"] for row in reported["stages"]), abs=0.02
    )
    assert reported["calibration"]["training_gflops"] > 0 and "counted" in reported["model"]
    assert "Estimates" in text and "These are estimates, from " in text and "prompts of " in text
    shown, text = invoke("plan", str(path), "--home", str(home), "--json", "--device", "h100")
    assert not json.loads(shown)["calibration"] and "peak rates of one h100" in text
    shown, text = invoke("plan", str(path), "--home", str(home), "--json", "--no-calibration")
    assert "seconds" not in json.loads(shown)["stages"][0] and "Estimates" not in text
    assert not home.exists()


def test_plan_says_when_it_does_not_know_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(PIPELINE + "model: {source: someone/model, fallback: none}\n")
    shown, _ = invoke("plan", str(path), "--home", str(tmp_path / "home"))
    assert "someone/model: its size is not known here, so there are no estimates" in shown


def test_a_port_is_free_once_nothing_listens_on_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} for X"):
            check_port(port, "--x", "X")
    check_port(port, "--x", "X")
