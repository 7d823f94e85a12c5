"""Where preferences come from: a file, the task, or the model's own right and wrong answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from posttrain.core.artifacts import file_digest
from posttrain.core.config.base import TASK_DATA
from posttrain.core.config.supervised_stages import PreferenceDataStage
from posttrain.core.contracts import RolloutEngine
from posttrain.core.data.preference import (
    LabelledAnswer,
    Pair,
    as_labelled,
    batches,
    make_pairs,
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
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.types import Problem, SamplingParams
from posttrain.pipelines.engines import PAIR_PROMPTS_PER_CALL
from posttrain.pipelines.stages.context import StageContext

RowT = TypeVar("RowT", Pair, LabelledAnswer)
Split = tuple[list[RowT], list[RowT]]
"""Training and held-out rows."""


def gather_pairs(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> Split[Pair]:
    """Training and held-out pairs of the stage."""
    if stage.data is None:
        return _split(context, stage, sample_pairs(context, stage, tokenizer))
    rows = _read(context, stage.data, "pairs")
    table = [{"prompt": r.key, "chosen": r.answers[0], "rejected": r.answers[1]} for r in rows[:32]]
    context.tracker.log_table("examples", 0, table)
    return _split(context, stage, *tokenise_pairs(rows, tokenizer, _max_length(context, stage)))


def gather_labelled(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> Split[LabelledAnswer]:
    """Training and held-out labelled answers of the stage."""
    if stage.data is None:
        return _split(context, stage, as_labelled(sample_pairs(context, stage, tokenizer)))
    rows = _read(context, stage.data, "labels")
    table = [{"prompt": r.key, "answer": r.answers[0], "desirable": r.label} for r in rows[:32]]
    context.tracker.log_table("examples", 0, table)
    return _split(context, stage, *tokenise_labelled(rows, tokenizer, _max_length(context, stage)))


def mini_batches(
    context: StageContext, stage: PreferenceDataStage, num_rows: int
) -> list[list[int]]:
    """Row indices of every mini-batch of every epoch, in order."""
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


def sample_pairs(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> list[Pair]:
    """(right, wrong) pairs of the model's own answers to training problems."""
    problems = context.training_problems(stage.num_prompts)
    context.check_lengths(tokenizer, problems, stage.generation.max_response_length)
    with context.engines.lease(context.model_dir) as engine:
        return _pairs_of(context, stage, engine, tokenizer, problems)


def _pairs_of(
    context: StageContext,
    stage: PreferenceDataStage,
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    problems: Sequence[Problem],
) -> list[Pair]:
    pairs: list[Pair] = []
    table: list[dict[str, object]] = []
    for start in range(0, len(problems), PAIR_PROMPTS_PER_CALL):
        context.check()
        part = problems[start : start + PAIR_PROMPTS_PER_CALL]
        prompts = [tokenizer.encode_prompt(p) for p in part]
        params = SamplingParams(
            num_generations=stage.num_generations,
            max_tokens=stage.generation.max_response_length,
            temperature=stage.generation.temperature,
            top_p=stage.generation.top_p,
            top_k=stage.generation.top_k,
            seed=derive_seed(context.run.seed, context.name, start),
        )
        for problem, prompt, group in zip(
            part, prompts, engine.generate(prompts, params), strict=True
        ):
            answers = []
            for completion in group:
                text = tokenizer.decode_response(completion.token_ids)
                correct = context.task.verify(problem, text).correct >= 1.0
                answers.append((completion.token_ids, correct))
                table.append({"prompt": problem.prompt, "response": text, "correct": correct})
            pairs += make_pairs(problem.key, prompt, answers, stage.pairs_per_prompt)
        context.reporter.say(f"{context.name}: {len(pairs)} pairs of {start + len(part)} problems")
    context.tracker.log_table("answers", 0, table[:200])
    return pairs
