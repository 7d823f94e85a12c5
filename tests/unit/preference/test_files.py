"""Files of preferences in the forms of the field: what each is taken for, and what it teaches."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.core.contracts.preference_rows import Kind, PreferenceRow, preference_digest
from posttrain.core.data.preference_files import Pairing, PreferenceFile, read_preference_rows
from posttrain.core.errors import DataError
from posttrain.core.types import Message, ToolCall

ANY: tuple[Kind, ...] = ("pairs", "labels", "completions")
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"name": "add", "parameters": {"type": "object"}}
ADD = {"type": "function", "function": TOOL}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def asked(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


def read(folder: Path, *rows: dict[str, Any], pairing: Pairing = "best_worst") -> PreferenceFile:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_preference_rows(path, "stages.dpo.data", ANY, pairing)


def texts(rows: Sequence[PreferenceRow]) -> list[tuple[str, ...]]:
    return [(row.prompt[-1].content, *row.texts()) for row in rows]


# --- forms ----------------------------------------------------------------------------------------

HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: "
CHAT = [user("Hi"), says("Hello"), user("Why?")]
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
COMPLETIONS = [
    {"response": "b", "overall_score": 3.5, "model": "m"},
    {"response": "a", "overall_score": 8},
    {"response": "c", "overall_score": 1},
]
PAIRS: list[tuple[str, dict[str, Any], tuple[str, str, str], float]] = [
    ("pairs (", {"prompt": "Q", "chosen": "a", "rejected": "b"}, ("Q", "a", "b"), 0),
    ("implicit prompt", {"chosen": "Q a", "rejected": "Q b"}, ("Q", "a", "b"), 0),
    (
        "messages",
        {"chosen": [*CHAT, says("a")], "rejected": [*CHAT, says("b")]},
        ("Why?", "a", "b"),
        0,
    ),
    (  # UltraFeedback, binarized: the prompt as text too, and a score of each answer
        "prompt in 'prompt', messages",
        {
            "prompt": "Q",
            "chosen": [user("Q"), says("a")],
            "rejected": [user("Q"), says("b")],
            "messages": [user("Q"), says("a")],
            "score_chosen": 8.5,
            "score_rejected": 3.0,
        },
        ("Q", "a", "b"),
        5.5,
    ),
    ("scored", {"instruction": "Q", "completions": COMPLETIONS}, ("Q", "a", "c"), 7),
    (
        "scored",
        {"prompt": "Q", "responses": ["b", "a"], "scores": [0.1, 0.9]},
        ("Q", "a", "b"),
        0.8,
    ),
    (  # HelpSteer 2: below 0 the first is better
        "compared",
        {"prompt": "Q", "response_1": "a", "response_2": "b", "preference_strength": -2},
        ("Q", "a", "b"),
        2,
    ),
    ("dialogues", {"chosen": HH + "a", "rejected": HH + "b"}, ("Why?", "a", "b"), 0),
    ("dialogues", {"prompt": HH, "chosen": "a", "rejected": " b"}, ("Why?", "a", "b"), 0),
    ("'question'", {"question": "Q", "chosen": "a", "rejected": "b"}, ("Q", "a", "b"), 0),
    (
        "'conversations'",
        {
            "conversations": [*SHARE, {"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        ("Q", "a", "b"),
        0,
    ),
    (
        "'instruction'",
        {"instruction": "Add", "input": "1 2", "chosen": "a", "rejected": "b", "margin": 1.5},
        ("Add\n1 2", "a", "b"),
        1.5,
    ),
    ("pairs (", {"prompt": "Q", "chosen": "a", "rejected": "b", "tools": None}, ("Q", "a", "b"), 0),
]


@pytest.mark.parametrize(("name", "row", "expected", "margin"), PAIRS)
def test_a_form_is_recognised_by_its_columns_and_named(
    tmp_path: Path, name: str, row: dict[str, Any], expected: tuple[str, ...], margin: float
) -> None:
    found = read(tmp_path, row)
    assert found.kind == "pairs" and name in found.report() and "1 pairs" in found.report()
    assert texts(found.rows) == [expected]
    assert found.rows[0].margin == pytest.approx(margin)
    assert found.rows[0].where.endswith("a.jsonl:1")


def test_the_turns_before_the_answers_are_the_prompt(tmp_path: Path) -> None:
    turns = (asked("Hi"), said("Hello"), asked("Why?"))
    as_text = read(tmp_path, {"chosen": HH + "a", "rejected": HH + "b"}).rows[0]
    as_chat = read(tmp_path, {"chosen": [*CHAT, says("a")], "rejected": [*CHAT, says("b")]}).rows[0]
    assert as_text.prompt == as_chat.prompt == turns and as_text.key == as_chat.key
    system = read(
        tmp_path, {"system": "Be brief.", "question": "Q", "chosen": "a", "rejected": "b"}
    ).rows[0]
    assert system.prompt == (Message("system", "Be brief."), asked("Q"))


def test_a_dialogue_that_goes_on_after_the_same_words_is_told_apart_before_them(
    tmp_path: Path,
) -> None:
    longer = [user("Q"), says("a"), user("More"), says("b")]
    row = read(tmp_path, {"chosen": longer, "rejected": longer[:2]}).rows[0]
    assert row.prompt == (asked("Q"),)
    assert [len(answer) for answer in row.answers] == [3, 1]


def test_tools_calls_and_reasoning_are_kept(tmp_path: Path) -> None:
    calls = says("", tool_calls=[CALL], reasoning_content="Hm.")
    row = {"prompt": [user("Q")], "chosen": [calls], "rejected": [says("No.")], "tools": [TOOL]}
    found = read(tmp_path, row).rows[0]
    assert found.tools == (ADD,)
    wanted = Message("assistant", "", (ToolCall("add", {"a": 1}),), reasoning="Hm.")
    assert found.answers == ((wanted,), (said("No."),))
    without = read(tmp_path, {k: v for k, v in row.items() if k != "tools"}).rows[0]
    assert without.key != found.key
    as_text = read(tmp_path, row | {"tools": json.dumps([TOOL])}).rows[0]
    assert as_text.tools == found.tools


def test_an_answer_may_have_several_turns(tmp_path: Path) -> None:
    turns = [says("", tool_calls=[CALL]), {"role": "tool", "content": "3"}, says("3")]
    found = read(tmp_path, {"prompt": "Q", "chosen": turns, "rejected": [says("4")]}).rows[0]
    assert [message.role for message in found.answers[0]] == ["assistant", "tool", "assistant"]


# --- scores ---------------------------------------------------------------------------------------


def test_all_pairs_of_scored_answers_or_the_best_and_the_worst(tmp_path: Path) -> None:
    row = {"instruction": "Q", "completions": COMPLETIONS}
    found = read(tmp_path, row, pairing="all").rows
    assert [(*r.texts(), r.margin) for r in found] == [
        ("a", "b", 4.5),
        ("a", "c", 7.0),
        ("b", "c", 2.5),
    ]


def test_ratings_of_single_answers_are_compared_by_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": q, "response": a, "helpfulness": s, "verbosity": 2}
        for q, a, s in (("Q", "a", 4), ("P", "x", 1), ("Q", "b", 2), ("P", "y", 1), ("R", "z", 0))
    ]
    found = read(tmp_path, *rows)
    assert "rated answers" in found.report() and texts(found.rows) == [("Q", "a", "b")]
    assert found.notes() == [
        f"1 of 5 rows are left out, because all answers have the same score, such as "
        f"{tmp_path}/a.jsonl:2",
        f"1 of 5 rows are left out, because their prompt has one answer, such as "
        f"{tmp_path}/a.jsonl:5",
    ]


def test_dialogues_that_say_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    good = {"chosen": HH + "a", "rejected": HH + "b"}
    rows = [good, good | {"rejected": HH}, good | {"rejected": HH + "a"}]
    found = read(tmp_path, *rows, {"chosen": HH + "a", "rejected": "\n\nHuman: Else"})
    assert len(found.rows) == 1
    reasons = [line.split("because ")[1].split(",")[0] for line in found.left_out]
    assert reasons == ["an answer is empty", "both answers are the same"]
    assert "2 of 4 rows are left out, because an answer is empty" in found.left_out[0]
    with pytest.raises(DataError, match="has no row to learn from: 1 of 1 rows"):
        read(tmp_path, rows[2])


# --- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "means"),
    [
        *(
            (value, True)
            for value in (True, 1, 1.0, "1", "+1", "true", "True", "good", "desirable")
        ),
        *((value, False) for value in (False, 0, -1, "0", "-1", "false", "bad", "undesirable")),
    ],
)
def test_clear_labels_are_read(tmp_path: Path, label: object, means: bool) -> None:
    found = read(tmp_path, {"prompt": "Q", "completion": "a", "label": label})
    assert found.kind == "labels" and found.rows[0].label is means


@pytest.mark.parametrize("label", [2, 0.5, -2, 10**400, "ok", "", [], {}, "yes"])
def test_labels_that_are_not_clear_are_refused(tmp_path: Path, label: object) -> None:
    with pytest.raises(DataError, match="a.jsonl:1: field 'label' is .*expected true"):
        read(tmp_path, {"prompt": "Q", "completion": "a", "label": label})


def test_zero_and_minus_one_in_one_file_are_not_clear(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Q", "completion": a, "label": n} for a, n in (("a", 1), ("b", 0), ("c", -1))
    ]
    with pytest.raises(DataError, match="a.jsonl:2 has the label 0 and .*a.jsonl:3 the label -1"):
        read(tmp_path, *rows)


def test_a_whole_conversation_may_have_a_label(tmp_path: Path) -> None:
    found = read(tmp_path, {"messages": [*CHAT, says("a")], "label": False})
    assert found.kind == "labels" and texts(found.rows) == [("Why?", "a")]
    with pytest.raises(DataError, match="expected a question and, at the end, the assistant's"):
        read(tmp_path, {"messages": CHAT, "label": True})


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "says_of"),
    [
        ({"chosen": "Q a", "rejected": "Q b"}, PAIRS[0][1], ("implicit prompt", "pairs")),
        (PAIRS[0][1], PAIRS[2][1], ("text", "messages")),
        (PAIRS[0][1], PAIRS[4][1], ("pairs", "scored answers")),
        (PAIRS[7][1], {"chosen": "Q a", "rejected": "Q b"}, ("dialogues", "implicit prompt")),
        (PAIRS[0][1], PAIRS[9][1], ("'prompt'", "'question'")),
        (
            {"prompt": "Q", "completion": "a", "label": True},
            {"prompt": "Q", "completion": "a"},
            ("label", "completion"),
        ),
    ],
)
def test_mixed_forms_are_refused_with_the_first_two_rows_that_differ(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], says_of: tuple[str, str]
) -> None:
    with pytest.raises(DataError) as refused:
        read(tmp_path, first, first, second, second)
    text = str(refused.value)
    assert "a.jsonl:1 is" in text and "a.jsonl:3" in text and "split the file" in text
    assert all(part in text for part in says_of)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": [user("Q"), says("a")], "rejected": [user("P"), says("b")]},
            "'chosen' and 'rejected' begin differently",
        ),
        (
            {"chosen": [user("Q"), user("P"), says("a")], "rejected": [user("Q"), says("b")]},
            "differ first in message 1, which is of the role user in 'chosen'",
        ),
        (PAIRS[3][1] | {"prompt": "Other"}, "'prompt' is 'Other' .str., which is not in what"),
        (PAIRS[3][1] | {"score_chosen": "high"}, "'score_chosen' is 'high' .str., expected a num"),
        (
            {"prompt": "Q", "completions": [{"response": "a"}]},
            "field 'completions', answer 0, is .*overall_score",
        ),
        (
            {"prompt": "Q", "chosen": [says("a", train=False)], "rejected": [says("b")]},
            "no message to learn from, because each has 'train': false",
        ),
        (
            {"prompt": "Q", "chosen": [says(" ")], "rejected": [says("b")]},
            "'chosen' has an empty message of the assistant",
        ),
        (
            {"prompt": "Q", "chosen": [says("a"), says("b")], "rejected": [says("b")]},
            r"messages of \['assistant', 'assistant'\] after the prompt",
        ),
        (
            {"prompt": "Q", "chosen": [says("", tool_calls=["x"])], "rejected": [says("b")]},
            "a tool call is 'x'",
        ),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "tools": "{"}, "'tools' is text but not"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_what_to_change(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as refused:
        read(tmp_path, row)
    assert "a.jsonl:1" in str(refused.value)


COLUMNS = (
    *("prompt", "chosen", "rejected", "completion", "label", "messages", "completions", "response"),
    *("response_1", "response_2", "preference_strength", "overall_score", "tools", "margin"),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.sampled_from(["", "x"])
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"])},
    optional={name: LEAVES for name in ("content", "tool_calls", "train", "from", "value")},
)
VALUES = st.one_of(
    LEAVES, st.just(HH), st.lists(MESSAGES, max_size=4), st.lists(LEAVES, max_size=2), MESSAGES
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=6), max_size=2))
def test_no_row_ends_in_anything_but_a_sentence(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        found = read(tmp_path, *rows)
    except DataError:
        return
    assert preference_digest(found.rows) and all(row.answers for row in found.rows)


# --- files ----------------------------------------------------------------------------------------


def test_parquet_fills_in_fields_that_are_null_and_means_the_same_rows(tmp_path: Path) -> None:
    calls = says("", tool_calls=[{"function": {"name": "add", "arguments": '{"a": 1}'}}])
    rows = [
        {"chosen": [user("Q"), calls], "rejected": [user("Q"), says("b")], "margin": None},
        {"chosen": [user("P"), says("a")], "rejected": [user("P"), says("b")], "margin": 2.0},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = read_preference_rows(tmp_path / "a.parquet", "data", ("pairs",))
    lines = read(tmp_path, *rows)
    assert preference_digest(found.rows) == preference_digest(lines.rows)
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, row in enumerate(rows):
        (folder / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
    several = read_preference_rows(folder, "data", ("pairs",))
    assert preference_digest(several.rows) == preference_digest(lines.rows)


def test_cells_of_csv_may_hold_the_json_text_of_messages(tmp_path: Path) -> None:
    row = {"chosen": [user("Q"), says("a")], "rejected": [user("Q"), says("b")]}
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["chosen", "rejected", "margin"])
        writer.writerow([json.dumps(row["chosen"]), json.dumps(row["rejected"]), 2.5])
    found = read_preference_rows(tmp_path / "a.csv", "data", ("pairs",))
    assert texts(found.rows) == [("Q", "a", "b")] and found.rows[0].margin == 2.5
    with (tmp_path / "b.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion", "label"], ["Q", "[a]", "True"]])
    labels = read_preference_rows(tmp_path / "b.csv", "data", ("labels",)).rows
    assert texts(labels) == [("Q", "[a]")] and labels[0].label is True


def test_calls_of_sharegpt_are_calls(tmp_path: Path) -> None:
    turns = [
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "3"},
    ]
    row = {"conversations": SHARE[:1], "chosen": turns, "rejected": turns[2]}
    chosen, rejected = read(tmp_path, row).rows[0].answers
    assert chosen[0].tool_calls == (ToolCall("add", {"a": 1}),) and chosen[1].role == "tool"
    assert rejected == (said("3"),)


def test_rows_of_texts_keep_their_keys_and_digest() -> None:
    """Those that runs before messages were the type have recorded."""
    rows = [
        PreferenceRow.of_texts("f:1", "P é", "A", "B", margin=1.5),
        PreferenceRow("f:2", (Message("system", "S"), asked("Q")), ((said("A"),),), label=True),
    ]
    digest = "02f09a43de1d7bc0996564b39992083929b23ed84e9114f4a30c76a878574b66"
    assert preference_digest(rows) == digest
    assert [row.key for row in rows] == ["user: P é", "system: S\nuser: Q"]
