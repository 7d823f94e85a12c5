"""Stage `process_reward_model`: scores of single steps, learned from a file or from own answers."""

from __future__ import annotations

from functools import partial

from posttrain.core.config.preference_stages import ProcessRewardModelStage
from posttrain.core.contracts import StageOutput
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.preference import split_by_prompt
from posttrain.core.data.rows import data_digest
from posttrain.core.data.steps import StepRow, fitting_rows, read_labelled_steps
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.math.intervals import clustered_share
from posttrain.core.training.process_reward import StepRanking
from posttrain.core.training.step_record import step_row_tensors
from posttrain.pipelines.ranks.trainer import open_trainer
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.own_steps import sample_steps
from posttrain.pipelines.stage.trained import save_trained
from posttrain.pipelines.stages.microscope import log_pages
from posttrain.pipelines.stages.preference import mini_batches
from posttrain.pipelines.stages.steps import Steps


def run_process_reward_model(context: StageContext) -> StageOutput:
    """Read or sample labelled steps, train, and measure on unseen prompts."""
    stage = context.stage
    assert isinstance(stage, ProcessRewardModelStage)
    tokenizer = context.tokenizer()
    train, held_out = _gather(context, stage, tokenizer)
    schedule = mini_batches(context, stage, len(train))
    metrics: dict[str, float] = {}
    with open_trainer(context, len(schedule)) as trainer:
        steps = Steps.begin(context, trainer, len(schedule))
        for step in steps.remaining:
            context.check()
            rows = [train[i] for i in schedule[step - 1]]
            metrics = steps.take(rows)
            steps.done(step, metrics, partial(step_row_tensors, rows), [row.key for row in rows])
        trainer.finish()
        ranking: StepRanking = trainer.call("rank", held_out)
        model = trainer.trained_model()
    log_pages(context)
    final = _measured(ranking) | {
        "prm/num_steps": float(sum(len(row.places) for row in train)),
        "prm/num_held_out_steps": float(sum(count for _, count in ranking.problems)),
    }
    context.tracker.log_summary(final)
    save_trained(context, model, tokenizer, "reward_model")
    return StageOutput(
        {"reward_model": context.out / "reward_model"}, metrics | final, steps.resumed
    )


def _measured(ranking: StepRanking) -> dict[str, float]:
    share, low, high = clustered_share(ranking.problems)
    found = {
        "prm/held_out_step_accuracy": share,
        "prm/held_out_low": low,
        "prm/held_out_high": high,
    }
    if ranking.pairs:
        found["prm/held_out_order_accuracy"] = ranking.ordered / ranking.pairs
    return found


def _gather(
    context: StageContext, stage: ProcessRewardModelStage, tokenizer: ChatTokenizer
) -> tuple[list[StepRow], list[StepRow]]:
    """Training and held-out rows. Raises `DataError` where there are too few to measure."""
    rule = LengthRule.of(context.run.model, "answers with steps", stage.max_length)
    if stage.data is None:
        rows, where = sample_steps(context, stage, tokenizer), "the model's answers"
    else:
        setting, where = f"stages.{context.name}.data", stage.data
        read = read_labelled_steps(stage.data, setting, stage.separator)
        rows = [row.tokenised(stage.separator, tokenizer) for row in read]
        context.tracker.log_dataset(
            name=f"{context.name}-steps",
            context="steps",
            digest=data_digest(stage.data, setting),
            num_rows=len(rows),
            source=stage.data,
        )
        table: list[dict[str, object]] = [
            {"prompt": row.problem.prompt, "step": step, "label": label}
            for row in read[:32]
            for step, label in zip(row.steps, row.labels, strict=True)
        ]
        context.tracker.log_table("examples", 0, table)
    rows = fitting_rows(rows, rule)
    context.report_lengths(rule)
    train, held_out = split_by_prompt(rows, stage.held_out_fraction)
    if not train or not held_out:
        raise DataError(
            f"{where}: {len(rows)} usable answer(s) with fewer than two prompts, too few to train "
            "and to measure: add rows with other prompts, or raise num_prompts"
        )
    labels = [label for row in train for label in row.labels]
    if min(labels) == max(labels):
        raise DataError(
            f"{where}: all {len(labels)} steps have the label {labels[0]:g}, so there is nothing "
            "to tell apart: add steps with other labels, or choose a task that the model solves "
            "sometimes"
        )
    return train, held_out
