"""Tasks of rows with messages: verl's Parquet, TRL's sets, dotted fields, tools, verifiers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet

from posttrain.core.config.base import Component
from posttrain.core.contracts import PromptGroup, Task
from posttrain.core.data.cursor import row_digest
from posttrain.core.data.overview import taken_for
from posttrain.core.data.problem_sets import problems_digest, read_problems
from posttrain.core.data.problems import problem_from_json, problem_to_json
from posttrain.core.data.row_task import RowConfig, problem_of
from posttrain.core.data.verifiers import verdict, verifier_of
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.episodes import prompt_from_json, prompt_to_json
from posttrain.core.runtime.json_files import JsonRow
from posttrain.core.types import Message, Problem, ToolCall

MANAGER = PluginManager()
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}


def build(path: Path, name: str = "rows", **fields: object) -> Task[Any]:
    return MANAGER.build(Task, name, {"path": str(path), **fields})


def everything(task: Task[Any]) -> dict[str, Problem]:
    """Every problem by its prompt's last line."""
    found = {}
    for split in ("train", "held_out"):
        count = task.available(split) or 0  # type: ignore[arg-type]
        for problem in task.problems(split, count, 0):  # type: ignore[arg-type]
            found[problem.prompt.split("\n")[-1]] = problem
    return found


