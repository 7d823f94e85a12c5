"""Bad input through the real command: an exit code, one clear message, nothing left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from posttrain.core.models.tiny import make_tiny_model
from posttrain.pipelines.cli.main import app

GOOD = """\
task: {name: arithmetic}
stages:
  sft:
    kind: sft
    inputs: {model: base}
"""
JSONL = GOOD.replace("{name: arithmetic}", "{name: jsonl, path: %s}")


def refused(folder: Path, arguments: Sequence[str], code: int) -> str:
    """Run the command in this process; the one message it printed."""
    home, before = folder / "home", set(psutil.Process().children())
    result = CliRunner().invoke(app, [*arguments, "--home", str(home)])
    assert set(psutil.Process().children()) == before, "Prefect's server ends with the refusal"
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.count("error: ") == 1
    assert result.stderr.startswith("error: ")
    assert not home.exists()
    return result.stderr.removeprefix("error: ").rstrip("\n")


def write(folder: Path, text: str) -> str:
    path = folder / "a.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("command", ["run", "validate", "plan"])
@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("    stpes: 3\n", "a.yaml:6: stages.sft.stpes: unknown field of stages.sft"),
        ("    steps: many\n", "a.yaml:6: stages.sft.steps: must be a valid integer"),
        ("    steps: 3\n    steps: 4\n", "a.yaml:7: stages.sft.steps is written twice"),
        ("engine: trnsformers\n", "did you mean 'transformers'?"),
        ("  b: {kind: sft, inputs: {model: c}}\n  c: {kind: sft, inputs: {model: b}}\n", "b reads"),
    ],
)
def test_a_mistake_in_the_file_is_code_2_for_every_command(
    tmp_path: Path, command: str, extra: str, says: str
) -> None:
    reported = refused(tmp_path, [command, write(tmp_path, GOOD + extra)], 2)
    assert says in reported
    assert "\n" not in reported


SWEPT = """\
  evaluate: {kind: evaluate, inputs: {model: sft}}
