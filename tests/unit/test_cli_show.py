"""`posttrain show` and completion: what a config can hold, and what the shell offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from posttrain.core.config.loading import shipped_configs
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.stage_kinds import sections, stage_configs
from posttrain.core.contracts import CONTRACTS
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.main import app
from posttrain.pipelines.cli.show import stage_example


def show(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["show", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_without_a_name_all_kinds_and_sections_are_listed(manager: PluginManager) -> None:
    text = show()
    assert all(f"\n  {kind} " in text for kind in stage_configs(manager))
    assert all(f"\n  {name} " in text for name in sections(manager))


def test_a_stage_shows_inputs_fields_bounds_meaning_and_an_example() -> None:
    text = show("stage", "rl")
    assert "  reads model: a model\n" in text and "  may read dataset: a dataset\n" in text
    assert "  makes a model\n" in text
    assert (
        "  num_generations (int, default 8, >= 1, <= 1,000,000): responses per prompt (group size)"
        in text
    )
    assert "  sampler (sampler plugin, default group)" in text
    assert "example (from quickstart):" in text
    found = json.loads(show("stage", "rl", "--json").splitlines()[-1])
    assert {field["name"] for field in found["fields"]} == RlStage.model_fields.keys() - {
        "kind",
        "inputs",
    }


def test_every_kind_has_an_example_that_is_right(manager: PluginManager) -> None:
    for kind, stage in stage_configs(manager).items():
        example, name = stage_example(kind, stage)
        (values,) = yaml.safe_load(example).values()
        assert stage.model_validate(values).inputs.keys() >= stage.reads.keys()
        without = ("transform", "approve", "benchmark", "process_reward_model", "record_teacher")
        assert (name == "") == (kind in without)
        if name:
            assert example.splitlines()[0] in shipped_configs()[name].read_text()


def test_a_section_shows_its_fields_and_places_and_an_unknown_name_the_nearest() -> None:
    text = show("section", "optimizer")
    assert "learning_rate (float, default 1e-05, > 0, <= 1)" in text and "weight_decay" in text
    assert text.count("stages.<rl>.optimizer") == 1 and "stages.<rl>.critic.optimizer" in text
    assert "did you mean 'model'?" in show("section", "modle", code=2)
    assert "did you mean 'sft'?" in show("stage", "stf", code=2)


def test_the_names_that_the_shell_offers_are_those_that_there_are(manager: PluginManager) -> None:
    installed = {entry.name for entry in manager.entries() if entry.package == "posttrain"}
    assert set(complete.plugins("")) == installed
    assert set(complete.plugin_kinds("")) == set(CONTRACTS)
    assert set(complete.kinds("")) == set(stage_configs(manager))
    assert set(complete.sections("")) == set(sections(manager))
    assert set(shipped_configs()) <= set(complete.configs(""))


def test_configs_files_and_folders_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").touch()
    (tmp_path / "quick.txt").touch()
    (tmp_path / "quiet").mkdir()
    assert complete.configs("qui") == ["quickstart", "quick.yaml", "quiet/"]
    assert complete.configs("missing/") == []


COMMAND = "from posttrain.pipelines.cli.main import app; app(prog_name='posttrain')"


def offered(line: str, cwd: Path) -> list[str]:
    """What bash offers at the end of the line."""
    words = line.split(" ")
    variables = {
        "_POSTTRAIN_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | variables,
        timeout=60,
    )
    return done.stdout.split()


def test_bash_is_offered_runs_and_their_stages(tmp_path: Path) -> None:
    for name, stages in (("aa11", "sft: 1"), ("bb22", "rl: 1")):
        folder = tmp_path / ".posttrain" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"name: x\nstages:\n  {stages}\n  both: 2\nz: 3\n")
    assert offered("posttrain inspect a", tmp_path) == ["aa11"]
    assert offered("posttrain inspect bb22 --stage ", tmp_path) == ["both", "rl"]
    assert offered("posttrain show stage re", tmp_path) == [
        "record_teacher",
        "register",
        "reward_model",
    ]


def test_a_completion_loads_nothing_heavy() -> None:
    code = (
        "import sys; from posttrain.pipelines.cli import complete, main; complete.plugins('');"
        "print({'torch', 'transformers', 'mlflow', 'prefect', 'httpx'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("what", "name", "command"),
    [
        ("section", "environment", "posttrain plugins list --kind environment names them"),
        ("section", "grpo", "posttrain plugins show grpo"),
        ("section", "rl", "posttrain show stage rl"),
        ("stage", "model", "posttrain show section model"),
        ("stage", "reward", "posttrain plugins list --kind reward names them"),
        ("stage", "ppo_clip", "posttrain plugins show ppo_clip"),
    ],
)
def test_what_is_something_else_is_named_with_the_command_that_shows_it(
    what: str, name: str, command: str
) -> None:
    text = show(what, name, code=2)
    assert command in text and "did you mean" not in text
