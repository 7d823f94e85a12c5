"""Where preferences come from: a file, the task, or the model's own right and wrong answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from posttrain.core.artifacts import file_digest
from posttrain.core.config.base import TASK_DATA
from posttrain.core.config.supervised_stages import PreferenceDataStage
from posttrain.core.data.preference import (
    LabelledAnswer,
    Pair,
    as_labelled,
    batches,
    split_by_prompt,
    tokenise_labelled,
    tokenise_pairs,
)
from posttrain.core.data.preference_rows import (
    Kind,
    PreferenceRow,
    preference_digest,
    read_preference_rows,
)
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.runtime.seeding import generator
from posttrain.pipelines.stages.context import StageContext
from posttrain.pipelines.stages.own_answers import sample_pairs

RowT = TypeVar("RowT", Pair, LabelledAnswer)
Split = tuple[list[RowT], list[RowT]]
"""Training and held-out rows."""


def gather_pairs(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> Split[Pair]:
    if stage.data is None:
        return _split(context, stage, sample_pairs(context, stage, tokenizer))
    rows = _read(context, stage.data, "pairs")
    table = [{"prompt": r.key, "chosen": r.answers[0], "rejected": r.answers[1]} for r in rows[:32]]
    context.tracker.log_table("examples", 0, table)
    return _split(context, stage, *tokenise_pairs(rows, tokenizer, _max_length(context, stage)))


def gather_labelled(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> Split[LabelledAnswer]:
    if stage.data is None:
        return _split(context, stage, as_labelled(sample_pairs(context, stage, tokenizer)))
    rows = _read(context, stage.data, "labels")
    table = [{"prompt": r.key, "answer": r.answers[0], "desirable": r.label} for r in rows[:32]]
    context.tracker.log_table("examples", 0, table)
    return _split(context, stage, *tokenise_labelled(rows, tokenizer, _max_length(context, stage)))


def mini_batches(
    context: StageContext, stage: PreferenceDataStage, num_rows: int
) -> list[list[int]]:
    return [
        part
        for epoch in range(stage.epochs)
        for part in batches(
            num_rows, stage.batch_size, generator(context.run.seed, context.name, "order", epoch)
        )
    ]


def _max_length(context: StageContext, stage: PreferenceDataStage) -> int:
    limit = context.run.model.max_model_len
    return limit if stage.max_length is None else min(limit, stage.max_length)


def _read(context: StageContext, data: str, kind: Kind) -> list[PreferenceRow]:
    if data == TASK_DATA:
        rows = context.task.preferences()
        digest, source = preference_digest(rows), context.task.source()
        context.tracker.log_dataset(
            name=f"{context.name}-pairs",
            context="preferences",
            digest=digest,
            num_rows=len(rows),
            source=source,
        )
        return rows
    setting = f"stages.{context.name}.data"
    _, rows = read_preference_rows(Path(data), setting, (kind,))
    context.tracker.log_dataset(
        name=f"{context.name}-{kind}",
        context="preferences",
        digest=file_digest(Path(data).expanduser()),
        num_rows=len(rows),
        source=data,
    )
    return rows


def _split(
    context: StageContext, stage: PreferenceDataStage, rows: Sequence[RowT], too_long: int = 0
) -> Split[RowT]:
    if too_long:
        context.warn(
            f"{context.name}: {too_long} of {too_long + len(rows)} rows are longer than "
            f"{_max_length(context, stage)} tokens and were left out; raise max_length or "
            "model.max_model_len to keep them"
        )
    train, held_out = split_by_prompt(rows, stage.held_out_fraction)
    if train and held_out:
        return train, held_out
    if stage.data is not None:
        place = "the task" if stage.data == TASK_DATA else stage.data
        raise DataError(
            f"{place} holds {len(rows)} usable row(s) with fewer than two prompts, too few to "
            "train and to measure: add rows with other prompts"
        )
    raise DataError(
        f"only {len(rows)} (right, wrong) answers came of {stage.num_prompts} problems, too few to "
        "train and to measure: raise num_prompts or num_generations, or choose a task that the "
        "model solves sometimes"
    )
