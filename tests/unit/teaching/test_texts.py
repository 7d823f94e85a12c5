"""Teachers of other tokenizers: how two tokenisations are aligned, and what `uld` learns."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.contracts import (
    Aggregator,
    DistillationLoss,
    RowLoss,
    TeacherRows,
    TextLoss,
)
from posttrain.core.data.token_bytes import Rereader, TokenBytes, matched_tokens
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.core.kit.tiny import (
    BARE_TEMPLATE,
    END,
    SPECIAL,
    START,
    make_byte_tokenizer,
    make_tiny_bpe_tokenizer,
    make_tiny_model,
    make_tiny_tokenizer,
)
from posttrain.core.math.alignment import align, members, products, whole_groups
from posttrain.core.math.divergence import divergence, sorted_distance
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.exact_kl import over_logits
from posttrain.core.training.learner import Learner
from posttrain.core.training.objective import DistillationTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.teacher_texts import TeacherReader
from posttrain.core.training.teachers import LocalTeacher, Routing, Teachers
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Message, Problem
from tests.helpers.plugins import MANAGER
from tests.helpers.rollouts import assert_same_gradient, load_tiny
from tests.helpers.updates import gradient

# --- alignment --------------------------------------------------------------------------------

CUTS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(CUTS, CUTS, st.booleans())
def test_groups_end_at_the_same_byte_and_are_as_short_as_that_allows(
    first: list[int], second: list[int], whole: bool
) -> None:
    sides = [list(accumulate(first)), list(accumulate(second))]
    if whole:  # of one text
        end = max(side[-1] for side in sides)
        sides = [side if side[-1] == end else [*side, end] for side in sides]
    groups = align(*sides)
    count = max(groups[0]) + 1
    assert count == max(groups[1]) + 1
    ends = [
        [max(e for e, g in zip(*side, strict=True) if g == n) for n in range(count)]
        for side in zip(sides, groups, strict=True)
    ]
    assert ends[0] == ends[1]
    for own in groups:
        grouped = [g for g in own if g >= 0]
        assert grouped == sorted(grouped) and own == [*grouped, *[-1] * (len(own) - len(grouped))]
    if whole:
        # Cover all but tokens of no bytes, and are never cut finer by both tokenisations.
        assert max(ends[0], default=0) == max(sides[0])
        both = {e for e in sides[0] if e > 0} & {e for e in sides[1] if e > 0}
        assert both <= set(ends[0])


def test_the_groups_of_the_recorded_offsets() -> None:
    assert align([3, 5, 8, 10], [5, 6, 8, 10]) == ([0, 0, 1, 2], [0, 1, 1, 2])


def test_a_group_with_a_token_that_takes_no_loss_is_left_out() -> None:
    group = torch.tensor([[0, 0, 1, 2, -1], [0, 1, 1, -1, -1]])
    mask = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    keys = whole_groups(group, mask)
    assert keys.tolist() == [1, 2, 5, 6]
    found = members(group, keys, 5, "last")
    assert (found.rows.tolist(), found.columns.tolist()) == ([0, 0, 1, 1], [2, 3, 0, 2])
    assert members(group, keys, 5, "first").columns.tolist() == [2, 3, 0, 1]
    assert (found.other_columns.tolist(), found.other_group.tolist()) == ([1], [3])
    logprobs = torch.tensor([0.5]).log()
    assert products(logprobs, found.other_group, 4).tolist() == [1, 1, 1, 0.5]


# --- tokens as bytes --------------------------------------------------------------------------


def make_piece_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """SentencePiece's way: spaces are ▁, bytes stand for characters that it has not."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(["the sum of two numbers is the answer"] * 2, trainer)
    held = json.loads(tokenizer.to_str())
    held["added_tokens"] = []  # bytes are pieces of the vocabulary, not special tokens
    made = Tokenizer.from_str(json.dumps(held))
    tokenizer_class: Any = PreTrainedTokenizerFast  # Any: its constructor is not typed
    fast: PreTrainedTokenizerFast = tokenizer_class(
        tokenizer_object=made, bos_token=START, eos_token=END, chat_template=BARE_TEMPLATE
    )
    return fast


@cache
def chat(name: str) -> ChatTokenizer:
    makers: dict[str, Any] = {
        "characters": make_tiny_tokenizer,
        "byte-level": make_tiny_bpe_tokenizer,
        "bytes": make_byte_tokenizer,
        "pieces": lambda: make_piece_tokenizer("never"),
        "pieces with a space in front": lambda: make_piece_tokenizer("first"),
    }
    return ChatTokenizer(makers[name](), None)


