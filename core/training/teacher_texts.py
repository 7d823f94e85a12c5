"""What a teacher with a tokenizer of its own reads: the problem and the response, in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.token_bytes import ReadAnew, Rereader
from posttrain.core.data.tokens import pad_left, pad_right
from posttrain.core.math.alignment import NO_GROUP
from posttrain.core.math.teacher_gap import taught


@dataclass(frozen=True, slots=True)
class TeacherReader:
    """A teacher that can read `max_length` tokens of prompt and response, in tokens of its own."""

    reader: Rereader
    max_length: int


def read_by_teachers(
    batch: RolloutBatch, teacher_id: Tensor, readers: Sequence[TeacherReader]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Columns with what the teacher `teacher_id` [B] of each row reads, and metrics.

    A row whose teacher cannot read all of it has none: its `teacher_id` becomes -1.
    """
    prompts: dict[tuple[int, int], tuple[int, ...]] = {}
    shown: list[tuple[tuple[int, ...], ReadAnew]] = []
    teacher_id, too_long = teacher_id.clone(), 0
    for row, place in enumerate(teacher_id.tolist()):
        # A row without a teacher is read as well, by the first one, and counts for nothing.
        own = readers[max(place, 0)]
        tokenizer, key = own.reader.tokenizer, (place, int(batch.group_id[row]))
        if key not in prompts:
            prompts[key] = tokenizer.encode_prompt(batch.problems[row])
        made = own.reader.read(_sampled(batch, row))
        if len(prompts[key]) + len(made.ids) > own.max_length:
            too_long += place >= 0
            teacher_id[row], made = -1, own.reader.read(())
        shown.append((prompts[key][: own.max_length - 1], made))
    columns = {"teacher_id": teacher_id, **_columns(batch, shown)}
    return columns, _metrics(batch.with_columns(**columns), too_long)


def _sampled(batch: RolloutBatch, row: int) -> list[int]:
    """The response's tokens up to the last one that was sampled."""
    places = batch.response_mask[row].nonzero().squeeze(1).tolist()
    return [int(t) for t in batch.response_ids[row, : places[-1] + 1]] if places else []


def _columns(
    batch: RolloutBatch, shown: Sequence[tuple[tuple[int, ...], ReadAnew]]
) -> dict[str, Tensor]:
    prompt_ids, prompt_mask = pad_left([prompt for prompt, _ in shown], 0)
    ids, mask = pad_right([made.ids for _, made in shown], 0)

    def padded(groups: list[int], width: int) -> list[int]:
        return [*groups, *[NO_GROUP] * (width - len(groups))]

    own = batch.response_ids.shape[1]
    return {
        "teacher_prompt_ids": prompt_ids,
        "teacher_prompt_mask": prompt_mask,
        "teacher_response_ids": ids,
        "teacher_response_mask": mask,
        "text_group": torch.tensor([padded(made.groups, own) for _, made in shown]),
        "teacher_text_group": torch.tensor(
            [padded(made.other_groups, ids.shape[1]) for _, made in shown]
        ),
    }


def _metrics(batch: RolloutBatch, too_long: int) -> dict[str, float]:
    group, mask = batch.column("text_group"), taught(batch).bool()
    grouped = mask & (group != NO_GROUP)
    count = sum(len(row[own].unique()) for row, own in zip(group, grouped, strict=True))
    return {
        "distil/context_too_long_frac": too_long / len(batch),
        "distil/aligned_frac": float(grouped.sum()) / max(1.0, float(mask.sum())),
        "distil/tokens_per_stretch": float(grouped.sum()) / max(1, count),
    }
