"""Preference pairs and labelled answers as token ids, and pairs of solutions that were marked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from posttrain.core.contracts.preference_rows import Answer, PreferenceRow
from posttrain.core.data.lengths import Ids, LengthRule
from posttrain.core.errors import DataError
from posttrain.core.math.splits import held_out_keys, loose_key
from posttrain.core.runtime.json_files import JsonRow
from posttrain.core.types import Message

if TYPE_CHECKING:
    from posttrain.core.data.tokens import ChatTokenizer


EXAMPLE = '{"question": ..., "<model>": {"is_correct": true, "solution": ...}}'
"""A line of GSM8K's example_model_solutions.jsonl, which has a field for each model."""


class MarkedSolution(NamedTuple):
    """One model's solution to a question and what it was marked."""

    model: str
    solution: str
    correct: bool


def solutions_of(row: JsonRow) -> tuple[str, list[MarkedSolution]]:
    """The question of a line and its marked solutions; raises `DataError` for another form."""
    question = row.values.get("question")
    found = [
        MarkedSolution(model, value["solution"], value["is_correct"])
        for model, value in row.values.items()
        if isinstance(value, dict)
        and isinstance(value.get("solution"), str)
        and isinstance(value.get("is_correct"), bool)
    ]
    if not isinstance(question, str) or not question.strip() or not found:
        raise DataError(
            f"{row.where} has the fields {sorted(row.values)}, expected {EXAMPLE}: correct this "
            "line or give another file"
        )
    return question, found


def marked_pairs(
    rows: Sequence[JsonRow],
    template: str,
    held_out: Collection[str],
    per_question: int,
    restyle: Callable[[str], str],
) -> list[PreferenceRow]:
    """At most `per_question` pairs of each question whose `loose_key` is not in `held_out`.

    A pair is a right solution and a wrong one, each through `restyle`; each solution is used as
    evenly as possible. `template` holds {question}. Raises `DataError` when no pair is left.
    """
    pairs: list[PreferenceRow] = []
    skipped = 0
    for row in rows:
        question, solutions = solutions_of(row)
        if loose_key(question) in held_out:
            skipped += 1
            continue
        right = list(dict.fromkeys(restyle(s.solution) for s in solutions if s.correct))
        wrong = list(dict.fromkeys(restyle(s.solution) for s in solutions if not s.correct))
        prompt = template.replace("{question}", question)
        for chosen, rejected in _diagonal(right, wrong, per_question):
            pairs.append(PreferenceRow.of_texts(row.where, prompt, chosen, rejected))
    if not pairs:
        raise DataError(
            f"{rows[0].where.rpartition(':')[0]} gives no pair of a right and a wrong solution: "
            f"{skipped} of its {len(rows)} questions are held out; hold out fewer, or give "
            "another file"
        )
    return pairs


def _diagonal(right: list[str], wrong: list[str], count: int) -> Iterator[tuple[str, str]]:
    """Up to `count` different (right, wrong) combinations, no solution again before its turn."""
    combinations = (
        (solution, wrong[(i + shift) % len(wrong)])
        for shift in range(len(wrong))
        for i, solution in enumerate(right)
    )
    return itertools.islice(combinations, count)