def verl_row(index: int, source: str = "openai/gsm8k", answer: object = None) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"What is {index} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer or str(index + 1)},
        "extra_info": {"split": "train", "index": index, "question": f"{index} + 1"},
    }


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    rows = [verl_row(i) for i in range(40)]
    rows[3] = verl_row(3, "DigitalLearningGmbH/MATH-lighteval", r"\frac{1}{2}")
    rows[4]["prompt"] = [
        {"role": "system", "content": "Be brief."},
        *rows[4]["prompt"],
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_the_fields_of_verl_s_rows_can_be_others(verl: Path) -> None:
    for name in ("rows", "parquet"):
        problems = everything(build(verl, name, prompt_field="extra_info.question"))
        assert problems["7 + 1"].answer == "8" and problems["7 + 1"].metadata["index"] == "7"
        bare = everything(build(verl, name, answer_field=None))
        assert {p.answer for p in bare.values()} == {""}


@pytest.mark.parametrize("name", ["rows", "parquet"])
def test_verl_s_parquet_is_read_as_it_is(verl: Path, name: str) -> None:
    problems = everything(build(verl, name))
    assert len(problems) == 40
    sum_, half = problems["What is 7 + 1?"], problems["What is 3 + 1?"]
    assert sum_.answer == "8" and sum_.prompt == "What is 7 + 1?" == sum_.key
    assert sum_.metadata["data_source"] == "openai/gsm8k" and sum_.metadata["index"] == "7"
    assert sum_.metadata["source"].endswith("train.parquet:8")
    task = build(verl, name)
    assert task.verify(sum_, "2 + 2 is #### 8\nI had 3.").correct == 1.0
    assert task.verify(sum_, "7").correct == 0.0
    assert task.verify(half, r"so \boxed{0.5}").correct == 1.0
    assert task.verify(half, r"so \boxed{2}").correct == 0.0
    brief = problems["user: What is 4 + 1?"]
    assert brief.messages == (Message("system", "Be brief."), Message("user", "What is 4 + 1?"))
    assert task.unjudged() == ""  # type: ignore[attr-defined]


def test_verl_s_rows_are_the_same_in_every_kind_of_file(verl: Path, tmp_path: Path) -> None:
    table = parquet.read_table(verl)
    feather.write_feather(table, tmp_path / "a.feather")
    rows = table.to_pylist()
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        nested = [
            {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows
        ]
        writer.writerows(nested)
    digests = {
        problems_digest(list(everything(build(tmp_path / name)).values()))
        for name in ("a.feather", "a.json", "a.csv", "train.parquet")
    }
    assert len(digests) == 1


def test_a_data_source_without_a_verifier_is_refused_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [verl_row(0), verl_row(1, "my/words", "two words")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(
        DataError,
        match=r"a.parquet:2: no verifier is known for the data_source 'my/words', .*: set "
        r"task.verifiers to \{my/words: exact\}, or to \{default: exact\}",
    ):
        build(path)
    for verifiers in ({"my/words": "exact"}, {"my/*": "exact"}, {"default": "exact"}):
        task = build(path, verifiers=verifiers)
        problem = everything(task)["What is 1 + 1?"]
        assert task.verify(problem, " two words\n").correct == 1.0
        assert task.verify(problem, "two words.").correct == 0.0
    with pytest.raises(DataError, match=r"a.parquet:2: field 'reward_model.ground_truth' is 'two "):
        build(path, verifiers={"my/words": "last_number"})
    del rows[1]["data_source"]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"b.json:2 has no field 'data_source'"):
        build(tmp_path / "b.json")


def test_programs_keep_their_tests_and_have_no_verdict(tmp_path: Path) -> None:
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    rows = [verl_row(0, "codecontests", json.dumps(tests)), verl_row(1)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    task = build(tmp_path / "a.json")
    problem = everything(task)["What is 0 + 1?"]
    assert json.loads(problem.metadata["tests"]) == tests
    assert task.verify(problem, problem.answer).parsed is None
    assert task.unjudged().endswith("a.json:1")  # type: ignore[attr-defined]


def test_images_and_answers_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for change, message in (
        ({"images": [{"bytes": "x"}]}, r"a.json:1 has 'images', expected text only"),
        (
            {"reward_model": {"ground_truth": ["a", "b"]}},
            r"field 'reward_model.ground_truth' is \['a', 'b'\] \(list\), .*ground_truth.0",
        ),
        ({"prompt": []}, r"a.json:1, 'prompt' is \[\] \(list\), expected a non-empty list"),
        ({"prompt": [{"role": "usr", "content": "a"}]}, r"message 0, has the role 'usr' .*'user'"),
        ({"prompt": [{"role": "system", "content": "a"}]}, r"'prompt' ends with a system message"),
    ):
        path.write_text(json.dumps([verl_row(0) | change]))
        with pytest.raises(DataError, match=message):
            build(path)
    path.write_text(json.dumps([verl_row(0, answer=["x", "7"])]))
    task = build(path, format="trl", answer_field="reward_model.ground_truth.1")
    assert [p.answer for p in everything(task).values()] == ["7"]


def test_trl_s_sets_are_read_with_and_without_answers(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "1 + 1?"}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": chat, "solution": r"It is $\boxed{2}$."}) + "\n")
    task = build(path, match="math")
    (problem,) = everything(task).values()
    assert problem.messages[0] == Message("system", "Hi.") and problem.tools == ()
    assert problem.prompt == "system: Hi.\nuser: 1 + 1?"
    assert task.verify(problem, "2").correct == 1.0

    path.write_text(json.dumps({"prompt": chat}) + "\n")
    task = build(path)
    (problem,) = everything(task).values()
    assert (problem.answer, problem.worked) == ("", "")
    assert task.verify(problem, "2").correct == 0.0
    assert task.unjudged() == f"{path}:1"  # type: ignore[attr-defined]

    path.write_text(json.dumps({"prompt": "1 + 1?"}) + "\n")
    for fields in ({"format": "trl"}, {"answer_field": None}):
        assert len(everything(build(path, **fields))) == 1
    with pytest.raises(DataError, match=r"a.jsonl:1 has no field 'answer', .* answer_field: null"):
        build(path)
    path.write_text(json.dumps({"messages": [*chat, {"role": "assistant", "content": "2"}]}))
    with pytest.raises(DataError, match=r"'messages' ends with the assistant's answer"):
        build(path, prompt_field="messages")


def test_dotted_names_tools_and_turns_reach_the_problem(tmp_path: Path) -> None:
    row = {
        "input": {
            "turns": [
                [
                    {"role": "user", "content": "2 + 3?"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
                    },
                    {"role": "tool", "name": "add", "content": "5"},
                ]
            ]
        },
        "target": {"values": [4, 5]},
        "functions": json.dumps([TOOL]),
        "level": 3,
    }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    fields = {
        "prompt_field": "input.turns.0",
        "answer_field": "target.values.1",
        "tools_field": "functions",
        "metadata_fields": ["level", "target.values"],
    }
    for name in ("jsonl", "rows"):
        (problem,) = everything(build(path, name, **fields)).values()
        assert problem.answer == "5" and problem.tools == (TOOL,)
        assert problem.messages[1].tool_calls == (ToolCall("add", {"a": 2}),)
        assert problem.messages[2] == Message("tool", "5", name="add")
        assert problem.metadata["level"] == "3" and problem.metadata["target.values"] == "[4, 5]"
        assert problem.key.startswith('tools: [{"function"') and "tool: 5" in problem.key
    with pytest.raises(DataError, match=r"has no field 'target.value', 'target' is \{'values'"):
        build(path, **(fields | {"answer_field": "target.value"}))
    with pytest.raises(ConfigError, match=r"'match' is a name that the task itself sets"):
        build(path, **(fields | {"metadata_fields": ["match"]}))
    with pytest.raises(DataError, match=r"'functions' is text but not JSON .* task.tools_field"):
        path.write_text(json.dumps(row | {"functions": "[add"}) + "\n")
        build(path, **fields)


def test_one_conversation_with_two_answers_is_refused_and_a_repeated_one_counts_once(
    tmp_path: Path,
) -> None:
    chat = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "A"}]},
        {"role": "human", "content": "B", "name": None},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": p, "answer": 1} for p in (chat, parts)]))
    assert len(everything(build(path))) == 1
    path.write_text(json.dumps([{"prompt": p, "answer": i} for i, p in enumerate((chat, parts))]))
    with pytest.raises(DataError, match=r"a.json:1 and .*a.json:2 give one prompt the answers"):
        build(path)


