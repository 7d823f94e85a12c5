"""Stage `preference`, and where preferences come from: a file, the task, or the model's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from posttrain.core.analysis.learning_curves import preference_curves
from posttrain.core.config.base import TASK_DATA
from posttrain.core.config.preference_stages import (
    JudgedAnswersStage,
    PreferenceDataStage,
    PreferenceStage,
)
from posttrain.core.contracts import StageOutput
from posttrain.core.contracts.preference_rows import Kind, PreferenceRow, preference_digest
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.preference import (
    LabelledAnswer,
    Pair,
    as_labelled,
    batches,
    fitting_labelled,
    fitting_pairs,
    mismatched_answers,
    split_by_prompt,
    tokenise_labelled,
    tokenise_pairs,
)
from posttrain.core.data.preference_files import doubtful, read_preference_rows
from posttrain.core.data.rows import data_digest, data_files
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.math.intervals import clustered_share
from posttrain.core.models.device import peak_memory_gb
from posttrain.core.runtime.heap import StepHeap
from posttrain.core.runtime.seeding import generator
from posttrain.core.store.manifests import file_digest
from posttrain.core.training.preference import BothFallingAlarm, Ranking, Rows
from posttrain.core.training.step_record import preference_tensors
from posttrain.pipelines.ranks.methods import preference_objective
from posttrain.pipelines.ranks.trainer import Trainer, open_trainer
from posttrain.pipelines.rl.recording import raise_alarm
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.own_answers import OnlinePairs, sample_pairs
from posttrain.pipelines.stage.trained import save_trained
from posttrain.pipelines.stages.microscope import log_pages
from posttrain.pipelines.stages.steps import Steps

RowT = TypeVar("RowT", Pair, LabelledAnswer)
Split = tuple[list[RowT], list[RowT]]
"""Training and held-out rows."""


def gather_pairs(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> Split[Pair]:
    rule = LengthRule.of(context.run.model, "pairs", stage.max_length)
    if stage.data is None:
        pairs = fitting_pairs(sample_pairs(context, stage, tokenizer), rule)
        return _split(context, stage, pairs, rule)
    rows = _read(context, stage, stage.data, "pairs")
    shown = ((row.key, *row.texts()) for row in rows[:32])
    table = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in shown]
    context.tracker.log_table("examples", 0, table)
    return _split(context, stage, tokenise_pairs(rows, tokenizer, rule), rule)


def gather_labelled(
    context: StageContext, stage: PreferenceDataStage, tokenizer: ChatTokenizer
) -> Split[LabelledAnswer]:
    rule = LengthRule.of(context.run.model, "labelled answers", stage.max_length)
    if stage.data is None:
        answers = as_labelled(sample_pairs(context, stage, tokenizer))
        return _split(context, stage, fitting_labelled(answers, rule), rule)
    rows = _read(context, stage, stage.data, "labels")
    table = [{"prompt": r.key, "answer": r.texts()[0], "desirable": r.label} for r in rows[:32]]
    context.tracker.log_table("examples", 0, table)
    return _split(context, stage, tokenise_labelled(rows, tokenizer, rule), rule)


def mini_batches(
    context: StageContext, stage: JudgedAnswersStage, num_rows: int
) -> list[list[int]]:
    found = [
        part
        for epoch in range(stage.epochs)
        for part in batches(
            num_rows, stage.batch_size, generator(context.run.seed, context.name, "order", epoch)
        )
    ]
    return context.in_order(found)


def _read(
    context: StageContext, stage: PreferenceDataStage, data: str, kind: Kind
) -> list[PreferenceRow]:
    if data == TASK_DATA:
        rows, name = context.task.preferences(), "pairs"
        notes, digest, source = doubtful(rows), preference_digest(rows), context.task.source()
    else:
        setting = f"stages.{context.name}.data"
        found = read_preference_rows(data, setting, (kind,), stage.pairs_from_scores)
        context.reporter.say(f"{context.name}: {data} {found.report()}")
        rows, name, notes, source = found.rows, kind, found.notes(), data
        digest = _files_digest(data, setting)
    for line in notes:
        context.warn(f"{context.name}: {line}")
    context.tracker.log_dataset(
        name=f"{context.name}-{name}",
        context="preferences",
        digest=digest,
        num_rows=len(rows),
        source=source,
    )
    return rows


def _files_digest(data: str, setting: str) -> str:
    """Of the file, of all files of the folder, or of the rows of a hub."""
    files = data_files(data, setting)
    return file_digest(files[0]) if len(files) == 1 else data_digest(data, setting)


def _split(
    context: StageContext, stage: PreferenceDataStage, rows: Sequence[RowT], rule: LengthRule
) -> Split[RowT]:
    context.report_lengths(rule)
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


def run_preference(context: StageContext) -> StageOutput:
    """Train the input model on preferences, and rank answers to unseen prompts."""
    stage = context.stage
    assert isinstance(stage, PreferenceStage)
    tokenizer = context.tokenizer()
    with ExitStack() as opened:
        if stage.online is None:
            run = _on_fixed_rows(context, stage, tokenizer, opened)
        else:
            run = _on_own_answers(context, stage, tokenizer, opened)
        metrics = run.train()
        save_trained(context, run.trainer.trained_model(), tokenizer, "model")
    title = f"{context.run.name}: {context.name}"
    plots = preference_curves(run.steps.history, run.rankings, title, context.out / "plots")
    for path in plots:
        context.tracker.log_file(path, "plots")
    log_pages(context)
    return StageOutput(
        {"model": context.out / "model", "report": context.out / "plots"},
        metrics,
        run.steps.resumed,
    )


def _on_fixed_rows(
    context: StageContext, stage: PreferenceStage, tokenizer: ChatTokenizer, opened: ExitStack
) -> _PreferenceRun:
    objective = preference_objective(context, stage)
    gather = gather_pairs if objective.data == "pairs" else gather_labelled
    train, held_out = gather(context, stage, tokenizer)
    schedule = mini_batches(context, stage, len(train))
    if objective.needs_kl_completions:
        _check_labelled(context, stage, train, schedule)
    trainer = opened.enter_context(open_trainer(context, len(schedule)))

    def rows(step: int) -> tuple[Rows, dict[str, float]]:
        return [train[i] for i in schedule[step - 1]], {}

    steps = Steps.begin(context, trainer, len(schedule))
    return _PreferenceRun(context, stage, trainer, held_out, steps, rows, lambda: len(train))


def _on_own_answers(
    context: StageContext, stage: PreferenceStage, tokenizer: ChatTokenizer, opened: ExitStack
) -> _PreferenceRun:
    """With the engine held from the first round to the last."""
    assert stage.online is not None
    engine = opened.enter_context(context.engines.lease(context.model_dir))
    trainer = opened.enter_context(open_trainer(context, stage.online.steps))
    online = OnlinePairs.open(context, stage, tokenizer, engine, trainer.trained_model)
    steps = Steps.begin(context, trainer, stage.online.steps, {"online": online})
    return _PreferenceRun(context, stage, trainer, (), steps, online.rows, lambda: online.used)


@dataclass
class _PreferenceRun:
    """A stage's steps. `rows` gives those that a step trains on, with what was measured to get
    them; `used` counts the training rows, once the steps are over."""

    context: StageContext
    stage: PreferenceStage
    trainer: Trainer
    held_out: Rows
    steps: Steps
    rows: Callable[[int], tuple[Rows, dict[str, float]]]
    used: Callable[[], int]

    @property
    def rankings(self) -> list[dict[str, float]]:
        return [row for row in self.steps.history if "pref/held_out_margin" in row]

    def train(self) -> dict[str, float]:
        """All optimizer steps; returns the last one's metrics and the held-out ranking."""
        context, stage = self.context, self.stage
        alarm = BothFallingAlarm(stage.both_falling_alarm, stage.both_falling_window)
        heap = StepHeap()
        for taken in self.steps.history:
            alarm.after(taken)  # reported by the run that took the step
        metrics: dict[str, float] = {}
        for step in self.steps.remaining:
            context.check()
            chosen, metrics = self.rows(step)
            metrics |= self._step(step, chosen, alarm)
            heap.step_done()
            metrics["memory/peak_gb"] = peak_memory_gb()
            every = stage.evaluate_every
            if self.held_out and (step == self.steps.total or (every and step % every == 0)):
                metrics |= self.rank()
            keys = [row.key for row in chosen]
            self.steps.done(step, metrics, partial(preference_tensors, chosen), keys)
        self.trainer.finish()
        if not self.used():
            raise DataError(
                f"no round of {self.steps.total} step(s) gave a pair: the answers to each prompt "
                "were ranked alike; raise online.num_generations or generation.temperature, or "
                "choose a task that the model solves sometimes"
            )
        sizes = {
            "pref/num_rows": float(self.used()),
            "pref/num_held_out_rows": float(len(self.held_out)),
        }
        ranked = {key: value for key, value in metrics.items() if key.startswith("pref/held_out")}
        context.tracker.log_summary(ranked | sizes)
        return metrics | sizes

    def _step(self, step: int, chosen: Rows, alarm: BothFallingAlarm) -> dict[str, float]:
        """One update on `chosen`; none where there is nothing to learn from."""
        if not chosen:
            return {"train/updates": 0.0, "train/skipped_empty": 1.0}
        metrics = self.steps.take(chosen)
        text = alarm.after(metrics)
        metrics |= {"alarm/both_falling": 1.0} if alarm.ringing else {}
        if text is not None:
            raise_alarm(self.context, "both_falling", step, text)
        return metrics

    def rank(self) -> dict[str, float]:
        """Held-out accuracy of the policy as it is now, with its 95 % interval."""
        ranking: Ranking = self.trainer.call("rank", self.held_out)
        share, low, high = clustered_share(ranking.prompts)
        unit = "pair" if ranking.by_pairs else "row"
        return {
            f"pref/held_out_{unit}_accuracy": share,
            "pref/held_out_low": low,
            "pref/held_out_high": high,
            "pref/held_out_margin": ranking.gap,
        }


def _check_labelled(
    context: StageContext, stage: PreferenceStage, rows: Rows, schedule: Sequence[Sequence[int]]
) -> None:
    """Fail before the first step when a mini-batch has one prompt, warn when labels are uneven."""
    labelled = [row for row in rows if isinstance(row, LabelledAnswer)]
    for chosen in schedule:
        mismatched_answers([labelled[i] for i in chosen])
    wanted = sum(row.desirable for row in labelled)
    unwanted = len(labelled) - wanted
    for term in stage.loss_terms:
        fields = term.fields()
        share = wanted * float(str(fields.get("desirable_weight", 1.0)))
        other = unwanted * float(str(fields.get("undesirable_weight", 1.0)))
        if share and other and not 1 <= share / other <= 4 / 3:
            context.warn(
                f"{context.name}: {wanted} wanted and {unwanted} unwanted answers weigh "
                f"{share:g} to {other:g} in '{term.name}', where between 1:1 and 4:3 is advised; "
                f"set desirable_weight to {other / wanted:.3g}, or undesirable_weight to "
                f"{share / unwanted:.3g}"
            )