Learned = tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids of a prompt and of two answers to it, the better one first.

    `key` names the prompt; `margin` is by how much chosen is better, in the data's own unit (0 =
    not said). `*_learned` say of each token of an answer whether it is learned from, in answers of
    several turns; empty = all are.
    """

    key: str
    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    margin: float = 0.0
    chosen_learned: Learned = ()
    rejected_learned: Learned = ()


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """Token ids of a prompt and of one answer, and whether the answer is wanted.

    `answer_learned` as in `Pair`.
    """

    key: str
    prompt_ids: Ids
    answer_ids: Ids
    desirable: bool
    answer_learned: Learned = ()


class _Keyed(Protocol):
    @property
    def key(self) -> str: ...


KeyedT = TypeVar("KeyedT", bound=_Keyed)


def tokenise_pairs(
    rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer, rule: LengthRule
) -> list[Pair]:
    """Token ids of pairs, those that are too long cut or left out by `rule`."""
    pairs = []
    for row in rows:
        prompt, (chosen, rejected) = encode_row(row, tokenizer)
        if chosen.token_ids == rejected.token_ids:
            raise DataError(
                f"{row.where}: 'chosen' and 'rejected' are the same tokens as the model's chat "
                "template writes them, without the blanks or the reasoning in which they differ: "
                "remove this line"
            )
        pairs.append(
            Pair(
                row.key,
                prompt,
                chosen.token_ids,
                rejected.token_ids,
                row.margin,
                chosen.learned,
                rejected.learned,
            )
        )
    return fitting_pairs(pairs, rule)


def fitting_pairs(pairs: Sequence[Pair], rule: LengthRule) -> list[Pair]:
    """Pairs of which prompt and longer answer fit, cut or left out by `rule`."""
    found = []
    for pair in pairs:
        longer = max(len(pair.chosen_ids), len(pair.rejected_ids))
        room = rule.answer_room(f"{pair.key[:60]!r}", len(pair.prompt_ids), longer)
        if room is None:
            continue
        cut = replace(
            pair,
            chosen_ids=pair.chosen_ids[:room],
            rejected_ids=pair.rejected_ids[:room],
            chosen_learned=pair.chosen_learned[:room],
            rejected_learned=pair.rejected_learned[:room],
        )
        says_nothing = cut.chosen_ids == cut.rejected_ids or not (
            _any_learned(cut.chosen_learned) and _any_learned(cut.rejected_learned)
        )
        if room < longer and says_nothing:
            rule.leave_out()
            continue
        found.append(cut)
    return found


def tokenise_labelled(
    rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer, rule: LengthRule
) -> list[LabelledAnswer]:
    """Token ids of labelled answers, those that are too long cut or left out by `rule`."""
    answers = []
    for row in rows:
        prompt, (answer,) = encode_row(row, tokenizer)
        answers.append(
            LabelledAnswer(row.key, prompt, answer.token_ids, bool(row.label), answer.learned)
        )
    return fitting_labelled(answers, rule)


def fitting_labelled(rows: Sequence[LabelledAnswer], rule: LengthRule) -> list[LabelledAnswer]:
    """Labelled answers that fit with their prompt, cut or left out by `rule`."""
    found = []
    for row in rows:
        room = rule.answer_room(f"{row.key[:60]!r}", len(row.prompt_ids), len(row.answer_ids))
        if room is None:
            continue
        learned = row.answer_learned[:room]
        if room < len(row.answer_ids) and not _any_learned(learned):
            rule.leave_out()
            continue
        found.append(replace(row, answer_ids=row.answer_ids[:room], answer_learned=learned))
    return found


def _any_learned(learned: Learned) -> bool:
    return not learned or any(learned)


class EncodedAnswer(NamedTuple):
    """Tokens of an answer; `learned` is empty where all are learned from."""

    token_ids: Ids
    learned: Learned = ()


def encode_row(
    row: PreferenceRow, tokenizer: ChatTokenizer
) -> tuple[Ids, tuple[EncodedAnswer, ...]]:
    """Token ids of the prompt, and of each answer with its end, as the chat template has them."""
    try:
        prompt = tokenizer.encode_chat(row.prompt, row.tools)
        return prompt, tuple(_encode_answer(row, answer, tokenizer) for answer in row.answers)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error


def _encode_answer(row: PreferenceRow, answer: Answer, tokenizer: ChatTokenizer) -> EncodedAnswer:
    """An answer's turns one after another, as a rollout would have them: earlier tokens stay."""
    said, ids, learned = list(row.prompt), list[int](), list[bool]()
    others: list[Message] = []
    for message in answer:
        if message.role != "assistant":
            others.append(message)
            continue
        if others:
            more = tokenizer.extend(others, row.tools, ended=True, last=ids[-1])
            ids, learned = [*ids, *more], [*learned, *[False] * len(more)]
            said, others = [*said, *others], []
        own = tokenizer.encode_answer(said, message, row.tools)
        ids, learned = [*ids, *own], [*learned, *[message.train] * len(own)]
        said.append(message)
    return EncodedAnswer(tuple(ids), () if all(learned) else tuple(learned))