@cache
def reader(own: str, other: str) -> Rereader:
    return Rereader.of(chat(own), chat(other))


COMPLETE = ("byte-level", "bytes", "pieces", "pieces with a space in front")
TEXT = st.text(st.sampled_from("the sum of 42é漢😀\n <|im_end|>"), max_size=25)


@pytest.mark.parametrize("own", COMPLETE)
@pytest.mark.parametrize("other", [*COMPLETE, "characters"])
@given(text=TEXT)
def test_groups_write_the_same_bytes_in_both(own: str, other: str, text: str) -> None:
    found = reader(own, other)
    ids = chat(own).encode_response(text)
    made = found.read(ids)
    assert found.own.readable(ids) or not text
    mine, theirs = (
        _by_group(side.readable(tokens), groups)
        for side, tokens, groups in (
            (found.own, ids, made.groups),
            (found.other, made.ids, made.other_groups),
        )
    )
    if "in front" in own + other and mine and theirs[0] != mine[0]:
        assert theirs[0].lstrip(b" ") == mine[0].lstrip(b" ")  # the space is nobody's text
        mine[0] = theirs[0]
    assert mine == theirs
    assert made.ids[-1] == chat(other).turn_end.token
    written = b"".join(found.own.readable(ids))
    if other in COMPLETE:
        assert b"".join(mine).lstrip(b" ") == written.lstrip(b" ")
        assert -1 not in made.groups[: len(found.own.readable(ids))]
    whole = ids[-1] in found.own.ends and b"".join(theirs).lstrip(b" ") == written.lstrip(b" ")
    if whole and len(found.other.readable(made.ids)) == len(made.ids) - 1:
        last = max(made.groups)
        assert made.groups.index(last) == len(ids) - 1, "the end is a group of its own"
        assert made.other_groups.index(last) == len(made.ids) - 1
    else:
        assert made.groups[-1] == -1, "the end is in no group where the texts differ"


def _by_group(pieces: list[bytes], groups: list[int]) -> list[bytes]:
    found: dict[int, bytes] = {}
    for piece, group in zip(pieces, groups, strict=False):
        if group >= 0:
            found[group] = found.get(group, b"") + piece
    return [found[n] for n in sorted(found)]


def test_only_an_end_that_was_sampled_is_a_group() -> None:
    ids = chat("bytes").encode_response("ab")
    found = reader("bytes", "byte-level")
    assert found.read(ids).groups == [0, 1, 2]
    assert found.read(ids[:-1]).groups == [0, 1], "cut by the length limit"
    assert -1 not in found.read(ids).other_groups
    assert found.read(ids[:-1]).other_groups[-1] == -1


def test_ends_of_other_names_are_a_pair() -> None:
    own = TokenBytes((b"a", b"b", None, None), {2: "<end>", 3: "<eos>"}, frozenset({2, 3}), 2)
    other = TokenBytes((None, b"b", b"c"), {0: "</s>"}, frozenset({0}), 0)
    assert matched_tokens(own, other).tolist() == [[2, 0], [1, 1]]
    same = TokenBytes((None, b"b", b"c"), {0: "<eos>"}, frozenset({0}), 0)
    assert matched_tokens(own, same).tolist() == [[3, 0], [1, 1]], "a name comes first"


def test_what_is_no_text_is_read_up_to_there() -> None:
    tokens = chat("bytes")
    broken = [*tokens.encode_response("ab")[:-1], *tokens.encode_response("é")[:1]]
    made = reader("bytes", "byte-level").read([*broken, *tokens.encode_response("c")])
    assert made.groups == [0, 1, -1, -1, -1]
    controlled = [*tokens.encode_response("ab"), *tokens.encode_response("c")]
    assert reader("bytes", "byte-level").read(controlled).groups == [0, 1, -1, -1, -1]


def test_a_tokenizer_that_lacks_a_character_agrees_up_to_it() -> None:
    made = reader("byte-level", "characters").read(chat("byte-level").encode_response("né2"))
    assert made.groups[0] == 0 and set(made.groups[1:]) == {-1}
    assert made.other_groups == [0, -1, -1, -1]


