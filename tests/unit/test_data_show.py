"""`posttrain data show`: each format by its columns, what is learned, lengths, problems by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet
from typer.testing import CliRunner

from posttrain.core.kit.tiny import make_tiny_model
from posttrain.pipelines.cli.main import app

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]
ASKED, ANSWER = CHAT[:2], CHAT[2:3]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": ASKED,
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def show(tmp_path: Path, *arguments: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """What people read, and the JSON object."""
    home = tmp_path / "home"
    texts = []
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, ["data", "show", *arguments, "--home", str(home), *more])
        assert done.exit_code == code, done.output
        texts.append(done.stdout)
    assert not home.exists()
    return texts[0], json.loads(texts[1])


def learned(found: dict[str, Any], row: int = 0, side: int = 0) -> list[str]:
    return [t for t, own in found["shown"][row]["conversations"][side]["pieces"] if own]


@pytest.mark.parametrize(
    ("row", "purpose", "form", "expected"),
    [
        ({"messages": CHAT}, "sft", "messages", ["4", "Yes"]),
        ({"messages": [*CHAT[:4], CHAT[4] | {"train": False}]}, "sft", "messages", ["4"]),
        ({"prompt": "2 + 2?", "completion": "4"}, "sft", "prompt_completion", ["4"]),
        ({"prompt": CHAT[:4], "completion": CHAT[4:]}, "sft", "prompt_completion", ["Yes"]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "sft",
            "sharegpt",
            ["b"],
        ),
        ({"instruction": "Add", "input": "2, 2", "output": "4"}, "sft", "alpaca", ["4"]),
        ({"text": "All of it."}, "sft", "text", ["All of it."]),
        (PAIR, "preference", "pairs", ["4"]),
        ({"prompt": "2 + 2?", "completion": "4", "label": True}, "preference", "labelled answers",
         ["4"]),
        ({"prompt": "2?", "response": "4", "score": 3}, "preference", "rated answers", ["4"]),
        (
            {
                "instruction": "2?",
                "completions": [{"response": str(a), "overall_score": a} for a in (1, 4)],
            },
            "preference",
            "scored answers",
            ["4"],
        ),
        ({"chosen": CHAT[:3], "rejected": [*ASKED, ANSWER[0] | {"content": "5"}]}, "preference",
         "pairs with an implicit prompt", ["4"]),
        (VERL, "rl", "verl (prompts with answers)", []),
        ({"prompt": ASKED, "solution": "4"}, "rl", "trl (prompts with answers)", []),
        ({"prompt": ASKED}, "rl", "trl (prompts without answers)", []),
        ({"prompt": "2 + 2?", "answer": 4}, "rl", "plain (prompts with answers)", []),
        ({"question": "2 + 2?", "answer": "so\n#### 4"}, "rl", "plain (prompts with answers)", []),
    ],
)  # fmt: skip
def test_every_format_is_recognised_by_its_columns(
    tmp_path: Path, row: dict[str, Any], purpose: str, form: str, expected: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    text, found = show(tmp_path, str(path))
    assert (found["purpose"], found["format"], found["rows"]) == (purpose, form, 1)
    assert learned(found) == expected
    for part in expected:
        assert f"{{+{part}+}}" in text
    assert f"{path}: {form}, because it has " in text
    assert f"in a config: {found['use']}" in text
    name = "stages: {" if purpose != "rl" else "task: {name: rows, path: "
    assert found["use"].startswith(name)


def test_fields_that_may_be_the_answer_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "2 + 2?", "result": 4, "how": "so"}) + "\n")
    text, _ = show(tmp_path, str(path))
    assert "no answer (of how, result, one may be: name it as task.answer_field)" in text


def test_lengths_duplicates_and_problems_are_reported_by_row(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1?", "answer": i + 1} for i in range(50)]
    rows[7] = {"prompt": "5 + 1?", "answer": 6}
    rows[8] = {"prompt": "5 + 1?", "answer": 7}
    rows[9] = {"prompt": "9 + 1?", "answer": "ten"}
    rows[10] = {"prompt": "10 + 1?", "response": "11"}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    text, found = show(tmp_path, str(path), "--rows", "2", code=3)
    assert found["rows"] == 50 and found["num_problems"] == 3 and len(found["shown"]) == 2
    assert found["duplicates"] == 2
    assert found["duplicate"] == f"{path}:8 repeats {path}:6"
    assert f"{path}:6 and {path}:9 give one prompt the answers '6' and '7'" in text
    assert f"{path}:10: field 'answer' is 'ten', expected a number" in text
    assert f"{path}:1 is of the format plain" in text and "prompt_completion" in text
    assert found["characters"] == {"min": 12, "median": 13, "p95": 13, "max": 13}
    assert found["tokens"] == {} and "tokens are not counted without a model" in text
    assert "answer: 1 (compared by last_number)" in text
    path.write_text(path.read_text()[:-30])
    text, found = show(tmp_path, str(path), code=3)
    assert found["rows"] == 49 and "is not JSON after row 49" in text


def test_a_model_s_tokens_are_shown_and_what_is_too_long_is_counted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny_model(model)
    path = tmp_path / "a.parquet"
    rows = [
        {"messages": CHAT},
        {"messages": [*CHAT[:2], {"role": "assistant", "content": "x" * 299}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    arguments = (str(path), "--model", str(model), "--max-model-len", "200")
    text, found = show(tmp_path, *arguments)
    assert learned(found) == ["4<|im_end|>", "Yes<|im_end|>"]
    assert "{+4<|im_end|>+}" in text and "<|im_start|>system\nBe kind.<|im_end|>" in text
    assert found["left_out"] == 1 and "left out at max_model_len 200: 1 rows" in text
    assert found["tokens"]["max"] > 200 and found["learned_tokens"] == 2 + 4 + 300
    feather.write_feather(pyarrow.Table.from_pylist([VERL]), tmp_path / "b.feather")
    text, found = show(tmp_path, str(tmp_path / "b.feather"), "--model", str(model))
    whole = "".join(part for part, _ in found["shown"][0]["conversations"][0]["pieces"])
    assert whole.endswith("2 + 2?<|im_end|>\n<|im_start|>assistant\n") and learned(found) == []
    tokens = found["tokens"]["max"]
    for room, left_out in ((16, 0), (15, 1)):
        more = ("--max-model-len", str(tokens + room), "--max-response", "16")
        _, found = show(tmp_path, str(tmp_path / "b.feather"), "--model", str(model), *more)
        assert found["left_out"] == left_out
    _, found = show(tmp_path, str(tmp_path / "c.jsonl"), "--model", str(model), code=3)
    assert found["error"].startswith("cannot read")
    (tmp_path / "d.json").write_text(json.dumps([PAIR]))
    _, found = show(tmp_path, str(tmp_path / "d.json"), "--model", str(model))
    assert [learned(found, 0, side) for side in (0, 1)] == [["4<|im_end|>"], ["5<|im_end|>"]]


def test_what_cannot_be_shown_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "label": 2}\n')
    _, found = show(tmp_path, str(path), code=3)
    assert "for RL a row needs a prompt, such as one of prompt, question" in found["error"]
    path.write_text('{"text": "a\\u001b[31m\\u0007"}\n')
    text, _ = show(tmp_path, str(path))
    assert "\x1b" not in text and r"{+a\x1b[31m\x07+}" in text
    _, found = show(tmp_path, str(path), "--model", str(tmp_path / "nothing"), code=4)
    assert "nothing" in found["error"]


def test_colour_is_for_terminals_only_and_can_be_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = CliRunner().invoke(app, ["data", "show", str(path), "--home", str(tmp_path)]).stdout
    assert "\x1b[1;32m4\x1b[0m" in shown and "{+" not in shown
    monkeypatch.setenv("NO_COLOR", "1")
    shown = CliRunner().invoke(app, ["data", "show", str(path), "--home", str(tmp_path)]).stdout
    assert "\x1b" not in shown and "{+4+}" in shown