def test_rows_that_are_left_out_are_counted_with_an_example(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 3}?", "answer": i % 3, "how": f"way {i // 6}"} for i in range(12)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    part = {"name": "rows", "path": str(path), "worked_field": "how", "label": "mine"}
    same, other = MANAGER.task(
        Component.model_validate({"name": "mixture", "tasks": [part]})
    ).notes()
    assert same.startswith("mine: rows that repeat another one and count once: 3 (")
    assert same.endswith(f"{path}:4 repeats {path}:1)")
    assert f"has a worked answer already: 6 ({path}:7 repeats {path}:1)" in other
    path.write_text(json.dumps(rows[:3]))
    assert build(path, worked_field="how").notes() == []


def test_a_message_alone_is_the_problem_that_its_text_is(tmp_path: Path) -> None:
    texts = [{"prompt": f"{i}?", "answer": i} for i in range(30)]
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in texts]
    for name, rows in (("a", texts), ("b", chats)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    first, second = (everything(build(tmp_path / f"{name}.json")) for name in "ab")
    assert list(first) == list(second)
    assert problems_digest(list(first.values())) == problems_digest(list(second.values()))
    # Known values: problems that are texts keep their digests.
    plain = Problem("k", "p", "a", "w", {"source": "x"})
    assert row_digest(plain) == "924a19dd4b979dd2a66ed972ed09900b"
    assert problems_digest([plain]).startswith("e978ef7861343f5dd69bc593d1b4094b")
    assert problem_to_json(plain) == {
        "key": "k",
        "prompt": "p",
        "answer": "a",
        "worked": "w",
        "metadata": {"source": "x"},
    }


FULL = Problem(
    "k",
    "p",
    "a",
    "w",
    {"source": "x"},
    (
        Message("system", "s"),
        Message("user", "u", name="Ann"),
        Message(
            "assistant",
            "",
            (ToolCall("add", {"a": [1, {"b": None}]}, "id1"),),
            reasoning="r",
            malformed=("<x",),
            train=False,
        ),
        Message("tool", "5", tool_call_id="id1"),
    ),
    (TOOL,),
)


def test_messages_and_tools_survive_every_round_trip(tmp_path: Path) -> None:
    assert problem_from_json(json.loads(json.dumps(problem_to_json(FULL)))) == FULL
    group = PromptGroup(FULL, (1, 2))
    assert prompt_from_json(json.loads(json.dumps(prompt_to_json(group)))) == group
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(problem_to_json(FULL) | {"how": "rule"}) + "\n")
    assert read_problems(path) == [FULL]
    path.write_text('{"key": "k", "prompt": "p", "answer": 1, "worked": "w"}\n')
    with pytest.raises(DataError, match=r"problems.jsonl:1 is not a problem \('answer' of a prob"):
        read_problems(path)
    other = Problem("k", "p", "a", "w", messages=(*FULL.messages[:-1], Message("tool", "6")))
    assert len({row_digest(p) for p in (FULL, other, Problem("k", "p", "a", "w"))}) == 3
    assert len({problems_digest([p]) for p in (FULL, other, Problem("k", "p", "a", "w"))}) == 3


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("34", "Answer: 34", True),
        ("34", "**Answer:** no\nAnswer: $34$.", True),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", True),
        ("(1,2)", r"\boxed{(1, 2)}", True),
        ("(1,2)", r"\boxed{[1, 2]}", False),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
        (r"5\text{ cm}", r"\boxed{5}", True),
        (r"50\%", r"\boxed{50}", True),
        ("x^2+1", r"\boxed{x^2 + 1}", True),
        ("3", r"3 or \boxed{3", False),
        ("1", r"\boxed{}", False),
        ("", r"\boxed{}", False),
        ("7", "", False),
        ("7", "x" * 5000, False),
        ("12", r"\boxed{1 2}", False),
        ("6", r"\boxed{6\text{ or more}}", False),
        (r"3\frac{1}{2}", r"\boxed{\frac{3}{2}}", False),
        (r"3\frac{1}{2}", r"\boxed{3.5}", True),
        ("1/0", r"\boxed{1/0}", True),
        ("1/0", r"\boxed{2/0}", False),
    ],
)
def test_math_answers_are_compared_as_values(answer: str, text: str, right: bool) -> None:
    assert verdict("math", answer, text).correct == float(right)