@pytest.mark.parametrize("own", ["characters", *COMPLETE])
def test_matched_tokens_write_the_same(own: str) -> None:
    found = reader(own, "byte-level")
    pairs = matched_tokens(found.own, found.other).tolist()
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs) > 20
    for mine, theirs in pairs:
        piece, name = found.own.pieces[mine], found.own.names.get(mine)
        assert (piece, name) == (found.other.pieces[theirs], found.other.names.get(theirs))
        assert (piece is None) is (name is not None)
    if own != "pieces":
        tokens = [chat(each).tokenizer.convert_tokens_to_ids(END) for each in (own, "byte-level")]
        assert tokens in pairs or "pieces" in own
    # A character, not the byte that stands for it where there is none.
    letters = [chat(each).encode_response("2")[0] for each in (own, "byte-level")]
    assert letters in pairs or "pieces" in own


def test_a_tokenizer_that_joins_words_by_itself_is_refused() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ResourceError, match="neither byte-level nor SentencePiece's"):
        TokenBytes.of(ChatTokenizer(tokenizer, None))


# --- the loss on rows -------------------------------------------------------------------------

S, T = [0.5, 0.3, 0.2], [0.1, 0.6, 0.2, 0.1]


def row(fields: dict[str, Any], **more: Tensor) -> float:
    loss = MANAGER.build(DistillationLoss, "uld", fields)
    said = TeacherRows(
        torch.tensor([0]),
        torch.tensor([T], dtype=torch.float64).log(),
        matched=torch.tensor([[0, 1], [1, 0]]),
        **more,
    )
    return float(loss.rows(torch.tensor([S], dtype=torch.float64).log(), said).loss)


def test_worked_numbers() -> None:
    # |.5 - .6| + |.3 - .2| + |.2 - .1| + |0 - .1|
    assert row({"hybrid": False}) == pytest.approx(0.4)
    halves = {"others": torch.tensor([0.5]), "teacher_others": torch.tensor([0.5])}
    assert row({"hybrid": False}, **halves) == pytest.approx(0.2)
    # Matched: S (.5, .3) against T (.6, .1); the rest (.2) against (.2, .1), half and half.
    matched = divergence(torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.6, 0.1]]).log(), "jsd")
    assert row({}) == pytest.approx(0.5 * float(matched) + 0.5 * 0.1, abs=1e-6)
    given_weights = {"matched_weight": 2.0, "unmatched_weight": 0.0}
    assert row(given_weights) == pytest.approx(2 * float(matched), abs=1e-6)


@pytest.mark.parametrize("merge", ["bayesian", "observed"])
def test_a_stretch_that_is_one_token_of_the_teacher_makes_its_pieces_rarer(merge: str) -> None:
    """The page warns of this: the teacher's own token for "77" is not one of the policy's."""
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64, requires_grad=True)  # of "7" and "8"
    others = torch.tensor([0.9], dtype=torch.float64, requires_grad=True)  # the other "7"
    says = torch.tensor([[0.02, 0.01, 0.97]], dtype=torch.float64).log()  # "7", "8", "77"
    loss = MANAGER.build(DistillationLoss, "uld", {"merge": merge})
    pairs = torch.tensor([[0, 0], [1, 1]])
    said = TeacherRows(torch.tensor([0]), says, others=others, matched=pairs)
    slope, of_others = torch.autograd.grad(loss.rows(logits, said).loss.sum(), (logits, others))
    assert slope[0, 0] > 0 and of_others > 0  # descent lowers both sevens


