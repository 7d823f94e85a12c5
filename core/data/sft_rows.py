"""Rows of supervised learning as tokens on disk, and which rows each optimizer step takes.

Tokens lie in files that are mapped into memory; what stays in memory is a few numbers a row. The
order of rows follows from the seed alone, so a stage that goes on takes the same batches.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.formats import Example, Format, examples
from posttrain.core.data.lengths import Ids, LengthRule
from posttrain.core.data.messages import chat_text
from posttrain.core.data.rows import data_rows
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.errors import DataError
from posttrain.core.math.splits import held_out_keys, text_key
from posttrain.core.runtime.seeding import generator
from posttrain.core.types import Message

LossOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """`prompt`: the tokens before the first learned one; `response`: the rest.

    `learned` says of each token of the response whether it is learned; empty = all of them.
    """

    prompt: Ids
    response: Ids
    learned: tuple[bool, ...] = ()

    @property
    def num_learned(self) -> int:
        return sum(self.learned) if self.learned else len(self.response)


def encode_example(
    tokenizer: ChatTokenizer, example: Example, loss_on: LossOn
) -> EncodedRow | None:
    """The tokens of a row and which are learned; None where nothing is to be learned."""
    if example.text:
        return split_at_first(*encode_text(tokenizer, example.text))
    messages, begin = example.messages, example.answer
    if tokenizer.system_prompt is not None and messages[0].role != "system":
        messages, begin = (Message("system", tokenizer.system_prompt), *messages), begin + 1
    answers = [
        number
        for number, message in enumerate(messages)
        if message.role == "assistant" and number >= begin
    ]
    if loss_on == "last_assistant":
        answers = answers[-1:]
    answers = [number for number in answers if messages[number].train]
    if loss_on != "all" and not any(
        messages[n].content or messages[n].tool_calls or messages[n].reasoning for n in answers
    ):
        return None
    try:
        rendered = tokenizer.encode_conversation(messages, example.tools)
    except DataError as error:
        raise DataError(f"{example.where}: {error}") from error
    owners = rendered.message
    if loss_on == "all":
        learned = tuple(owner < 0 or messages[owner].train for owner in owners)
    else:
        pairs = zip(rendered.sampled, owners, strict=True)
        learned = tuple(sampled and owner in answers for sampled, owner in pairs)
    return split_at_first(rendered.token_ids, learned)


def encode_text(tokenizer: ChatTokenizer, text: str) -> tuple[Ids, tuple[bool, ...]]:
    """A plain text with the tokenizer's first and last special tokens, each once; all learned.

    Special tokens in the text count as such: texts of this form are often rendered chats.
    """
    plain = tokenizer.tokenizer
    begun = bool(plain.bos_token) and text.startswith(str(plain.bos_token))
    ids = tuple(plain(text, add_special_tokens=not begun)["input_ids"])
    if ids[-1:] != (tokenizer.eos_token_id,):
        ids = (*ids, tokenizer.eos_token_id)
    return ids, (True,) * len(ids)


def split_at_first(ids: Ids, learned: Sequence[bool]) -> EncodedRow | None:
    """The row in two parts, without what follows the last learned token.

    The very first token is never learned, because nothing predicts it.
    """
    places = [place for place, own in enumerate(learned) if own and place]
    if not places:
        return None
    first, end = places[0], places[-1] + 1
    return EncodedRow(ids[:first], ids[first:end], tuple(learned[first:end]))


def fitted(row: EncodedRow, where: str, rule: LengthRule) -> EncodedRow | None:
    """The row, cut at its end or left out by `rule`."""
    room = rule.answer_room(where, len(row.prompt), len(row.response))
    if room is None or room >= len(row.response):
        return None if room is None else row
    kept = row.learned[:room]
    if row.learned and not any(kept):
        rule.leave_out()
        return None
    return EncodedRow(row.prompt, row.response[:room], kept)


def prompt_key(example: Example) -> str:
    """What one prompt is: the messages before the first answer, or the text itself."""
    if example.text:
        return text_key(example.text)
    roles = [message.role for message in example.messages]
    answers = (n for n, role in enumerate(roles) if n >= example.answer and role == "assistant")
    until = next(answers, len(roles))
    return text_key(chat_text(example.messages[:until], example.tools))


@dataclass(slots=True)
class SourceReport:
    """What was read from one source. `empty` rows have nothing to learn, such as `empty_row`."""

    path: str
    format: Format | None = None
    rows: int = 0
    kept: int = 0
    tokens: int = 0
    learned: int = 0
    empty: int = 0
    empty_row: str = ""

    @property
    def line(self) -> str:
        """For the log."""
        assert self.format is not None
        left_out = f", {self.rows - self.kept} of them left out" if self.kept < self.rows else ""
        return (
            f"{self.path}: {self.rows:,} rows of the format {self.format.name} "
            f"({self.format.shape}){left_out}; {self.tokens:,} tokens, {self.learned:,} learned"
        )

    @property
    def warning(self) -> str:
        """Of rows with nothing to learn; empty if there are none."""
        if not self.empty:
            return ""
        return (
            f"{self.empty} of {self.rows} rows of {self.path}, such as {self.empty_row}, have no "
            "assistant message to learn from (none at all, an empty one, or train: false); they "
            "were left out"
        )

    def check(self) -> None:
        """Raise `DataError` when no row can be learned from."""
        if not self.kept:
            why = self.warning or f"all {self.rows} rows of {self.path} were left out"
            raise DataError(f"{why}: no row is left to learn from; give other data")


def encoded_rows(
    report: SourceReport,
    setting: str,
    tokenizer: ChatTokenizer,
    loss_on: LossOn,
    rule: LengthRule,
    limit: int | None = None,
) -> Iterator[tuple[Example, EncodedRow]]:
    """The rows of a source that can be learned from, at most `limit` are looked at."""
    found = itertools.islice(data_rows(report.path, setting), limit)
    for report.format, example in examples(found):
        report.rows += 1
        row = encode_example(tokenizer, example, loss_on)
        if row is None:
            report.empty += 1
            report.empty_row = report.empty_row or example.where
            continue
        row = fitted(row, example.where, rule)
        if row is not None:
            report.kept += 1
            report.tokens += len(row.prompt) + len(row.response)
            report.learned += row.num_learned
            yield example, row


_KEY = 16


@dataclass
class TokenRows:
    """Rows in the files of `folder`, added one by one and then read in any order.

    `source` numbers where each row comes from; `key` is a digest of its prompt, `content` of all of
    its tokens.
    """

    folder: Path
    tokens: array[int] = field(default_factory=lambda: array("q"))
    prompts: array[int] = field(default_factory=lambda: array("q"))
    learned: array[int] = field(default_factory=lambda: array("q"))
    source: array[int] = field(default_factory=lambda: array("q"))
    _numbers: array[int] = field(default_factory=lambda: array("q"))
    _files: array[int] = field(default_factory=lambda: array("q"))
    _names: dict[str, int] = field(default_factory=dict)
    _keys: bytearray = field(default_factory=bytearray)
    _contents: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._ids_file = (self.folder / "ids").open("wb")
        self._mask_file = (self.folder / "learned").open("wb")

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, row: EncodedRow, where: str, key: str, source: int = 0) -> int:
        """Write the row; returns its number. `where` is `file:number`, or any name."""
        ids = np.array(row.prompt + row.response, dtype=np.int32)
        mask = row.learned or (True,) * len(row.response)
        self._ids_file.write(ids.tobytes())
        self._mask_file.write(bytes(len(row.prompt)) + bytes(mask))
        self.tokens.append(len(ids))
        self.prompts.append(len(row.prompt))
        self.learned.append(row.num_learned)
        self.source.append(source)
        name, _, number = where.rpartition(":")
        known = bool(name) and number.isdecimal()
        self._files.append(self._names.setdefault(name if known else where, len(self._names)))
        self._numbers.append(int(number) if known else -1)
        self._keys += hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:_KEY]
        self._contents += hashlib.sha256(ids.tobytes() + bytes(mask)).digest()[:_KEY]
        return len(self.tokens) - 1

    def finish(self) -> None:
        """All rows are there: read them from now on."""
        self._ids_file.close()
        self._mask_file.close()
        self._starts = np.concatenate([[0], np.cumsum(np.array(self.tokens, dtype=np.int64))])
        self._places = list(self._names)
        total = int(self._starts[-1])
        shape = (total,)
        self._ids = np.memmap(self.folder / "ids", np.int32, "r", shape=shape) if total else None
        self._mask = (
            np.memmap(self.folder / "learned", np.uint8, "r", shape=shape) if total else None
        )

    def key(self, row: int) -> bytes:
        return bytes(self._keys[row * _KEY : (row + 1) * _KEY])

    def content(self, row: int) -> bytes:
        return bytes(self._contents[row * _KEY : (row + 1) * _KEY])

    def name(self, row: int) -> str:
        """Where the row is, as it was added."""
        place, number = self._places[self._files[row]], self._numbers[row]
        return place if number < 0 else f"{place}:{number}"

    def row(self, row: int) -> EncodedRow:
        assert self._ids is not None and self._mask is not None
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        first = start + self.prompts[row]
        return EncodedRow(
            tuple(self._ids[start:first].tolist()),
            tuple(self._ids[first:end].tolist()),
            tuple(self._mask[first:end].astype(bool).tolist()),
        )

    def batch(self, rows: Sequence[int], pad_token_id: int) -> RolloutBatch:
        """The rows as prompts and responses; the mask covers the learned tokens."""
        found = [self.row(row) for row in rows]
        return response_batch(
            prompts=[row.prompt for row in found],
            responses=[row.response for row in found],
            sampled=[row.learned for row in found],
            group_ids=list(range(len(found))),
            pad_token_id=pad_token_id,
            problems=(),
        )

    def held_out(self, rows: Sequence[int], fraction: float) -> set[int]:
        """Those of `rows` whose prompts are held out."""
        chosen = held_out_keys((self.key(row).hex() for row in rows), fraction)
        return {row for row in rows if self.key(row).hex() in chosen}


# --- order ---------------------------------------------------------------------------------------


def epochs_of(
    pools: Sequence[Sequence[int]], weights: Sequence[float] | None, seed: int, *path: str
) -> Iterator[list[int]]:
    """Passes without end: each has as many rows as all `pools` together, in another order.

    Without weights every row comes once in a pass. With them rows are drawn from the pools in
    these proportions, evenly spread; each pool is gone through before any row of it comes again.
    """
    if weights is None:
        rows = [row for pool in pools for row in pool]
        for epoch in itertools.count():
            yield _shuffled(rows, seed, *path, "order", epoch)
        return
    total, size = sum(weights), sum(map(len, pools))
    shares = [weight / total for weight in weights]
    streams = [_endless(pool, seed, *path, "order", n) for n, pool in enumerate(pools)]
    taken = [0] * len(pools)
    for _ in itertools.count():
        rows = []
        for _ in range(size):
            drawn = sum(taken) + 1
            owed = [share * drawn - count for share, count in zip(shares, taken, strict=True)]
            number = owed.index(max(owed))
            taken[number] += 1
            rows.append(next(streams[number]))
        yield rows


def _endless(pool: Sequence[int], seed: int, *path: str | int) -> Iterator[int]:
    for epoch in itertools.count():
        yield from _shuffled(pool, seed, *path, epoch)


def _shuffled(rows: Sequence[int], seed: int, *path: str | int) -> list[int]:
    order = torch.randperm(len(rows), generator=generator(seed, *path))
    return [rows[i] for i in order.tolist()]


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of every optimizer step, in order."""

    order: array[int]
    ends: array[int]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> list[int]:
        begin = self.ends[index - 1] if index else 0
        return list(self.order[begin : self.ends[index]])

    @classmethod
    def of(cls, batches: Iterable[Sequence[int]]) -> Plan:
        order, ends = array("q"), array("q")
        for batch in batches:
            order.extend(batch)
            ends.append(len(order))
        return cls(order, ends)


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How many rows make a batch: at most `rows`, or `tokens`; a longer row is one by itself."""

    rows: int | None
    tokens: int | None
    lengths: Sequence[int]

    def cut(self, rows: Iterable[int]) -> Iterator[list[int]]:
        """The rows in order, in full batches; the last is what remains."""
        batch: list[int] = []
        tokens = 0
        for row in rows:
            length = self.lengths[row]
            full = self.rows is not None and len(batch) == self.rows
            if batch and (full or (self.tokens is not None and tokens + length > self.tokens)):
                yield batch
                batch, tokens = [], 0
            batch.append(row)
            tokens += length
        if batch:
            yield batch

    def plan(
        self, passes: Iterator[Sequence[int]], *, steps: int | None, epochs: int | None
    ) -> Plan:
        """So many steps, through passes without a break, or so many passes, each cut by itself."""
        if epochs is not None:
            return Plan.of(
                batch for rows in itertools.islice(passes, epochs) for batch in self.cut(rows)
            )
        assert steps is not None
        flowing = self.cut(row for rows in passes for row in rows)
        return Plan.of(itertools.islice(flowing, steps))
