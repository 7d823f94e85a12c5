"""A teacher's record: answers as tokens, and what the teacher says of each, in bounded files.

A folder holds `index.json`, which is written last, and files of some number of answers, each of
which is there whole or not at all. A reader opens one file at a time and reads the rows it needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PromptGroup
from posttrain.core.data.problems import problem_from_json, problem_to_json
from posttrain.core.data.tokens import ChatTokenizer, response_batch
from posttrain.core.data.vocabulary import logits_of, vocabulary_of
from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import WrongContent, read_json, write_bytes, write_text
from posttrain.core.store.manifests import file_digest
from posttrain.core.types import Problem

INDEX, VERSION = "index.json", 1
COLUMNS = ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs")
AGAIN = "make it again with a stage `record_teacher`"


class RecordedFile(BaseModel):
    """One file of a record: how many answers and tokens of answers it has, and its digest."""

    model_config = ConfigDict(extra="forbid")

    name: str
    rows: int
    tokens: int
    sha256: str


class RecordIndex(BaseModel):
    """What a record holds, and whose.

    `teacher` names the model and `teacher_digest` its files. `vocabulary_size` and `_digest` are
    its tokenizer's, `logits` the width of its output. Log-probs are nats at `temperature`, over the
    whole vocabulary.
    """

    model_config = ConfigDict(extra="forbid")

    version: int
    teacher: str
    teacher_digest: str
    vocabulary_size: int
    vocabulary_digest: str
    logits: int | None
    answers: Literal["worked", "sampled"]
    temperature: float
    top_k: int
    columns: list[str]
    files: list[RecordedFile]


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """Answers with what a teacher said of them, as lists of one length.

    Of each answer: its problem, the tokens of prompt and answer, whether the length limit cut it,
    the teacher's log-probs [T], its candidates' ids and log-probs [T, K].
    """

    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    truncated: Sequence[bool]
    logprobs: Sequence[Tensor]
    topk_ids: Sequence[Tensor]
    topk_logprobs: Sequence[Tensor]


def file_name(number: int) -> str:
    """The name of the file `number` of a record, from 0."""
    return f"rows-{number:05d}.safetensors"


def write_rows(path: Path, rows: RecordedRows) -> None:
    """Write a file of a record: after a crash it is there whole, or not at all."""
    texts = "".join(f"{json.dumps(problem_to_json(problem))}\n" for problem in rows.problems)
    tensors = {
        "problems": torch.frombuffer(bytearray(texts.encode()), dtype=torch.uint8),
        "prompt_ids": _flat(rows.prompts),
        "prompt_lengths": torch.tensor([len(ids) for ids in rows.prompts]),
        "response_ids": _flat(rows.answers),
        "response_lengths": torch.tensor([len(ids) for ids in rows.answers]),
        "truncated": torch.tensor(rows.truncated, dtype=torch.uint8),
        "teacher_logprobs": torch.cat(list(rows.logprobs)).float(),
        "teacher_topk_ids": torch.cat(list(rows.topk_ids)).to(torch.int32),
        "teacher_topk_logprobs": torch.cat(list(rows.topk_logprobs)).float(),
    }
    write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def _flat(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int32)


def write_index(
    folder: Path,
    *,
    teacher: str,
    teacher_digest: str,
    model: Path,
    answers: Literal["worked", "sampled"],
    temperature: float,
    top_k: int,
) -> RecordIndex:
    """Complete the record whose files are in `folder`; `model` is the folder of the teacher."""
    vocabulary = vocabulary_of(model.resolve())
    files = [described(path) for path in sorted(folder.glob(file_name(0).replace("00000", "*")))]
    index = RecordIndex(
        version=VERSION,
        teacher=teacher,
        teacher_digest=teacher_digest,
        vocabulary_size=vocabulary.size,
        vocabulary_digest=vocabulary.digest,
        logits=logits_of(model),
        answers=answers,
        temperature=temperature,
        top_k=top_k,
        columns=list(COLUMNS),
        files=files,
    )
    write_text(folder / INDEX, index.model_dump_json(indent=2))
    return index


def described(path: Path) -> RecordedFile:
    """What the index says of a file that `write_rows` wrote."""
    with _opened(path) as tensors:
        lengths = tensors.get_tensor("response_lengths")
    rows, tokens = len(lengths), int(lengths.sum())
    return RecordedFile(name=path.name, rows=rows, tokens=tokens, sha256=file_digest(path))


def read_index(folder: Path) -> RecordIndex:
    """The index of a record. Raises `ResourceError` where there is none, or of another version."""
    try:
        found = RecordIndex.model_validate(read_json(folder / INDEX, RecordIndex))
    except WrongContent as error:
        raise ResourceError(
            f"'{folder}' holds no teacher's record: {INDEX}: {error}; {AGAIN}"
        ) from error
    if found.version != VERSION:
        raise ResourceError(
            f"the record '{folder}' is of version {found.version}, expected {VERSION}; {AGAIN}"
        )
    missing = [name for name in COLUMNS if name not in found.columns]
    if missing:
        raise ResourceError(f"the record '{folder}' has no {', '.join(missing)}; {AGAIN}")
    gone = [file.name for file in found.files if not (folder / file.name).is_file()]
    if gone or not found.files:
        raise ResourceError(f"the record '{folder}' lacks {', '.join(gone) or 'any rows'}; {AGAIN}")
    return found


def check_record(index: RecordIndex, policy: Path, who: str) -> None:
    """Raise `ResourceError` unless the record's tokens are those of the model in `policy`."""
    own, logits = vocabulary_of(policy.resolve()), logits_of(policy)
    recorded = (index.vocabulary_size, index.vocabulary_digest, index.logits)
    if recorded == (own.size, own.digest, logits):
        return
    if own.size != index.vocabulary_size:
        what = f"a tokenizer of {index.vocabulary_size} tokens, and the policy's has {own.size}"
    elif own.digest != index.vocabulary_digest:
        what = f"a tokenizer that gives other ids to its {own.size} tokens than the policy's"
    else:
        what = f"{index.logits} logits, and the policy has {logits}"
    raise ResourceError(
        f"{who}: it was made with {what} ({policy}), so it is about other tokens; record a teacher "
        "of the policy's family"
    )