def split_by_prompt(
    rows: Sequence[KeyedT], held_out_fraction: float
) -> tuple[list[KeyedT], list[KeyedT]]:
    """Training and held-out rows; all rows of one prompt land on the same side."""
    kept_out = held_out_keys([row.key for row in rows], held_out_fraction)
    train = [row for row in rows if row.key not in kept_out]
    return train, [row for row in rows if row.key in kept_out]


def batches(num_rows: int, batch_size: int, generator: torch.Generator) -> list[list[int]]:
    """Row indices of every mini-batch of an epoch: shuffled, of nearly equal size."""
    order = torch.randperm(num_rows, generator=generator)
    return [part.tolist() for part in order.tensor_split(-(-num_rows // batch_size))]


def mismatched_answers(rows: Sequence[LabelledAnswer]) -> list[LabelledAnswer]:
    """For each row a row with an answer to another prompt of the mini-batch: KTO's z_ref is
    measured on these answers.

    Prompts are taken in order of appearance, and each row gets an answer to the next prompt. Raises
    `DataError` when all rows have one prompt.
    """
    answers: dict[str, list[LabelledAnswer]] = {}
    for row in rows:
        answers.setdefault(row.key, []).append(row)
    if len(answers) < 2:
        raise DataError(
            f"a mini-batch of {len(rows)} row(s) holds one prompt only, but KTO's reference point "
            "needs an answer to another prompt: raise batch_size, or add rows with other prompts"
        )
    keys = list(answers)
    following = dict(zip(keys, keys[1:] + keys[:1], strict=True))
    taken: dict[str, int] = dict.fromkeys(keys, 0)
    found = []
    for row in rows:
        pool = answers[following[row.key]]
        found.append(pool[taken[row.key] % len(pool)])
        taken[row.key] += 1
    return found


def make_pairs(
    key: str,
    prompt_ids: Sequence[int],
    answers: Sequence[tuple[Ids, bool]],
    max_pairs: int,
) -> list[Pair]:
    """Pairs of distinct (right, wrong) answers to one prompt; none when all are alike."""
    distinct = dict(answers)
    right = [ids for ids, correct in distinct.items() if correct]
    wrong = [ids for ids, correct in distinct.items() if not correct]
    return [
        Pair(key, tuple(prompt_ids), chosen, rejected)
        for chosen, rejected in _balanced(right, wrong)[:max_pairs]
    ]


def scored_pairs(
    key: str,
    prompt_ids: Sequence[int],
    answers: Sequence[tuple[Ids, float]],
    max_pairs: int,
) -> list[Pair]:
    """The best of the distinct answers with the worst, the second best with the second worst, ...

    At most `max_pairs`, each of two answers whose scores differ, by which the margin says how much.
    Of answers with one score those that come first count as better, so that each is used once.
    """
    ranked = sorted(dict(answers).items(), key=lambda one: -one[1])
    pairs = []
    for i in range(min(max_pairs, len(ranked) // 2)):
        (chosen, high), (rejected, low) = ranked[i], ranked[-1 - i]
        if high > low:
            pairs.append(Pair(key, tuple(prompt_ids), chosen, rejected, high - low))
    return pairs


def _balanced(right: Sequence[Ids], wrong: Sequence[Ids]) -> list[tuple[Ids, Ids]]:
    """All (right, wrong) combinations, of which the first reuse answers as evenly as possible."""
    around = range(math.lcm(len(right), len(wrong)))  # both in turn, until the first pair comes
    in_turn = [(right[i % len(right)], wrong[i % len(wrong)]) for i in around]
    return list(dict.fromkeys([*in_turn, *itertools.product(right, wrong)]))


def as_labelled(pairs: Sequence[Pair]) -> list[LabelledAnswer]:
    rows = [
        LabelledAnswer(pair.key, pair.prompt_ids, ids, desirable, learned)
        for pair in pairs
        for ids, desirable, learned in (
            (pair.chosen_ids, True, pair.chosen_learned),
            (pair.rejected_ids, False, pair.rejected_learned),
        )
    ]
    return list(dict.fromkeys(rows))
