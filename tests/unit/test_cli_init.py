"""`posttrain init`: a config for one's own data that `validate` accepts and editors can check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from posttrain.core.config.positions import read_yaml
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.cli.main import app

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": str(n)},
        ]
    }
    for n in range(60)
]
PROBLEMS = [{"question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(60)]
PAIRS = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n)} for n in range(60)]
PROMPTS = [{"prompt": f"Name {n} animals."} for n in range(60)]
DATA = {"chats": CHATS, "problems": PROBLEMS, "pairs": PAIRS, "prompts": PROMPTS}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh working directory with a tiny model in it."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "tiny")
    return tmp_path


def write(name: str) -> str:
    path = Path(f"{name}.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in DATA[name]))  # type: ignore[attr-defined]
    return str(path)


def invoke(*arguments: str, code: int = 0, typed: str = "") -> str:
    done = CliRunner().invoke(app, list(arguments), input=typed)
    assert done.exit_code == code, done.output
    return done.output


def config_in(folder: str | Path) -> dict[str, Any]:
    """The config, which its own schema accepts."""
    values, _ = read_yaml(Path(folder) / "posttrain.yaml")
    schema = json.loads((Path(folder) / "posttrain.schema.json").read_text())
    assert list(jsonschema.Draft7Validator(schema).iter_errors(values)) == []
    return values


@pytest.mark.parametrize(
    ("data", "options", "stages"),
    [
        ("chats", [], ["sft"]),
        ("pairs", [], ["preference"]),
        ("problems", [], ["evaluate_base", "rl", "evaluate", "register"]),
        ("problems", ["--method", "sft+rl", "--length", "long"], None),
        ("problems", ["--method", "dpo"], ["evaluate_base", "preference", "evaluate", "register"]),
        ("prompts", ["--reward", "length_penalty,alpha=0.01"], None),
    ],
)
def test_validate_accepts_what_it_writes(
    folder: Path, data: str, options: list[str], stages: list[str] | None
) -> None:
    file = write(data)
    text = invoke("init", "own", "--model", "tiny", "--data", file, "--yes", *options)
    assert f"{file}: 60 rows" in text and "posttrain run own/posttrain.yaml" in text
    found = config_in("own")
    assert found["name"] == "own" and found["model"]["source"] == "tiny"
    assert stages is None or list(found["stages"]) == stages
    lines = Path("own/posttrain.yaml").read_text().splitlines()
    assert lines[0] == "# yaml-language-server: $schema=posttrain.schema.json"
    assert sum("#" in line for line in lines) > 10
    invoke("validate", "own/posttrain.yaml")


def test_with_yes_alone_it_takes_the_only_data_file_and_its_usual_method(folder: Path) -> None:
    write("pairs")
    invoke("init", "--model", "tiny", "--yes")
    assert config_in(".")["stages"]["preference"]["data"] == "pairs.jsonl"


def test_without_data_it_takes_a_task_that_needs_none(folder: Path) -> None:
    invoke("init", "--model", "tiny", "--method", "sft+rl", "--yes")
    found = config_in(".")
    assert found["task"] == {"name": "arithmetic"} and {"sft", "rl"} <= found["stages"].keys()


def test_questions_are_asked_and_asked_again_after_a_wrong_answer(folder: Path) -> None:
    write("problems")
    typed = "missing-model/\ntiny\n\ngrpo\nrl\nacuracy\nmath_accuracy\nshort\n"
    text = invoke("init", typed=typed)
    assert re.findall(r"^(\d)\. ", text, re.MULTILINE) == list("1123344" + "5")
    assert "no method 'grpo'" in text and "did you mean 'accuracy'?" in text
    assert config_in(".")["stages"]["rl"]["rewards"] == [{"name": "math_accuracy"}]


def test_a_config_that_is_there_is_replaced_only_when_that_is_wanted(folder: Path) -> None:
    Path("posttrain.yaml").write_text("mine")
    assert "exists and stays as it is" in invoke("init", "--model", "tiny", "--yes", code=2)
    assert "exists and stays as it is" in invoke("init", "--model", "tiny", typed="n\n", code=2)
    assert Path("posttrain.yaml").read_text() == "mine"
    invoke("init", "--model", "tiny", "--yes", "--overwrite")
    assert config_in(".")["task"] == {"name": "arithmetic"}


@pytest.mark.parametrize(
    ("data", "options", "code", "says"),
    [
        ("chats", ["--method", "rl"], 2, "holds messages (it has messages), which is data for sft"),
        ("pairs", ["--method", "sft"], 2, "which is data for dpo, not for sft"),
        (
            "prompts",
            [],
            2,
            "hold answers (answer, solution, ground_truth, final_answer, target): rename yours",
        ),
        ("problems", ["--method", "dpo", "--reward", "accuracy"], 2, "--reward goes with"),
        ("problems", ["--length", "longer"], 2, "did you mean 'long'?"),
        (None, ["--data", "arithmetics"], 2, "did you mean 'arithmetic'?"),
        (None, ["--data", "jsonl"], 2, "path: Field required"),
        (None, ["--model", "./nothing"], 4, "nothing"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    folder: Path, data: str | None, options: list[str], code: int, says: str
) -> None:
    given = [] if data is None else ["--data", write(data)]
    model = [] if "--model" in options else ["--model", "tiny"]
    text = invoke("init", "own", *model, *given, "--yes", *options, code=code)
    assert says in text and text.count("\n") == 1
    assert not Path("own").exists()
