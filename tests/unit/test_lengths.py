"""Rows longer than the model may read: dropped, cut or refused alike everywhere, and counted."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from posttrain.core.contracts.preference_rows import PreferenceRow
from posttrain.core.data.lengths import LengthRule, fitting_prompts, fitting_worked
from posttrain.core.data.preference import tokenise_labelled, tokenise_pairs
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import BARE_TEMPLATE, CHARACTERS, make_tiny_tokenizer
from posttrain.core.training.sft import worked_batch
from posttrain.core.types import Problem

LIMIT = 12
Rule = Literal["drop", "truncate", "error"]


def tokenizer() -> ChatTokenizer:
    """A character is a token; a prompt has one more, a response too."""
    return ChatTokenizer(make_tiny_tokenizer(CHARACTERS, BARE_TEMPLATE), None)


def problem(prompt: str, answer: str) -> Problem:
    return Problem(prompt, prompt, answer, answer)


SFT = [
    problem("ab", "x" * 8),
    problem("abc", "x" * 9),
    problem("d" * 11, "x"),
    problem("e" * 40, ""),
]
"""Tokens of prompt and answer: 12, 14, 14 with no room for an answer, and far too many."""


def sft(rule: LengthRule) -> list[tuple[int, int]]:
    chat = tokenizer()
    kept = fitting_worked(chat, [*SFT, *SFT], rule)  # a second epoch is not counted again
    assert len(kept) % 2 == 0
    half = kept[: len(kept) // 2]
    batch = worked_batch(chat, half, LIMIT)
    sizes = zip(batch.prompt_mask.sum(1).tolist(), batch.response_mask.sum(1).tolist(), strict=True)
    return list(sizes)


def preference(rule: LengthRule) -> list[tuple[int, int]]:
    rows = [
        PreferenceRow.of_texts(f"f:{i}", p.prompt, p.worked or "x", "y") for i, p in enumerate(SFT)
    ]
    found = tokenise_pairs(rows, tokenizer(), rule)
    return [(len(pair.prompt_ids), len(pair.chosen_ids)) for pair in found]


def labelled(rule: LengthRule) -> list[tuple[int, int]]:
    rows = [
        PreferenceRow.of_texts(f"f:{i}", p.prompt, p.worked or "x", label=True)
        for i, p in enumerate(SFT)
    ]
    found = tokenise_labelled(rows, tokenizer(), rule)
    return [(len(row.prompt_ids), len(row.answer_ids)) for row in found]


@pytest.mark.parametrize("apply", [sft, preference, labelled])
def test_one_rule_for_all_that_is_trained_on(apply: Any) -> None:  # Any: one of the above
    rule = LengthRule("drop", LIMIT, "rows")
    assert apply(rule) == [(3, 9)]
    assert rule.metrics("data") == {"data/overlong_dropped": 3, "data/overlong_truncated": 0}
    assert "3 of 4 rows are too long, such as '" in rule.check()
    assert "abc' with 4 tokens of prompt and 10 of answer, which exceeds" in rule.check()
    assert "exceeds model.max_model_len 12; 3 were" in rule.check()
    assert "3 were left out (model.overlong: drop)" in rule.check()

    rule = LengthRule("truncate", LIMIT, "rows")
    assert apply(rule) == [(3, 9), (4, 8)]
    assert rule.metrics("data") == {"data/overlong_dropped": 2, "data/overlong_truncated": 1}
    assert "2 were left out and 1 were cut" in rule.check()

    rule = LengthRule("error", LIMIT, "rows", "max_length")
    apply(rule)
    with pytest.raises(
        DataError, match=r"3 of 4 .*exceeds max_length 12: raise max_length, .*overlong"
    ):
        rule.check()


def test_prompts_keep_their_end_and_room_for_the_response() -> None:
    chat = tokenizer()
    problems = [problem("abcd", ""), problem("abcdefghi", ""), problem("abcd", "")]
    prompts = [(p, chat.encode_prompt(p)) for p in problems]
    for overlong, texts in (("drop", ["abcd"] * 2), ("truncate", ["abcd", "efghi", "abcd"])):
        rule = LengthRule(overlong, LIMIT, "prompts")  # type: ignore[arg-type]
        found = fitting_prompts(prompts, 6, rule)
        assert [chat.decode_response(ids) for _, ids in found] == texts
        assert rule.seen == 2 and rule.dropped + rule.truncated == 1
        assert all(ids[-1] == prompts[0][1][-1] for _, ids in found)  # the mark of the answer
    rule = LengthRule("truncate", LIMIT, "prompts")
    assert fitting_prompts(prompts, LIMIT, rule) == []
    with pytest.raises(DataError, match="none is left: raise model.max_model_len"):
        rule.check()


def test_a_pair_that_is_alike_once_it_was_cut_teaches_nothing() -> None:
    row = PreferenceRow.of_texts("f:1", "ab", "x" * 20 + "y", "x" * 30)
    rule = LengthRule("truncate", LIMIT, "pairs")
    assert tokenise_pairs([row], tokenizer(), rule) == []
    assert (rule.dropped, rule.truncated) == (1, 0)


def test_nothing_is_reported_where_all_fits() -> None:
    rule = LengthRule("error", 999, "rows")
    assert len(sft(rule)) == 4 and rule.check() == ""