variants: {named: {a: {set: {stages.sft.steps: 3}}}}
"""


@pytest.mark.parametrize("place", ["", "artifacts", "runs", "mlflow", "checkpoints"])
@pytest.mark.parametrize(
    "command",
    [["run"], ["validate"], ["plan", "--no-calibration"], ["sweep", "--dry-run"], ["doctor"]],
    ids=" ".join,
)
def test_a_file_where_a_folder_is_to_be_is_code_4_for_every_command(
    tmp_path: Path, command: list[str], place: str
) -> None:
    home = tmp_path / "home"
    file = home / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    config = [] if command == ["doctor"] else [write(tmp_path, GOOD + SWEPT)]
    result = CliRunner().invoke(app, [*command, *config, "--home", str(home)])
    assert (result.exit_code, file.read_text()) == (4, "mine"), result.output
    says = f"cannot make the folder {file}: File exists; choose another --home or --store"
    if command == ["doctor"]:
        assert result.output.startswith(f"home: {says}")
    else:
        assert result.stderr.rstrip("\n").split("error: ")[1:] == [says]


def test_an_unknown_plugin_offers_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("arithmetic", "arithmetc"))
    reported = refused(tmp_path, ["run", path], 2)
    assert "a.yaml:1: task: no task named 'arithmetc'; did you mean 'arithmetic'?" in reported


def test_a_missing_config_file_offers_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    reported = refused(tmp_path, ["run", str(tmp_path / "aa.yaml")], 2)
    assert "did you mean 'a.yaml'?" in reported


def test_a_bad_override_is_code_2(tmp_path: Path) -> None:
    arguments = ["run", write(tmp_path, GOOD), "--set", "stages.sft.steps=0"]
    assert "stages.sft.steps: must be greater than or equal to 1" in refused(tmp_path, arguments, 2)


@pytest.mark.parametrize("command", ["run", "validate"])
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (None, "cannot read"),
        ("", "has no rows"),
        ('{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+2?"}\n', "data.jsonl:2 has no field"),
        ('{"prompt": "1+1?", "answer"\n', "data.jsonl:1 is not JSON"),
    ],
)
def test_bad_data_are_code_3_before_anything_runs(
    tmp_path: Path, command: str, rows: str | None, says: str
) -> None:
    data = tmp_path / "data.jsonl"
    if rows is not None:
        data.write_text(rows)
    reported = refused(tmp_path, [command, write(tmp_path, JSONL % data)], 3)
    assert says in reported
    assert "\n" not in reported


@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_model_directory_without_weights_is_code_4(tmp_path: Path, command: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = write(tmp_path, GOOD + f"model: {{source: {model}}}\n")
    assert "has no weights" in refused(tmp_path, [command, path], 4)


def test_a_disk_without_space_is_code_4_before_anything_is_written(tmp_path: Path) -> None:
    reserve = ["--set", "limits.min_free_gb=1000000"]
    reported = refused(tmp_path, ["run", write(tmp_path, GOOD), *reserve], 4)
    assert "not enough disk space for a run" in reported
    assert "--home" in reported


def test_a_port_in_use_is_code_4_and_names_port_and_option(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        reported = refused(
            tmp_path, ["ui", "--check", "--no-prefect", "--mlflow-port", str(port)], 4
        )
    assert f"port {port} for MLflow cannot be used" in reported
    assert "--mlflow-port" in reported


def test_an_unknown_plugin_name_or_kind_is_code_2(tmp_path: Path) -> None:
    assert "did you mean 'grpo'?" in refused(tmp_path, ["plugins", "show", "grppo"], 2)
    reported = refused(tmp_path, ["plugins", "list", "--kind", "rewad"], 2)
    assert "did you mean 'reward'?" in reported
    for command in ("show", "check"):
        reported = refused(tmp_path, ["plugins", command, "reward"], 2)
        assert "a kind of plugin: `posttrain plugins list --kind reward`" in reported


def test_with_json_the_last_line_of_stdout_tells_the_error(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "wrong: 1\n")
    result = CliRunner().invoke(app, ["run", path, "--json", "--home", str(tmp_path / "home")])
    reported = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == reported["exit_code"] == 2
    assert reported["status"] == "error" and "wrong: unknown field of a run" in reported["error"]


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [(["run"], GOOD + "wrong: 1\n", 2), (["validate"], JSONL % "none.jsonl", 3), ([], None, 2)],
)
def test_the_installed_command_ends_with_the_same_codes(
    tmp_path: Path, arguments: list[str], text: str | None, code: int
) -> None:
    given = [*arguments, write(tmp_path, text)] if text else ["run", "--no-such-option"]
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.pipelines.cli", *given],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".posttrain").exists()


def test_with_debug_the_traceback_shows(tmp_path: Path) -> None:
    # The boundary prints to the process's own stderr, as Python does.
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.pipelines.cli", "validate", "none", "--debug"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "error: no config file none" in done.stderr


@pytest.mark.parametrize("command", ["run", "validate", "plan"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MLFLOW_TRACKING_URI", "http://[::1"),
        ("MLFLOW_TRACKING_URI", "http://"),
        ("PREFECT_API_URL", "http://[::1"),
        ("PREFECT_API_URL", "http://server:port/api"),
        ("PREFECT_API_URL", "localhost:4200/api"),
        ("HF_ENDPOINT", "http://[::1"),
        ("https_proxy", "http://[::1"),
    ],
)
def test_an_address_in_the_environment_that_is_none_is_refused_by_the_name_of_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    reported = refused(tmp_path, [command, write(tmp_path, GOOD)], 2)
    assert reported.startswith(f"{variable} is '{value}', which is not an address: correct it")


def test_a_setting_that_prefect_refuses_is_refused_by_its_name(tmp_path: Path) -> None:
    """In a process of its own: Prefect reads its settings once."""
    home = tmp_path / "home"
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.pipelines.cli", "run", write(tmp_path, GOOD)],
        env=os.environ | {"POSTTRAIN_HOME": str(home), "PREFECT_API_REQUEST_TIMEOUT": "soon"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: PREFECT_API_REQUEST_TIMEOUT is 'soon', which Prefect ")
    assert done.stderr.count("\n") == 1
    assert not home.exists()


@pytest.mark.parametrize("out", ["", "/"])
def test_a_folder_is_no_file_to_write(tmp_path: Path, out: str) -> None:
    assert "Is a directory" in refused(tmp_path, ["schema", "--out", out], 4)


def test_a_question_without_anybody_to_answer_says_what_to_do(tmp_path: Path) -> None:
    assert "--yes" in refused(tmp_path, ["init", str(tmp_path / "new")], 2)
    assert not (tmp_path / "new").exists()


def test_bytes_that_are_no_text_are_refused_where_text_is_written(tmp_path: Path) -> None:
    model, out = make_tiny_model(tmp_path / "model"), tmp_path / "out"
    arguments = ["export", str(model), str(out), "--name", "a\udcff"]
    assert "is not UTF-8 text" in refused(tmp_path, arguments, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    for option in ("--prompt", "--system", "--stop"):
        assert "is not UTF-8 text" in refused(tmp_path, ["chat", str(model), option, "\udcff"], 2)


@pytest.mark.parametrize("model", ["ab12cd34/", "a b/c", "/ab12cd34"])
def test_what_names_no_model_of_a_hub_is_not_asked_for(tmp_path: Path, model: str) -> None:
    code = 2 if model.startswith("/") else 4
    assert f"'{model}'" in refused(tmp_path, ["export", model, str(tmp_path / "out")], code)


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in `folder`, in which $P is the command."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        cwd=folder,
        env=os.environ | {"P": f"{sys.executable} -m posttrain.pipelines.cli"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("$P schema | head -c 5", 1, ""),
        pytest.param(
            "$P show stage rl --json | true", 1, "", marks=pytest.mark.slow
        ),  # `head` may read all before it ends
        pytest.param("$P plugins list >&-", 0, "", marks=pytest.mark.slow),
        ("$P plugins show nope 2>&-", 2, ""),
        pytest.param("$P plugins show nope <&-", 2, "no plugin", marks=pytest.mark.slow),
        ("PYTHONIOENCODING=ascii $P plugins list", 0, ""),
        ("$P schema >/dev/full", 4, "the disk is full"),
        pytest.param(
            "$P show stage rl --json >/dev/full", 4, "the disk is full", marks=pytest.mark.slow
        ),
        ("mkdir gone; cd gone; rmdir ../gone; $P plan quickstart", 4, "directory was removed"),
    ],
)
def test_a_process_without_its_streams_or_folder_is_no_bug(
    tmp_path: Path, line: str, code: int, says: str
) -> None:
    done = shell(tmp_path, line)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == bool(says), done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
