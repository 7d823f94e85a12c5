"""Rows of SFT: which tokens are learned, what a step takes, in which order, and the losses."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.config.sft_stage import SftStage
from posttrain.core.data.formats import Example, recognise
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.sft_rows import (
    BatchSize,
    EncodedRow,
    LossOn,
    SourceReport,
    TokenRows,
    encode_example,
    encoded_rows,
    epochs_of,
    fitted,
    prompt_key,
    split_at_first,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from posttrain.core.math.likelihood import TokenWeight, token_nll
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.runtime.json_files import JsonRow
from posttrain.core.training.optim import StepReport
from posttrain.core.training.sft import BestLoss, negative_log_likelihood, sft_step
from posttrain.pipelines.stages.sft import _Gathering

RUNTIME = ModelRuntime(torch.device("cpu"), torch.float32, "stream")
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "d"},
]


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(make_tiny_tokenizer(), None)


def example(values: dict[str, Any]) -> Example:
    row = JsonRow("chats.jsonl:1", values)
    return recognise(row).read(row)


def learned(chat: ChatTokenizer, values: dict[str, Any], loss_on: LossOn) -> list[str]:
    """The stretches of text that are learned."""
    row = encode_example(chat, example(values), loss_on)
    if row is None:
        return []
    assert len(row.learned) == len(row.response)
    pairs = zip(row.response, row.learned, strict=True)
    return [
        str(chat.tokenizer.decode([token for token, _ in run]))
        for own, run in itertools.groupby(pairs, key=lambda pair: pair[1])
        if own
    ]


def changed(number: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{**m, **(fields if i == number else {})} for i, m in enumerate(CHAT)]}


@pytest.mark.parametrize(
    ("values", "loss_on", "wanted"),
    [
        ({"messages": CHAT}, "assistant", ["b<|im_end|>", "d<|im_end|>"]),
        ({"messages": CHAT}, "last_assistant", ["d<|im_end|>"]),
        (changed(2, train=False), "assistant", ["d<|im_end|>"]),
        (changed(4, weight=0), "assistant", ["b<|im_end|>"]),
        (changed(4, weight=0), "last_assistant", []),
        ({"messages": [*CHAT, CHAT[1]]}, "last_assistant", ["d<|im_end|>"]),
        ({"messages": CHAT[:2]}, "assistant", []),
        (changed(2, content=""), "assistant", ["<|im_end|>", "d<|im_end|>"]),
        ({"messages": [CHAT[1], {"role": "assistant", "content": ""}]}, "assistant", []),
        ({"prompt": CHAT[:4], "completion": "d"}, "assistant", ["d<|im_end|>"]),
        ({"prompt": CHAT[:2], "completion": CHAT[2:]}, "last_assistant", ["d<|im_end|>"]),
        ({"instruction": "a?", "output": ""}, "assistant", []),
        ({"text": "ab"}, "assistant", ["b<|im_end|>"]),
        ({"text": "<|im_start|>ab<|im_end|>"}, "all", ["ab<|im_end|>"]),
    ],
)
def test_what_is_learned(
    chat: ChatTokenizer, values: dict[str, Any], loss_on: LossOn, wanted: list[str]
) -> None:
    assert learned(chat, values, loss_on) == wanted


def test_the_systems_prompt_of_the_run_is_put_first() -> None:
    brief = ChatTokenizer(make_tiny_tokenizer(), "brief")
    row = encode_example(brief, example({"messages": CHAT[1:]}), "last_assistant")
    assert row is not None
    assert "system\nbrief<|im_end|>" in str(brief.tokenizer.decode(row.prompt))
    assert learned(brief, {"messages": CHAT[1:]}, "last_assistant") == ["d<|im_end|>"]
    assert learned(brief, {"messages": CHAT[1:]}, "assistant") == ["b<|im_end|>", "d<|im_end|>"]


def test_all_is_everything_but_the_first_token_and_what_is_not_to_be_trained(
    chat: ChatTokenizer,
) -> None:
    whole = "".join(learned(chat, {"messages": CHAT}, "all"))
    text = str(chat.tokenizer.apply_chat_template(CHAT, tokenize=False))
    assert "<|im_start|>" + whole == text
    row = encode_example(chat, example({"messages": CHAT}), "all")
    assert row is not None and len(row.prompt) == 1
    without = "".join(learned(chat, changed(1, train=False), "all"))
    assert "a?" not in without and "c?" in without


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_row_ends_with_its_last_learned_token(own: list[bool]) -> None:
    ids = tuple(range(len(own)))
    row = split_at_first(ids, own)
    if not any(own[1:]):
        assert row is None
        return
    assert row is not None
    assert row.prompt + row.response == ids[: len(row.prompt) + len(row.response)]
    assert row.learned[0] and row.learned[-1]
    kept = [t for t, mine in zip(row.response, row.learned, strict=True) if mine]
    assert kept == [t for t in ids[1:] if own[t]]


@pytest.mark.parametrize(
    ("overlong", "limit", "left"),
    [
        ("drop", 5, None),
        ("truncate", 5, (3, 4, 5)),
        ("truncate", 3, (3,)),
        ("truncate", 2, None),
        ("drop", 6, (3, 4, 5, 6)),
    ],
)
def test_a_long_row_is_cut_at_its_end(overlong: Any, limit: int, left: Any) -> None:
    rule = LengthRule(overlong, limit, "rows")
    row = fitted(EncodedRow((1, 2), (3, 4, 5, 6), (True, False, False, True)), "r", rule)
    assert (None if row is None else row.response) == left
    assert rule.dropped == (left is None) and rule.truncated == (left is not None and limit < 6)


def test_a_row_cut_before_anything_learned_is_left_out() -> None:
    rule = LengthRule("truncate", 3, "rows")
    assert fitted(EncodedRow((1, 2), (3, 4), (False, True)), "r", rule) is None
    assert (rule.dropped, rule.truncated) == (1, 0)


def test_rows_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    rows = TokenRows(tmp_path / "tokens")
    first = EncodedRow((1, 2), (3, 4, 5), (True, False, True))
    assert rows.add(first, "a.jsonl:7", "p") == 0
    assert rows.add(EncodedRow((9,), (8,)), "a problem: 3 + 4", "q", 1) == 1
    assert rows.add(first, "b.jsonl:1", "p", 2) == 2
    rows.finish()
    assert rows.row(0) == rows.row(2) == first
    assert rows.row(1) == EncodedRow((9,), (8,), (True,))
    assert [rows.name(i) for i in range(3)] == ["a.jsonl:7", "a problem: 3 + 4", "b.jsonl:1"]
    assert [*rows.tokens] == [5, 2, 5] and [*rows.learned] == [2, 1, 2]
    assert rows.content(0) == rows.content(2) != rows.content(1)
    batch = rows.batch([1, 0], pad_token_id=0)
    assert batch.prompt_ids.tolist() == [[0, 9], [1, 2]]
    assert batch.response_ids.tolist() == [[8, 0, 0], [3, 4, 5]]
    assert batch.mask.tolist() == [[1, 0, 0], [1, 0, 1]]
    assert rows.held_out([0, 1, 2], 0.5) in ({0, 2}, {1}), "rows of one prompt stay together"


def test_a_prompt_of_the_held_out_file_is_not_trained_on_with_another_answer(
    tmp_path: Path,
) -> None:
    rows = TokenRows(tmp_path / "tokens")
    for place, (answer, key) in enumerate([(3, "p"), (4, "p"), (5, "q"), (6, "p")]):
        rows.add(EncodedRow((1,), (answer,)), f"a.jsonl:{place}", key)
    rows.finish()
    said: list[str] = []
    tracker = SimpleNamespace(log_step=lambda step, values: said.append(str(values)))
    context: Any = SimpleNamespace(name="sft", warn=said.append, tracker=tracker)
    stage = SftStage.model_validate({**BASE, "data": "a.jsonl", "held_out": "b.jsonl"})
    gathering = _Gathering(context, stage, context)
    assert gathering._without_held_out(rows, [[0, 1, 2]], [3], [0, 1, 2]) == ([[2]], None)
    assert "the prompts of 2 training rows, such as a.jsonl:0, are in b.jsonl as well" in said[0]
    assert "2.0" in said[1]


def test_a_source_reports_what_it_left_out(tmp_path: Path, chat: ChatTokenizer) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [CHAT, CHAT[:2], [CHAT[1], {"role": "assistant", "content": "x" * 300}]]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    report, rule = SourceReport(str(path)), LengthRule("drop", 200, "rows")
    found = list(encoded_rows(report, "data", chat, "assistant", rule))
    assert [example.where for example, _ in found] == [f"{path}:1"]
    assert (report.rows, report.kept, report.empty, report.learned) == (3, 1, 1, 4)
    assert "3 rows of the format messages" in report.line and "2 of them left out" in report.line
    assert f"{path}:2" in report.warning and rule.dropped == 1
    path.write_text(json.dumps({"messages": CHAT[:2]}))
    report = SourceReport(str(path))
    assert not list(encoded_rows(report, "data", chat, "assistant", rule))
    with pytest.raises(DataError, match="no row is left"):
        report.check()


def test_the_key_is_the_prompt() -> None:
    one, other = (
        example({"prompt": "q", "completion": "a"}),
        example({"prompt": "q", "completion": "b"}),
    )
    longer = example({"prompt": [CHAT[1], CHAT[2], CHAT[3]], "completion": "d"})
    assert prompt_key(one) == prompt_key(other) != prompt_key(longer)
    assert "b" in prompt_key(longer)


# --- order ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 12), st.booleans())
def test_batches_are_full_and_in_order(lengths: list[int], limit: int, by_tokens: bool) -> None:
    size = BatchSize(None if by_tokens else limit, limit if by_tokens else None, lengths)
    batches = list(size.cut(range(len(lengths))))
    assert [row for batch in batches for row in batch] == list(range(len(lengths)))
    for batch, following in itertools.pairwise([*batches, None]):
        assert batch
        used = sum(lengths[row] for row in batch)
        if by_tokens:
            assert used <= limit or len(batch) == 1
            assert following is None or used + lengths[following[0]] > limit
        else:
            assert len(batch) == limit or following is None


def test_a_pass_has_every_row_once_in_an_order_of_the_seed() -> None:
    pools = [[0, 1, 2], [3, 4]]
    one, two = itertools.islice(epochs_of(pools, None, 7, "sft"), 2)
    assert sorted(one) == sorted(two) == [0, 1, 2, 3, 4] and one != two
    assert [one, two] == list(itertools.islice(epochs_of(pools, None, 7, "sft"), 2))
    assert one != next(epochs_of(pools, None, 8, "sft"))


def test_weights_are_shares_of_the_rows_evenly_spread() -> None:
    pools = [list(range(60)), list(range(60, 70)), list(range(70, 80))]
    drawn = [r for rows in itertools.islice(epochs_of(pools, [2, 1, 1], 0, "sft"), 2) for r in rows]
    sources = [0 if row < 60 else 1 if row < 70 else 2 for row in drawn]
    assert len(drawn) == 160 and Counter(sources) == {0: 80, 1: 40, 2: 40}
    for end in range(4, 160, 4):
        assert Counter(sources[:end]) == {0: end // 2, 1: end // 4, 2: end // 4}
    assert set(Counter(row for row in drawn if row >= 60).values()) == {4}
    assert set(Counter(drawn[:120])) >= set(range(60)), "all rows before any comes again"


def test_plans_count_steps_or_passes() -> None:
    lengths = [4, 3, 2, 5, 1]

    def plan(rows: int | None, tokens: int | None, **count: Any) -> list[list[int]]:
        passes = itertools.cycle([[0, 1, 2, 3, 4]])
        made = BatchSize(rows, tokens, lengths).plan(
            passes, **{"steps": None, "epochs": None, **count}
        )
        return [made[i] for i in range(len(made))]

    assert plan(2, None, steps=4) == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert plan(2, None, epochs=2) == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]
    assert plan(None, 7, epochs=1) == [[0, 1], [2, 3], [4]]
    assert plan(None, 6, steps=5) == [[0], [1, 2], [3, 4], [0], [1, 2]]


# --- losses --------------------------------------------------------------------------------------


class KeptGradients:
    """Leaves the gradients where they are."""

    def step(self, **_: Any) -> StepReport:
        return StepReport(0.0, False, 0.0, skipped=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, chat: ChatTokenizer) -> TokenRows:
    made = TokenRows(tmp_path_factory.mktemp("rows") / "tokens")
    for number, values in enumerate(
        ({"messages": CHAT}, {"prompt": "why?", "completion": "so"}, {"text": "a longer text"})
    ):
        row = encode_example(chat, example(values), "assistant")
        assert row is not None
        made.add(row, f"x:{number}", "k")
    made.finish()
    return made


@pytest.mark.parametrize("weighting", ["none", "dft", "phi"])
def test_the_gradient_is_that_of_each_row_by_itself(
    tmp_path: Path, rows: TokenRows, weighting: Any
) -> None:
    """Nothing of one row is seen by another; a weight is of the token's probability."""
    model = load_policy(make_tiny_model(tmp_path / "m"), RUNTIME)
    batch = rows.batch([0, 1, 2], pad_token_id=0)
    optimizer: Any = KeptGradients()
    found = sft_step(model, optimizer, batch, micro_batch_size=2, weighting=weighting)
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total, plain = torch.tensor(0.0), 0.0
    count = sum(rows.learned)
    for number in range(3):
        row = rows.row(number)
        ids = torch.tensor([row.prompt + row.response])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        for place, own in enumerate(row.learned, start=len(row.prompt)):
            if own:
                logprob = logits[place - 1].log_softmax(-1)[ids[0, place]]
                p = float(logprob.detach().exp())
                weight = {"none": 1.0, "dft": p, "phi": p * (1 - p)}[weighting]
                total = total - weight * logprob / count
                plain -= float(logprob.detach()) / count
    total.backward()
    assert found["sft/loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert found.get("sft/nll", plain) == pytest.approx(plain, rel=1e-5)
    theirs = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    loss, tokens = negative_log_likelihood(model, batch, micro_batch_size=2)
    assert (loss / tokens, tokens) == (pytest.approx(plain, rel=1e-5), count)


@pytest.mark.parametrize(
    ("weighting", "values", "slopes"),
    [
        ("none", (2.302585, 0.693147, 0.105361), (-1.0, -1.0, -1.0)),
        ("dft", (0.230259, 0.346574, 0.094824), (-0.1, -0.5, -0.9)),
        ("phi", (0.207233, 0.173287, 0.009482), (-0.09, -0.25, -0.09)),
    ],
)
def test_token_weights_by_hand(
    weighting: TokenWeight, values: tuple[float, ...], slopes: tuple[float, ...]
) -> None:
    """Three tokens of p = 0.1, 0.5, 0.9 and a masked one; the weight takes no gradient."""
    logprobs = torch.tensor([[0.1, 0.5, 0.9, math.nan]], dtype=torch.float64).log()
    logprobs.requires_grad_()
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    losses = token_nll(logprobs, mask, weighting)
    assert losses[0].tolist() == pytest.approx([*values, 0.0], abs=1e-6)
    (grad,) = torch.autograd.grad(losses.sum(), logprobs)
    assert grad[0].tolist() == pytest.approx([*slopes, 0.0], abs=1e-9)


def test_patience_counts_evaluations_without_a_real_improvement() -> None:
    best = BestLoss(min_improvement=0.1)
    losses = [2.0, 1.5, 1.45, 1.44, math.nan, 1.0]
    lowest = [best.after(step, loss) for step, loss in enumerate(losses, start=1)]
    assert lowest == [True, True, True, True, False, True]
    assert (best.loss, best.step, best.since) == (1.0, 6, 0)
    waited = BestLoss(min_improvement=0.1)
    for step, loss in enumerate(losses[:5], start=1):
        waited.after(step, loss)
    assert (waited.loss, waited.step, waited.since) == (1.44, 4, 3)


# --- config --------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"kind": "sft", "inputs": {"model": "base"}}
HELD: dict[str, Any] = {"held_out_fraction": 0.1, "evaluate_every": 5}


def test_a_stage_counts_steps_or_epochs_rows_or_tokens() -> None:
    plain = SftStage.model_validate(BASE)
    assert (plain.steps, plain.epochs, plain.batch_size) == (10, None, 32)
    other = SftStage.model_validate({**BASE, "epochs": 3, "max_tokens_per_batch": 4096})
    assert (other.steps, other.epochs, other.batch_size) == (None, 3, None)
    assert SftStage.model_validate(other.model_dump()) == other, "what a run keeps can be read"
    mixed = SftStage.model_validate({**BASE, "data": ["a.jsonl", {"path": "b.jsonl"}], **HELD})
    assert [source.path for source in mixed.data or ()] == ["a.jsonl", "b.jsonl"]
    one = SftStage.model_validate({**BASE, "data": "a.jsonl", "held_out": "b.jsonl"})
    assert one.outside_paths() == {"data.0.path": "a.jsonl", "held_out": "b.jsonl"}
    hub = SftStage.model_validate({**BASE, "data": "hub:HuggingFaceH4/ultrachat_200k"})
    assert hub.outside_paths() == {}


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"steps": 5, "epochs": 2}, "steps and epochs"),
        ({"steps": None}, "neither steps nor epochs"),
        ({"batch_size": 4, "max_tokens_per_batch": 99}, "batch_size and max_tokens_per_batch"),
        ({"evaluate_every": 5}, "held_out_fraction"),
        ({"loss_on": "all"}, "loss_on: all is for conversations in `data`, and of the task's"),
        ({"held_out_fraction": 0.1, "early_stopping": {}}, "needs evaluate_every"),
        ({"held_out_fraction": 0.1, "keep_best": True}, "needs evaluate_every"),
        ({**HELD, "held_out": "x.jsonl"}, "exclude each other"),
        ({"data": [{"path": "a", "weight": 2}, "b"]}, "some sources of data have a weight"),
        ({"data": []}, "at least 1"),
        ({"data": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"data": "a", "inputs": {"model": "base", "dataset": "d"}}, "inputs.dataset"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    fields: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ValueError, match=reported):
        SftStage.model_validate({**BASE, **fields})
