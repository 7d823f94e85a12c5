"""Problems that checks find later than the configuration name the line that has the setting."""

from pathlib import Path

import pytest

from posttrain.core.errors import DataError, PosttrainError
from posttrain.pipelines.run.checks import check_inputs, resolve_configs

CONFIG = """\
name: located
model: posttrain/tiny
task: {name: arithmetic}
stages:
  sft: {kind: sft, inputs: {model: base}, steps: 2}
  rl:
    kind: rl
    inputs: {model: sft}
    steps: 2
    rewards:
      - {name: accuracy}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "located.yaml"
    path.write_text(CONFIG)
    return path


def problem_of(config: Path, *overrides: str) -> str:
    with pytest.raises(PosttrainError) as caught:
        check_inputs(*resolve_configs([config], overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        (11, "{name: accuracy}", "{name: accuracy, tasks: [sums]}"),
        (3, "name: arithmetic", "name: rows, path: gone.jsonl"),
        (5, "steps: 2}", "epochs: 1, data: gone.jsonl}"),
        (5, "steps: 2}", "steps: 2, held_out: gone.jsonl}"),
    ],
)
def test_a_problem_names_file_and_line(config: Path, line: int, before: str, after: str) -> None:
    assert before in CONFIG
    config.write_text(CONFIG.replace(before, after))
    assert problem_of(config).startswith(f"{config}:{line}: ")


def test_a_problem_names_the_override_that_made_it(config: Path) -> None:
    said = problem_of(config, "task={name: rows, path: gone.jsonl}")
    assert said.startswith("--set task")
    assert "gone.jsonl" in said


def test_a_problem_of_a_row_keeps_the_rows_place(config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "nobody", "content": "2 + 2?"}]}\n')
    changes = ("steps=null", "epochs=1", f"data={rows}")
    said = problem_of(config, *(f"stages.sft.{change}" for change in changes))
    assert said.startswith(f"{rows}:1,")


def test_the_class_of_the_problem_stays(config: Path) -> None:
    with pytest.raises(DataError) as caught:
        check_inputs(*resolve_configs([config], ["stages.sft.held_out=gone.jsonl"]))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "override",
    [
        "stages.rl.rewards=[{name: accuracyy}]",
        "stages.rl.rewards=accuracyy",
        "stages.rl={kind: rl, inputs: {model: sft}, steps: 2, policy_loss: {name: pppo}}",
    ],
)
def test_what_an_override_says_is_not_laid_on_the_preset(config: Path, override: str) -> None:
    said = problem_of(config, "stages.rl.algorithm=grpo", override)
    assert said.startswith("--set stages.rl") and "did you mean" in said
    assert "set by algorithm" not in said


def test_a_shorthand_in_the_file_is_not_laid_on_the_preset(config: Path) -> None:
    config.write_text(
        CONFIG.replace("    rewards:\n      - {name: accuracy}\n", "    rewards: accuracyy\n")
    )
    said = problem_of(config)
    assert said.startswith(f"{config}:10: ") and "set by algorithm" not in said
