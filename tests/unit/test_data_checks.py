"""Texts that `validate` checks before a run: lengths with environments, and right answers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.core.contracts import Reward, Task
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.rewards.checking import unreadable_references
from posttrain.core.rewards.weighted import WeightedReward
from posttrain.core.types import TASK, Problem
from posttrain.pipelines.cli.main import app
from posttrain.pipelines.run.checks import resolve_configs
from posttrain.pipelines.run.data_checks import check_texts
from tests.helpers.pipeline import write_config
from tests.helpers.plugins import MANAGER

Values = dict[str, Any]  # nested YAML values
SHORT: Values = {"max_response_length": 16}
RL: Values = {
    "kind": "rl",
    "inputs": {"model": "base"},
    "algorithm": "grpo",
    "steps": 2,
    "prompts_per_step": 4,
    "generation": SHORT,
    "rewards": ["accuracy"],
}
TOOLS: Values = {"name": "tools", "max_turns": 2, "max_observation_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def checked(
    folder: Path, model: Path, stages: Values, task: Any = "arithmetic", **more: Any
) -> Any:
    values = {
        "model": {"source": str(model), "max_model_len": 256, **more},
        "engine": "transformers",
        "task": task,
        "evaluation": {"num_problems": 4, "max_response_length": 16},
        "stages": stages,
    }
    resolved, manager = resolve_configs([write_config(folder / "run.yaml", values)], None)
    section = resolved.config.task
    built: Task[Any] = manager.build(Task, section.name, section.fields())
    return check_texts(resolved, manager, built, folder)


def test_prompts_that_several_stages_ask_are_encoded_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    encode = ChatTokenizer.encode_prompt

    def counted(tokenizer: ChatTokenizer, problem: Problem) -> tuple[int, ...]:
        asked.append(problem.key)
        return encode(tokenizer, problem)

    monkeypatch.setattr(ChatTokenizer, "encode_prompt", counted)
    see = {"kind": "evaluate", "inputs": {"model": "base"}}
    stages = {"before": see, "rl": {**RL, "steps": 40}, "after": see}
    assert checked(tmp_path, model, stages).warnings == []
    assert len(asked) == len(set(asked)) > 4


@pytest.mark.parametrize(
    ("stages", "rows"),
    [
        ({"rl": RL}, ""),
        ({"rl": {**RL, "environment": TOOLS}}, "prompts with their response"),
        ({"see": {"kind": "evaluate", "inputs": {"model": "base"}}}, ""),
        (
            {"see": {"kind": "evaluate", "inputs": {"model": "base"}, "environment": TOOLS}},
            "held-out prompts with their response",
        ),
    ],
)
def test_prompts_are_counted_with_the_instructions_of_their_environment(
    stages: Values, rows: str, model: Path, tmp_path: Path
) -> None:
    if not rows:
        assert checked(tmp_path, model, stages).warnings == []
        return
    with pytest.raises(
        DataError, match=rf"^stages\.\w+: [48] of [48] {rows} are too long, .*none is l"
    ):
        checked(tmp_path, model, stages)
    assert "are too long" in checked(tmp_path, model, stages, overlong="truncate").warnings[0]


def test_the_samples_of_a_preference_stage_and_examples_of_ptx_are_counted(
    model: Path, tmp_path: Path
) -> None:
    dpo = {"kind": "preference", "algorithm": "dpo", "inputs": {"model": "base"}}
    own = {**dpo, "generation": {"max_response_length": 250}, "num_prompts": 8}
    with pytest.raises(DataError, match=r"^stages.dpo: 8 of 8 prompts with their response are too"):
        checked(tmp_path, model, {"dpo": own})
    examples = tmp_path / "examples.jsonl"
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "x", "completion": "y" * 300}]
    examples.write_text("\n".join(map(json.dumps, rows)))
    ptx = {**RL, "algorithm": "ppo_ptx", "critic": {}, "ptx": {"path": str(examples)}}
    found = checked(tmp_path, model, {"rl": ptx})
    assert "1 of 2 examples of the term ptx are too long" in found.warnings[0]


def test_data_that_a_stage_makes_are_checked_when_they_are_made(
    model: Path, tmp_path: Path
) -> None:
    make = {
        "kind": "transform",
        "inputs": {"model": "base"},
        "num_problems": 4,
        "generation": SHORT,
    }
    stages = {"make": make, "rl": {**RL, "inputs": {"model": "base", "dataset": "make"}}}
    found = checked(tmp_path, model, stages)
    assert found.notes == [
        "stages.rl: stage 'make' makes its data: their lengths are checked when rl starts"
    ]


def test_a_light_tokenizer_counts_the_same_tokens(model: Path) -> None:
    light, whole = (ChatTokenizer.load(model, "Be brief.", light=one) for one in (True, False))
    problem = Problem("k", "What is 2 + 2?\n\n<|im_end|> \u00e9", "4", "4", {})
    assert light.encode_prompt(problem) == whole.encode_prompt(problem)
    assert light.encode_response("4 ") == whole.encode_response("4 ")
    assert light.end_token_ids == whole.end_token_ids


def jsonl(folder: Path, answers: list[str]) -> Values:
    path = folder / "problems.jsonl"
    rows = [{"prompt": f"Question {i}?", "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"name": "jsonl", "path": str(path), "match": "exact", "held_out_permille": 300}


def test_right_answers_that_a_reward_cannot_read_are_counted(model: Path, tmp_path: Path) -> None:
    stage = {**RL, "rewards": ["math_accuracy"], "steps": 20}
    readable = ["1/2", "\\sqrt{2}", "(1, 2)", "10^6", "x+1", "ff_{16}", "3 apples"] * 3
    assert checked(tmp_path, model, {"rl": stage}, jsonl(tmp_path, readable)).warnings == []
    some = [*readable, *["\\frac{1}{"] * 9]
    (warning,) = checked(tmp_path, model, {"rl": stage}, jsonl(tmp_path, some)).warnings
    assert "reward 'math_accuracy' cannot read the right answers of " in warning
    assert "such as that of 'Question " in warning and "\\\\frac{1}{" in warning
    assert warning.endswith("responses to them are not scored")
    with pytest.raises(DataError, match=r"^stages.rl: reward .* correct the data, or choose anoth"):
        checked(tmp_path, model, {"rl": stage}, jsonl(tmp_path, ["\\frac{1}{"] * 12))


@pytest.mark.parametrize(
    ("name", "fields", "metadata", "answer"),
    [
        ("math_accuracy", {}, {}, " "),
        ("exact_match", {}, {}, ""),
        ("code_tests", {}, {"tests": "["}, "4"),
        ("json_schema", {"metadata_key": "schema"}, {"schema": '{"type": 3}'}, "4"),
        ("tool_call", {"metadata_key": "tools"}, {"tools": "[3]"}, "4"),
    ],
)
def test_every_reward_that_reads_a_reference_says_whether_it_can(
    name: str, fields: Values, metadata: dict[str, str], answer: str
) -> None:
    reward: Reward[Any] = MANAGER.build(Reward, name, fields)
    wrong = Problem("a", "p", answer, "", metadata)
    good = Problem("b", "q", "4", "", {"tests": '["assert f() == 1"]'})
    assert reward.unreadable(good) == "" and reward.unreadable(wrong)
    (sentence,) = unreadable_references([WeightedReward(reward, 1.0, "own")], [wrong, good, wrong])
    assert sentence.startswith("reward 'own' cannot read the right answers of 1 of 2 problems")
    theirs = [replace(p, metadata={**p.metadata, TASK: t}) for p, t in ((wrong, "a"), (good, "b"))]
    assert not unreadable_references([WeightedReward(reward, 1.0, "own", tasks=("b",))], theirs)


def test_validate_shows_what_it_found(model: Path, tmp_path: Path) -> None:
    make = {
        "kind": "transform",
        "inputs": {"model": "base"},
        "num_problems": 4,
        "generation": SHORT,
    }
    values = {
        "model": {"source": str(model), "max_model_len": 256, "overlong": "truncate"},
        "task": "arithmetic",
        "evaluation": {"num_problems": 4, "max_response_length": 16},
        "stages": {
            "make": make,
            "sft": {"kind": "sft", "inputs": {"model": "base", "dataset": "make"}},
            "see": {"kind": "evaluate", "inputs": {"model": "sft"}, "environment": TOOLS},
        },
    }
    path = write_config(tmp_path / "run.yaml", values)
    result = CliRunner().invoke(app, ["validate", str(path), "--home", str(tmp_path / "home")])
    assert result.exit_code == 0, result.output
    assert "note: stages.sft: stage 'make' makes its data" in result.output
    assert "warning: stages.see: 4 of 4 held-out prompts" in result.output


def test_validate_says_nothing_but_its_own_lines(model: Path, tmp_path: Path) -> None:
    """No bars of libraries while it loads the model, no notes of theirs about long rows."""
    long = {"prompt": "Say yes.", "completion": "yes " * 600}
    rows = [*({"prompt": f"Say {i}.", "completion": str(i)} for i in range(8)), long]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "a.yaml"
    path.write_text(
        f"model: {{source: {model}, dtype: float32}}\n"
        "stages: {sft: {kind: sft, inputs: {model: base}, data: rows.jsonl}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.pipelines.cli", "validate", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 9 rows of rows.jsonl" in done.stdout + done.stderr
    assert "%|" not in done.stderr and "transformers" not in done.stderr, done.stderr