def test_sorted_rows_of_other_lengths() -> None:
    first, second = torch.tensor([[0.2, 0.8], [1.0, 0.0]]), torch.tensor([[0.5, 0.1, 0.4]] * 2)
    assert sorted_distance(first, second).tolist() == pytest.approx([0.6, 1.0])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"matched_weight": 1.0}, "give both, or neither"),
        ({"hybrid": False, "matched_weight": 1.0, "unmatched_weight": 1.0}, "remove matched_w"),
    ],
)
def test_weights_that_belong_to_nothing(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MANAGER.build(DistillationLoss, "uld", fields)


# --- in the learner ---------------------------------------------------------------------------

ANSWERS = ("the sum is 42", "numbers 7", "it's 漢 two", "", "is the answer a number?", "1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A policy of bytes, and teachers of other tokenizers, the second one wider."""
    root = tmp_path_factory.mktemp("models")
    made = [
        (make_byte_tokenizer(), 64),
        (make_tiny_bpe_tokenizer(), 64),
        (make_tiny_tokenizer(), 96),
    ]
    return [
        make_tiny_model(root / str(seed), seed=seed, hidden=hidden, init_std=0.3, tokenizer=each)
        for seed, (each, hidden) in enumerate(made)
    ]


def answers() -> RolloutBatch:
    """Two answers to each of three questions; the second one takes no loss."""
    own = chat("bytes")
    questions = [
        Problem(str(i), text, "a", "", {"field": field}, messages=(Message("user", text),))
        for i, (text, field) in enumerate([("what is it?", "a"), ("two", "b"), ("why", "c")])
    ]
    problems = [questions[i // 2] for i in range(len(ANSWERS))]
    responses = [own.encode_response(text) for text in ANSWERS]
    batch = response_batch(
        prompts=[own.encode_prompt(problem) for problem in problems],
        responses=responses,
        group_ids=[i // 2 for i in range(len(ANSWERS))],
        pad_token_id=0,
        problems=problems,
        response_logprobs=[[-1.0] * len(r) for r in responses],
    )
    mask = batch.mask.clone()
    mask[1] = 0
    mask[2, 3] = 0
    return batch.with_columns(mask=mask, advantages=torch.zeros(mask.shape))


def make_learner(
    folders: list[Path], fields: dict[str, Any], names: tuple[str, ...], micro: int
) -> tuple[Learner, Teachers]:
    model = load_tiny(folders[0])
    loss = MANAGER.build(DistillationLoss, "uld", fields)
    mean = MANAGER.build(Aggregator, "seq-mean-token-mean")
    readers = [reader("bytes", other) for other in ("byte-level", "characters")[: len(names)]]
    learner = Learner(
        model,
        MasterOptimizer(model, OptimizerSection(learning_rate=1e-3, max_grad_norm=None), 10),
        Objective((), mean, distillation=DistillationTerm(loss, mean, coef=2.0)),
        UpdateSettings(1, 1, micro, temperature=0.7, seed=0),
        teachers={name: load_tiny(folders[1 + i]) for i, name in enumerate(names)},
        matched={n: matched_tokens(r.own, r.other) for n, r in zip(names, readers, strict=True)},
    )
    routing = Routing("field", {"a": 0, "b": 1}, "skip") if len(names) > 1 else None
    return learner, Teachers(
        {name: LocalTeacher(name) for name in names},
        routing,
        readers=tuple(TeacherReader(each, 512) for each in readers),
    )


def by_hand(learner: Learner, batch: RolloutBatch, of_rows: dict[int, str]) -> list[Tensor]:
    """Whole sequences one at a time, and each group by itself, from the texts."""
    term = learner.objective.distillation
    assert term is not None and isinstance(term.loss, TextLoss)
    tokenizers = {"a": chat("byte-level"), "b": chat("characters")}
    learner.optimizer.close()
    per_row = []
    for row_index, name in of_rows.items():
        theirs, teacher = tokenizers[name], learner.teachers[name]
        assert teacher is not None
        text = ANSWERS[row_index]
        sides = []
        for tokenizer, model in ((chat("bytes"), learner.model), (theirs, teacher)):
            prompt = tokenizer.encode_prompt(batch.problems[row_index])
            response = tokenizer.encode_response(text)
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            pieces = TokenBytes.of(tokenizer).readable(response)
            sides.append((logits / 0.7, response, pieces))
        groups = align(*(list(accumulate(map(len, pieces))) for _, _, pieces in sides))
        if b"".join(sides[0][2]) == b"".join(sides[1][2]):  # both read to the end
            end = max(groups[0], default=-1) + 1
            groups = [*groups[0], end], [*groups[1], end]
        values = []
        for n in range(max(groups[0], default=-1) + 1):
            parts = []
            for (logits, response, _), own in zip(sides, groups, strict=True):
                tokens = [i for i, g in enumerate(own) if g == n]
                base = tokens[-1] if term.loss.at == "last" else tokens[0]
                others = torch.ones(1, dtype=logits.dtype)
                for i in tokens:
                    if i != base:
                        others = others * torch.softmax(logits[i], -1)[response[i]].clamp(min=1e-8)
                parts.append((logits[base][None], others))
            if not batch.mask[row_index][[i for i, g in enumerate(groups[0]) if g == n]].all():
                continue
            said = TeacherRows(
                torch.tensor([0]),
                parts[1][0].detach(),
                others=parts[0][1],
                teacher_others=parts[1][1].detach(),
                matched=learner.matched[name],
            )
            values.append(term.loss.rows(parts[0][0], said).loss.squeeze())
        if values:
            per_row.append(torch.stack(values).mean())
    (term.coef * torch.stack(per_row).mean()).backward()  # type: ignore[no-untyped-call]
    held = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    learner.model.zero_grad()
    return held


@pytest.mark.parametrize(
    "fields", [{}, {"merge": "observed"}, {"hybrid": False}], ids=["hybrid", "observed", "sorted"]
)
@pytest.mark.parametrize("micro", [1, 4, 16])
def test_the_gradient_is_that_of_whole_sequences_whatever_the_split(
    folders: list[Path], fields: dict[str, Any], micro: int
) -> None:
    learner, teachers = make_learner(folders, fields, ("a",), micro)
    ready = ColumnFiller(learner, teachers).fill_for_update(answers(), 1, 0.0)
    wanted = by_hand(learner, answers(), dict.fromkeys(range(len(ANSWERS)), "a"))
    assert_same_gradient(gradient(learner, ready.batch), wanted, 1e-5)
    assert ready.metrics["distil/tokens_per_stretch"] > 1.5
    assert ready.metrics["distil/aligned_frac"] == 1


def test_each_row_is_read_by_the_teacher_of_its_problem(folders: list[Path]) -> None:
    learner, teachers = make_learner(folders, {}, ("a", "b"), 3)
    ready = ColumnFiller(learner, teachers).fill_for_update(answers(), 1, 0.0).batch
    assert ready.column("teacher_id").tolist() == [0, 0, 1, 1, -1, -1]
    # The character tokenizer has no 漢: row 2 is compared up to it.
    wanted = by_hand(learner, answers(), {0: "a", 1: "a"} | {2: "b", 3: "b"})
    assert_same_gradient(gradient(learner, ready), wanted, 1e-5)


def test_a_teacher_that_cannot_read_all_of_a_response_does_not_judge_it(
    folders: list[Path],
) -> None:
    learner, teachers = make_learner(folders, {}, ("a",), 3)
    batch, their = answers(), chat("byte-level")
    lengths = [
        len(their.encode_prompt(problem)) + len(their.encode_response(text))
        for problem, text in zip(batch.problems, ANSWERS, strict=True)
    ]
    short = replace(teachers.readers[0], max_length=sorted(lengths)[3])
    filled, metrics = replace(teachers, readers=(short,)).fill(answers(), set(), learner)
    skipped = (filled.column("teacher_id") < 0).tolist()
    assert skipped == [length > short.max_length for length in lengths] and any(skipped)
    assert metrics["distil/skipped_frac"] == metrics["distil/context_too_long_frac"] > 0
    assert torch.cat(gradient(learner, filled)[:1]).isfinite().all()


def test_where_the_teacher_can_read_nothing_there_is_no_gradient(folders: list[Path]) -> None:
    learner, teachers = make_learner(folders, {}, ("a",), 4)
    short = replace(teachers.readers[0], max_length=5)
    filled, metrics = replace(teachers, readers=(short,)).fill(answers(), set(), learner)
    assert metrics["distil/skipped_frac"] == 1 and metrics["distil/aligned_frac"] == 0
    assert not any(grad.any() for grad in gradient(learner, filled))


def test_an_update_moves_the_policy_towards_the_teacher(folders: list[Path]) -> None:
    learner, teachers = make_learner(folders, {}, ("a",), 16)
    ready = ColumnFiller(learner, teachers).fill_for_update(answers(), 1, 0.0).batch
    apart = [learner.update(ready, step, 0.0).metrics["distil/divergence"] for step in range(1, 6)]
    assert apart[-1] < apart[0]


def test_logits_are_made_in_chunks(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    learner, teachers = make_learner(folders, {}, ("a",), 16)
    term, ready = learner.objective.distillation, teachers.fill(answers(), set(), learner)[0]
    assert term is not None
    wanted, sizes, rows_of = gradient(learner, ready), [], term.loss.rows

    def counted(logits: Tensor, teacher: TeacherRows) -> RowLoss:
        sizes.append(len(logits))
        return rows_of(logits, teacher)

    monkeypatch.setattr(term.loss, "rows", counted)
    monkeypatch.setattr(over_logits, "__kwdefaults__", {"chunk": 3})
    assert_same_gradient(gradient(learner, ready), wanted)
    assert max(sizes) == 3 and len(sizes) > 3


def test_control_tokens_are_those_of_the_special_list() -> None:
    assert set(TokenBytes.of(chat("characters")).names.values()) == set(SPECIAL)