def test_well_known_data_sources_have_verifiers() -> None:
    known = {
        "openai/gsm8k": "final_number",
        "lighteval/MATH": "math",
        "math_dapo": "math",
        "HuggingFaceH4/MATH-500": "math",
        "aime2024": "math",
        "numina_cn_k12": "math",
        "hiyouga/geometry3k": "math",
        "codecontests": "none",
        "searchR1_nq": None,
    }
    assert {name: verifier_of(name, {}) for name in known} == known
    assert verifier_of("openai/gsm8k", {"openai/gsm8k": "exact", "*": "math"}) == "exact"
    assert verifier_of("openai/gsm8k", {"default": "exact"}) == "final_number"


def test_messages_in_cells_of_a_table_of_texts_are_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "A"}, {"role": "user", "content": 'Say "B", please'}]
    for name, row in (("a", [json.dumps(chat), 3]), ("b", ["[1, 2] has how many?", 2])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([["prompt", "answer"], row])
    (second,) = everything(build(tmp_path / "a.csv")).values()
    (first,) = everything(build(tmp_path / "b.csv")).values()
    assert second.messages[0] == Message("system", "A") and second.answer == "3"
    assert first.prompt == "[1, 2] has how many?" and len(first.messages) == 1


def test_rows_of_two_formats_are_refused_with_the_first_two_that_differ(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1 + 1?"}]
    rows = [{"prompt": "0?", "answer": 0}, {"prompt": "2?", "answer": 2}, verl_row(3)]
    path = tmp_path / "a.json"
    for odd, reported in (
        (verl_row(3), "verl \\(prompt in 'prompt', answer in 'reward_model.ground_truth'\\)"),
        ({"prompt": chat}, "trl \\(prompt in 'prompt', no answer\\)"),
        ({"prompt": chat, "answer": 2}, "trl \\(prompt in 'prompt', answer in 'answer'\\)"),
    ):
        path.write_text(json.dumps([*rows[:2], odd]))
        with pytest.raises(
            DataError, match=rf"a.json:1 is plain \(prompt in .* and .*a.json:3 is {reported}, exp"
        ):
            build(path)
    path.write_text(json.dumps([*rows[:2], {"prompt": chat, "answer": None}]))
    with pytest.raises(DataError, match=r"a.json:3: field 'answer' is None"):
        build(path)


def test_gsm8k_s_own_rows_have_their_solution_as_worked_answer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    solution = "48 / 2 = <<48/2=24>>24\n#### 1,024"
    path.write_text(json.dumps({"question": "How many?", "answer": solution}) + "\n")
    task = build(path, prompt_field="question", match="final_number")
    (problem,) = everything(task).values()
    assert (problem.answer, problem.worked) == ("1024", solution)
    assert task.verify(problem, "so #### 1024").correct == 1.0
    path.write_text(json.dumps({"question": "How many?", "answer": "#### many"}) + "\n")
    with pytest.raises(DataError, match=r"a.jsonl:1: field 'answer' is '#### many', expected a n"):
        build(path, prompt_field="question", match="final_number")


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1.5, 10**400, "", " ", "x", "[", "{}", "[[1]]", "\x00", "é" * 3000),
    *([], {}, [[]], [{}], [None], ["x"], {"role": "user"}, {"role": 3}, [{"role": "user"}]),
    *([{"type": "image", "image": "x"}], [{"type": "text", "text": 3}], {"name": {}}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    return [path, *(place for name, item in inner for place in places(item, (*path, name)))]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], odd)
    return copy


def test_any_odd_value_anywhere_in_a_row_is_a_problem_or_an_error_that_names_it() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    whole = verl_row(0) | {
        "tools": [TOOL],
        "prompt": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "1", "name": "add"},
        ],
    }
    config = RowConfig()
    read = refused = 0
    for path in places(whole)[1:]:
        for odd in ODD:
            row = JsonRow("a.json:7", replaced(whole, path, odd))
            for work in (
                lambda row=row: problem_of(row, config, config.layout(row.values)),
                lambda row=row: taken_for(row, "a.json").read(row),
            ):
                try:
                    work()
                    read += 1
                except DataError as error:
                    refused += 1
                    assert "a.json:7" in str(error) and len(str(error)) < 1500, (path, odd)
    assert read > 500 and refused > 500
