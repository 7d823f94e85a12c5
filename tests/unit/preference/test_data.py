"""Preference data: every form TRL has, errors that name file and line, splits and mini-batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.contracts.preference_rows import Kind, PreferenceRow
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.preference import (
    LabelledAnswer,
    Pair,
    as_labelled,
    batches,
    make_pairs,
    mismatched_answers,
    split_by_prompt,
    tokenise_pairs,
)
from posttrain.core.data.preference_files import read_preference_rows
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import make_tiny_tokenizer
from posttrain.core.math.splits import held_out_keys
from posttrain.core.runtime.json_files import read_json_lines
from posttrain.core.types import Message

ANY: tuple[Kind, ...] = ("pairs", "labels", "completions")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def asks(text: str) -> Message:
    return Message("user", text)


def limit(tokens: int) -> LengthRule:
    return LengthRule("drop", tokens, "rows")


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path, kinds: tuple[Kind, ...] = ANY) -> tuple[Kind, list[PreferenceRow]]:
    found = read_preference_rows(path, "stages.dpo.data", kinds)
    return found.kind, found.rows


def read_one(folder: Path, row: object, kinds: tuple[Kind, ...] = ANY) -> PreferenceRow:
    _, rows = read(write(folder / "a.jsonl", row), kinds)
    return rows[0]


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"prompt": [user("Why?")], "chosen": [assistant("So.")], "rejected": [assistant("No.")]},
        {"prompt": "Why?", "chosen": [assistant("So.")], "rejected": "No.", "score": 3},
        {"chosen": [user("Why?"), assistant("So.")], "rejected": [user("Why?"), assistant("No.")]},
        {"chosen": "Why? So.", "rejected": "Why? No."},
        {"chosen": "Why?\nSo.", "rejected": "Why? No.", "prompt": None},
    ],
)
def test_all_forms_of_a_pair_say_the_same(tmp_path: Path, row: dict[str, object]) -> None:
    found = read_one(tmp_path, row)
    assert found.prompt == (asks("Why?"),)
    assert found.texts() == ("So.", "No.") and found.margin == 0.0
    assert found.where.endswith("a.jsonl:1")


def test_answers_that_a_template_makes_the_same_are_refused() -> None:
    tokenizer = make_tiny_tokenizer()
    template = str(tokenizer.chat_template)
    tokenizer.chat_template = template.replace(
        "+ message['content'] +", "+ message['content'].strip() +"
    )
    assert tokenizer.chat_template != template
    row = PreferenceRow.of_texts("f.jsonl:3", "2 + 2", "4", " 4\n")
    with pytest.raises(DataError, match=r"f\.jsonl:3: 'chosen' and 'rejected' are the same tokens"):
        tokenise_pairs([row], ChatTokenizer(tokenizer, None), limit(99))


def test_an_implicit_prompt_does_not_cut_a_word(tmp_path: Path) -> None:
    found = read_one(tmp_path, {"chosen": "It is a cat", "rejected": "It is a car"})
    assert found.prompt == (asks("It is a"),) and found.texts() == ("cat", "car")
    longer = read_one(tmp_path, {"chosen": "Say yes", "rejected": "Say yes please"})
    assert longer.prompt == (asks("Say"),) and longer.texts() == ("yes", "yes please")


def test_margins_labels_and_whole_conversations(tmp_path: Path) -> None:
    row = {"prompt": "P", "chosen": "A", "rejected": "B", "margin": 2}
    assert read_one(tmp_path, row).margin == 2.0
    chat = [{"role": "system", "content": "S"}, user("P"), assistant("Q?"), user("R")]
    found = read_one(tmp_path, {"prompt": chat, "completion": [assistant("A")], "label": False})
    wanted = (Message("system", "S"), asks("P"), Message("assistant", "Q?"), asks("R"))
    assert found.label is False and found.prompt == wanted and found.texts() == ("A",)
    assert read(tmp_path / "a.jsonl")[0] == "labels"
    assert read_one(tmp_path, {"prompt": "P", "completion": "A"}).label is None


def test_one_prompt_has_one_key_as_text_or_chat_and_white_space_is_part_of_it(
    tmp_path: Path,
) -> None:
    text = "def f():\n    return 1"
    plain = read_one(tmp_path, {"prompt": text, "completion": "A"})
    chat = read_one(tmp_path, {"prompt": [user(text)], "completion": "A"})
    other = read_one(tmp_path, {"prompt": [assistant(text)], "completion": "A"})
    assert plain.key == chat.key != other.key
    for changed in ("def f():\n  return 1", text + "\n", " " + text, text.replace(" ", "\t")):
        row = read_one(tmp_path, {"prompt": changed, "completion": " A\n"})
        assert row.key != plain.key
        assert row.prompt == (asks(changed),) and row.texts() == (" A\n",)


def test_one_character_separates_an_implicit_prompt_from_its_answers(tmp_path: Path) -> None:
    start = "\n\nWrite a line:\n"
    row = {"chosen": start + "    a = 1 ", "rejected": start + "    b = 1\n"}
    found = read_one(tmp_path, row)
    assert found.prompt == (asks("\n\nWrite a line:"),)
    assert found.texts() == ("    a = 1 ", "    b = 1\n")


# --- bad input ------------------------------------------------------------------------------------

GOOD = {"prompt": "P", "chosen": "A", "rejected": "B"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "a.jsonl:2 is not JSON"),
        ('{"prompt": NaN}', "a.jsonl:2 is not JSON .NaN is not JSON"),
        ("[1]", r"a.jsonl:2 holds '\[1\]', expected a JSON object"),
        ({"prompt": "P"}, r"a.jsonl:2 has the fields \['prompt'\], expected .*chosen"),
        ({"prompt": "P", "chosen": "A"}, "a.jsonl:2 has the fields .*correct this line"),
        (GOOD | {"completion": "C"}, "a.jsonl:2 has the fields"),
        (GOOD | {"chosen": ""}, "a.jsonl:2: field 'chosen' is '' .str., expected non-empty text"),
        (GOOD | {"chosen": 7}, "field 'chosen' is 7 .int., expected"),
        (GOOD | {"rejected": "A"}, "are the same answer 'A'"),
        (GOOD | {"prompt": "  "}, "field 'prompt' is '  ' .str., expected non-empty text"),
        (GOOD | {"prompt": []}, "field 'prompt' is .. .list."),
        (GOOD | {"prompt": [{"role": "user"}]}, "field 'prompt', message 0, has no 'content'"),
        (GOOD | {"prompt": ["P"]}, "field 'prompt', message 0, is 'P'"),
        (
            GOOD | {"prompt": [{"role": "wizard", "content": "P"}]},
            "message 0, has the role 'wizard' .str., expected system, user, assistant or tool",
        ),
        (GOOD | {"chosen": [user("A")]}, r"messages of \['user'\] .*expected one assistant"),
        (GOOD | {"chosen": [assistant("A"), user("B")]}, "expected one assistant message"),
        (GOOD | {"margin": "1"}, "field 'margin' is '1' .str., expected a number"),
        (GOOD | {"margin": True}, "field 'margin' is True .bool., expected a number"),
        ({"chosen": "A", "rejected": "B"}, "a.jsonl:2 has no 'prompt', .*begin differently"),
        ({"chosen": "A", "rejected": [user("A")]}, "expected two texts or two lists"),
        ({"prompt": "P", "completion": "A", "label": 2}, "field 'label' is 2 .int., expected true"),
        ({"prompt": "P", "completion": "A", "label": "?"}, "field 'label' is '.' .str., expected"),
        ({"prompt": "P", "completion": "A", "label": None}, "field 'label' is null"),
        (
            {"prompt": "P", "completion": "A", "label": True},
            "a.jsonl:1 is of the form .*chosen.* and .*a.jsonl:2 of the form .*label.*split the",
        ),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(
    tmp_path: Path, row: object, message: str
) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, row)
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_file_of_the_wrong_form_is_refused_with_the_right_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "P", "completion": "A"})
    with pytest.raises(DataError, match=r"a.jsonl:1 has the fields .*expected .*\"label\": true"):
        read(path, ("pairs", "labels"))


def test_an_unreadable_file_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*: correct stages.dpo.data; relative paths"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="has no data file .*correct stages.dpo.data"):
        read(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8 .line 1, byte 0."):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="has no rows, expected at least one such as"):
        read(tmp_path / "a.jsonl")


def test_a_line_may_hold_line_breaks_of_unicode_and_the_file_a_byte_order_mark(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"a": "x\u2028y"}\r\n\n{"a": "z"}', encoding="utf-8")
    rows = read_json_lines(path, "data", "{}")
    assert [row.values["a"] for row in rows] == ["x\u2028y", "z"]
    assert rows[1].where == f"{path}:3"


# --- tokens ---------------------------------------------------------------------------------------


def test_rows_become_the_ids_that_a_rollout_would_have() -> None:
    tokenizer = ChatTokenizer(make_tiny_tokenizer(), system_prompt=None)
    row = PreferenceRow.of_texts("f:1", "Why?", "So.", "No.", margin=1.5)
    (pair,) = tokenise_pairs([row], tokenizer, limit(200))
    assert pair.margin == 1.5 and pair.key == "user: Why?"
    text = tokenizer.tokenizer.decode(list(pair.prompt_ids))
    assert text.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")
    assert pair.chosen_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode_response(pair.rejected_ids) == "No."


def test_the_runs_system_prompt_gives_way_to_the_rows_own() -> None:
    tokenizer = ChatTokenizer(make_tiny_tokenizer(), system_prompt="Run.")
    asked = Message("user", "P")
    own = (Message("system", "Row."), asked)
    for prompt, there, absent in ((own, "Row.", "Run."), ((asked,), "Run.", "Row.")):
        text = tokenizer.tokenizer.decode(list(tokenizer.encode_chat(prompt)))
        assert there in text and absent not in text and "Be brief." not in text


def test_a_template_that_refuses_the_messages_is_blamed_on_the_line() -> None:
    raw = make_tiny_tokenizer()
    raw.chat_template = "{{ raise_exception('roles must alternate') }}"
    row = PreferenceRow.of_texts("f.jsonl:9", "P", "a", "b")
    with pytest.raises(DataError, match="f.jsonl:9: the model's chat template refuses .*alternate"):
        tokenise_pairs([row], ChatTokenizer(raw, None), limit(99))


# --- splits and mini-batches ----------------------------------------------------------------------


@given(st.lists(st.text(max_size=4), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_all_rows_of_a_prompt_are_on_one_side(keys: list[str], fraction: float) -> None:
    rows = [LabelledAnswer(key, (1,), (2,), True) for key in keys]
    train, held_out = split_by_prompt(rows, fraction)
    assert len(train) + len(held_out) == len(rows)
    assert not {row.key for row in train} & {row.key for row in held_out}
    assert bool(train) and bool(held_out) == (len(set(keys)) > 1)


def test_held_out_keys_depend_on_the_keys_alone_and_mostly_stay_when_some_are_added() -> None:
    keys = [f"prompt {i}" for i in range(200)]
    before = held_out_keys(keys, 0.2)
    assert len(before) == 40 and before == held_out_keys(reversed(keys), 0.2)
    after = held_out_keys([*keys, *(f"new {i}" for i in range(20))], 0.2)
    assert len(before & after) >= 30


@given(st.integers(1, 60), st.integers(1, 20))
def test_mini_batches_hold_every_row_once_in_nearly_equal_parts(rows: int, size: int) -> None:
    parts = batches(rows, size, torch.Generator().manual_seed(0))
    assert sorted(i for part in parts for i in part) == list(range(rows))
    lengths = {len(part) for part in parts}
    assert max(lengths) <= size and max(lengths) - min(lengths) <= 1
    assert len(parts) == -(-rows // size)


def answer(key: str, *ids: int) -> LabelledAnswer:
    return LabelledAnswer(key, (1,), ids, True)


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=12))
def test_mismatched_answers_belong_to_other_prompts(keys: list[str]) -> None:
    rows = [answer(key, i) for i, key in enumerate(keys)]
    if len(set(keys)) < 2:
        with pytest.raises(DataError, match="one prompt only.*raise batch_size"):
            mismatched_answers(rows)
        return
    found = mismatched_answers(rows)
    owners = {row.answer_ids: row.key for row in rows}
    assert all(owners[other.answer_ids] != row.key for other, row in zip(found, rows, strict=True))


def test_between_distinct_prompts_answers_are_rolled_by_one() -> None:
    rows = [answer(key, i) for i, key in enumerate("abc")]
    assert [row.answer_ids for row in mismatched_answers(rows)] == [(1,), (2,), (0,)]


def test_pairs_join_distinct_right_and_wrong_answers() -> None:
    answers = [((1,), True), ((1,), True), ((2,), True), ((8,), False), ((9,), False)]
    pairs = make_pairs("k", (5,), answers, max_pairs=3)
    assert len(pairs) == len(set(pairs)) == 3
    assert {p.chosen_ids for p in pairs} <= {(1,), (2,)}
    assert {p.rejected_ids for p in pairs} <= {(8,), (9,)}
    assert {p.prompt_ids for p in pairs} == {(5,)}
    assert len(make_pairs("k", (5,), answers, max_pairs=99)) == 4
    assert make_pairs("k", (5,), [((1,), True)], max_pairs=3) == []


def test_pairs_as_labelled_answers_hold_each_answer_once() -> None:
    pairs = [Pair("k", (5,), (1,), (8,)), Pair("k", (5,), (1,), (9,))]
    assert as_labelled(pairs) == [
        LabelledAnswer("k", (5,), (1,), True),
        LabelledAnswer("k", (5,), (8,), False),
        LabelledAnswer("k", (5,), (9,), False),
    ]