@dataclass
class TeacherRecord:
    """A record that is read. Prompts and problems are in memory, what a teacher said is not."""

    folder: Path
    index: RecordIndex
    prompts: list[PromptGroup] = field(default_factory=list)
    _places: list[tuple[int, int, int]] = field(default_factory=list)  # file, first token, tokens
    _answers: list[tuple[int, ...]] = field(default_factory=list)
    _cut: list[bool] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> TeacherRecord:
        """The record in `folder`, with its files' digests compared. Raises `ResourceError`."""
        record = cls(folder, read_index(folder))
        for number, file in enumerate(record.index.files):
            if file_digest(folder / file.name) != file.sha256:
                raise ResourceError(
                    f"'{folder / file.name}' is not the file that was recorded; {AGAIN}"
                )
            record._read(number)
        return record

    def _read(self, number: int) -> None:
        with _opened(self.folder / self.index.files[number].name) as tensors:
            found = {
                name: tensors.get_tensor(name)
                for name in (
                    *("problems", "prompt_ids", "prompt_lengths"),
                    *("response_ids", "response_lengths", "truncated"),
                )
            }
        lines = bytes(found["problems"].numpy()).decode().splitlines()
        problems = [problem_from_json(json.loads(line)) for line in lines]
        prompts = _cut(found["prompt_ids"], found["prompt_lengths"])
        self.prompts += [PromptGroup(p, ids) for p, ids in zip(problems, prompts, strict=True)]
        self._answers += _cut(found["response_ids"], found["response_lengths"])
        self._cut += found["truncated"].bool().tolist()
        lengths = found["response_lengths"].tolist()
        starts = accumulate([0, *lengths[:-1]])
        self._places += [(number, at, size) for at, size in zip(starts, lengths, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        rows = zip(self.prompts, self._answers, strict=True)
        return max(len(prompt.prompt_ids) + len(answer) for prompt, answer in rows)

    def batch(self, places: Sequence[int], tokenizer: ChatTokenizer) -> RolloutBatch:
        """The rows at `places`, in that order, each a group of its own, with the columns of
        teachers; log-probs of the policy that sampled are NaN, since there was none.
        """
        answers = [self._answers[place] for place in places]
        texts = [tokenizer.decode_response(ids) for ids in answers]
        batch = response_batch(
            prompts=[self.prompts[place].prompt_ids for place in places],
            responses=answers,
            group_ids=list(range(len(places))),
            pad_token_id=tokenizer.pad_token_id,
            problems=[self.prompts[place].problem for place in places],
            texts=texts,
            transcripts=texts,
            turns=[(text,) for text in texts],
            truncated=[self._cut[place] for place in places],
        )
        shape, k = batch.response_ids.shape, self.index.top_k
        logprobs = torch.full(shape, torch.nan)
        ids = torch.full((*shape, k), -1, dtype=torch.int64)
        values = torch.full((*shape, k), -torch.inf)
        for row, place in enumerate(places):
            number, first, size = self._places[place]
            part = slice(first, first + size)
            with _opened(self.folder / self.index.files[number].name) as tensors:
                said = [tensors.get_slice(name)[part] for name in COLUMNS]
            logprobs[row, :size], ids[row, :size], values[row, :size] = said
        return batch.with_columns(
            teacher_logprobs=logprobs,
            teacher_topk_ids=ids,
            teacher_topk_logprobs=values,
            teacher_id=torch.zeros(len(places), dtype=torch.int64),
        )


def _cut(ids: Tensor, lengths: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in torch.split(ids, lengths.tolist())]


def _opened(path: Path) -> Any:  # Any: safetensors says no more
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ResourceError(
            f"'{path}' of a teacher's record is damaged: {error}; {AGAIN}"
        ) from error
