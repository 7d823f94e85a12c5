"""Stage `sft`: supervised fine-tuning on conversations and texts, or the task's worked answers."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from posttrain.core.config.sft_stage import SftStage
from posttrain.core.contracts import StageOutput
from posttrain.core.data.lengths import LengthRule, fitting_worked
from posttrain.core.data.problem_sets import check_worked, read_problems, repeat_problems
from posttrain.core.data.sft_rows import (
    BatchSize,
    EncodedRow,
    Plan,
    SourceReport,
    TokenRows,
    encoded_rows,
    epochs_of,
    prompt_key,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError, RunError
from posttrain.core.training.checkpoint import (
    LoopState,
    load_checkpoint,
    read_step,
    save_checkpoint,
)
from posttrain.core.training.sft import BestLoss
from posttrain.core.training.step_record import example_tensors
from posttrain.core.types import Problem
from posttrain.pipelines.ranks.trainer import Trainer, open_trainer
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import PROBLEMS_FILE
from posttrain.pipelines.stage.trained import save_trained
from posttrain.pipelines.stages.microscope import log_pages
from posttrain.pipelines.stages.steps import Steps

TOKENS, BEST = "tokens", "best"
"""Folders among the stage's checkpoints: its rows as tokens, the model of the lowest loss."""
SHOWN = 32


@dataclass(frozen=True, slots=True)
class SftData:
    """Rows as tokens, those of each optimizer step, and those that are measured on."""

    rows: TokenRows
    plan: Plan
    held_out: Sequence[int]
    reports: Sequence[SourceReport] = ()


def run_sft(context: StageContext) -> StageOutput:
    """Fine-tune the input model; saves the result as a Hugging Face directory."""
    stage = context.stage
    assert isinstance(stage, SftStage)
    try:
        return _run(context, stage)
    finally:  # they are made again where the stage goes on
        shutil.rmtree(context.checkpoints / TOKENS, ignore_errors=True)


def _run(context: StageContext, stage: SftStage) -> StageOutput:
    tokenizer = context.tokenizer()
    data = _Gathering(context, stage, tokenizer).data()
    with open_trainer(context, len(data.plan)) as trainer:
        steps = Steps.begin(context, trainer, len(data.plan))
        run = _SftRun(context, stage, trainer, data, steps, tokenizer.pad_token_id)
        metrics = run.train()
        trainer.finish()
        save_trained(context, trainer.trained_model(), tokenizer, "model")
    log_pages(context)
    return StageOutput({"model": context.out / "model"}, metrics, steps.resumed)


# --- data ----------------------------------------------------------------------------------------


@dataclass
class _Gathering:
    """Reads the stage's rows, and plans which of them each step takes."""

    context: StageContext
    stage: SftStage
    tokenizer: ChatTokenizer
    reports: list[SourceReport] = field(default_factory=list)

    def data(self) -> SftData:
        context, stage = self.context, self.stage
        rows = TokenRows(context.checkpoints / TOKENS)
        order = None
        if stage.data is not None:
            pools = self._read_sources(rows)
        elif stage.steps and stage.batch_size and not stage.held_out_fraction:
            order = self._worked(rows, stage.steps * stage.batch_size, counted=True)
            pools = [order]
        else:
            pools = [self._worked(rows, self._all_problems(), counted=False)]
        held_out = self._read_held_out(rows)
        rows.finish()
        if stage.held_out_fraction:
            pools, held_out = self._split(rows, pools)
        pools, order = self._without_held_out(rows, pools, held_out, order)
        size = BatchSize(stage.batch_size, stage.max_tokens_per_batch, rows.tokens)
        if order is not None:
            plan = Plan.of(size.cut(order))
        else:
            passes = epochs_of(pools, self._weights(), context.run.seed, context.name)
            plan = size.plan(passes, steps=stage.steps, epochs=stage.epochs)
        if context.fork is not None:
            plan = Plan.of(context.in_order([plan[step] for step in range(len(plan))]))
        self._record(rows, pools, held_out, plan)
        return SftData(rows, plan, held_out, self.reports)

    def _weights(self) -> list[float] | None:
        weights = [source.weight for source in self.stage.data or ()]
        known = [weight for weight in weights if weight is not None]
        return known or None

    def _read_sources(self, rows: TokenRows) -> list[list[int]]:
        """The rows of each source of `data`."""
        context = self.context
        rule = LengthRule.of(context.run.model, "rows")
        pools = []
        for number, source in enumerate(self.stage.data or ()):
            setting = f"stages.{context.name}.data"
            pools.append(self._read(rows, source.path, setting, rule, "train", number))
        context.report_lengths(rule)
        return pools

    def _read_held_out(self, rows: TokenRows) -> list[int]:
        """The rows of `held_out`, if it is given."""
        context, path = self.context, self.stage.held_out
        if path is None:
            return []
        rule = LengthRule.of(context.run.model, "held-out rows")
        setting = f"stages.{context.name}.held_out"
        found = self._read(rows, path, setting, rule, "held_out", -1)
        context.report_lengths(rule, "eval")
        return found

    def _read(
        self,
        rows: TokenRows,
        path: str,
        setting: str,
        rule: LengthRule,
        split: str,
        number: int,
    ) -> list[int]:
        context, report, digest = self.context, SourceReport(path), hashlib.sha256()
        self.reports.append(report)
        found, places = [], list[tuple[str, str]]()
        for example, row in encoded_rows(report, setting, self.tokenizer, self.stage.loss_on, rule):
            found.append(rows.add(row, example.where, prompt_key(example), number))
            places.append((example.where, rows.content(found[-1]).hex()))
            digest.update(rows.content(found[-1]))
            if len(found) % 256 == 0:
                context.check()
        if not found:  # because of their length, or for want of something to learn
            context.report_lengths(rule)
            report.check()
        if split == "train":
            context.record_rows(places)
        context.reporter.say(f"{context.name}: {report.line}")
        if report.warning:
            context.warn(f"{context.name}: {report.warning}")
        context.tracker.log_dataset(
            name=f"{context.name}-{split}-{Path(path).name}"[:100],
            context=split,
            digest=digest.hexdigest(),
            num_rows=len(found),
            source=path,
        )
        return found

    def _all_problems(self) -> int:
        """How many training problems there are."""
        context = self.context
        made = context.inputs.get("dataset")
        if made is not None:
            return len(read_problems(made.path / PROBLEMS_FILE))
        available: int | None = context.task.available("train")
        if available is None:
            raise DataError(
                f"task '{context.task.name}' makes problems without end, so there are no passes "
                "over them and no share to hold out: set steps and batch_size, and leave out "
                "epochs, max_tokens_per_batch and held_out_fraction"
            )
        return available

    def _worked(self, rows: TokenRows, count: int, *, counted: bool) -> list[int]:
        """The task's worked answers: `count` of them in order if they are `counted`, or each."""
        context = self.context
        given = context.training_problems(count)
        check_worked(context.task, given)
        rule = LengthRule.of(context.run.model, "worked answers with their prompt")
        fitting = fitting_worked(self.tokenizer, given, rule)
        context.report_lengths(rule)
        if counted:
            fitting = repeat_problems(fitting, count, context.run.seed, context.name)
        numbers: dict[str, int] = {}
        for problem in fitting:
            if problem.key not in numbers:
                row = self._worked_row(problem)
                numbers[problem.key] = rows.add(row, problem.key, problem.key)
        shown = [{"prompt": p.prompt, "worked answer": p.worked} for p in fitting[:SHOWN]]
        context.tracker.log_table("examples", 0, shown)
        return [numbers[p.key] for p in fitting] if counted else list(numbers.values())

    def _worked_row(self, problem: Problem) -> EncodedRow:
        """Cut where it would pass the model's length; as `worked_batch`."""
        prompt = self.tokenizer.encode_prompt(problem)
        answer = self.tokenizer.encode_worked(problem)
        return EncodedRow(prompt, answer[: self.context.run.model.max_model_len - len(prompt)])

    def _split(
        self, rows: TokenRows, pools: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[int]]:
        """The pools without what `held_out_fraction` holds out, and that."""
        every = [row for pool in pools for row in pool]
        chosen = rows.held_out(every, self.stage.held_out_fraction)
        left = [[row for row in pool if row not in chosen] for pool in pools]
        if not chosen or not all(left):
            raise DataError(
                f"the {len(every)} rows of stage '{self.context.name}' have too few different "
                "prompts to hold some out and to train on others: add rows, or give a held_out file"
            )
        return left, sorted(chosen)

    def _without_held_out(
        self,
        rows: TokenRows,
        pools: list[list[int]],
        held_out: Sequence[int],
        order: list[int] | None,
    ) -> tuple[list[list[int]], list[int] | None]:
        """Pools and order without rows whose prompt, or all of which, is in the held-out file.

        No order if there are any.
        """
        prompts, known = ({f(row) for row in held_out} for f in (rows.key, rows.content))
        both = {
            row
            for pool in pools
            for row in pool
            if rows.key(row) in prompts or rows.content(row) in known
        }
        if not both:
            return pools, order
        left = [[row for row in dict.fromkeys(pool) if row not in both] for pool in pools]
        if not all(left):
            raise DataError(
                f"the prompts of all rows to train on are in {self.stage.held_out} as well, "
                "expected others: remove them from one of the two"
            )
        self.context.warn(
            f"{self.context.name}: the prompts of {len(both)} training rows, such as "
            f"{rows.name(min(both))}, are in {self.stage.held_out} as well; they were left out of "
            "training"
        )
        self.context.tracker.log_step(0, {"data/also_held_out": float(len(both))})
        return left, None

    def _record(
        self, rows: TokenRows, pools: list[list[int]], held_out: Sequence[int], plan: Plan
    ) -> None:
        """Counts of rows and tokens, and for data of files a table of sources and of examples."""
        context = self.context
        trained = {row for pool in pools for row in pool}
        context.tracker.log_step(
            0,
            {
                "data/num_rows": float(len(trained)),
                "data/num_held_out_rows": float(len(held_out)),
                "data/num_tokens": float(sum(rows.tokens[row] for row in trained)),
                "data/num_learned_tokens": float(sum(rows.learned[row] for row in trained)),
                "data/nothing_to_learn": float(sum(report.empty for report in self.reports)),
            },
        )
        if self.stage.data is None:
            return
        drawn = [0] * len(pools)
        for row in plan.order:
            drawn[rows.source[row]] += 1
        sources: list[dict[str, object]] = [
            {
                "source": report.path,
                "format": report.format.name if report.format else "",
                "rows": report.rows,
                "left out": report.rows - report.kept,
                "tokens": report.tokens,
                "learned tokens": report.learned,
                "drawn": drawn[number],
            }
            for number, report in enumerate(self.reports[: len(pools)])
        ]
        context.tracker.log_table("sources", None, sources)
        decode = self.tokenizer.tokenizer.decode
        shown: list[dict[str, object]] = []
        for number in list(dict.fromkeys(plan.order[: 4 * SHOWN]))[:SHOWN]:
            found = rows.row(number)
            learned = decode(list(found.response))
            texts = {"context": decode(list(found.prompt)), "learned from": learned}
            shown.append({"row": rows.name(number), **texts})
        context.tracker.log_table("examples", 0, shown)


# --- training ------------------------------------------------------------------------------------


@dataclass
class _SftRun:
    context: StageContext
    stage: SftStage
    trainer: Trainer
    data: SftData
    steps: Steps
    pad_token_id: int

    def train(self) -> dict[str, float]:
        """All steps, or those until the held-out loss ends training; the last one's metrics."""
        context, stage, data = self.context, self.stage, self.data
        stopping = stage.early_stopping
        best = BestLoss(0.0 if stopping is None else stopping.min_improvement)
        for taken in self.steps.history:
            if "sft/held_out_loss" in taken:
                best.after(int(taken["step"]), taken["sft/held_out_loss"])
        if data.held_out and not self.steps.resumed:
            before = self._measure()
            context.tracker.log_step(0, before)
            loss = before["sft/held_out_loss"]
            context.reporter.say(f"{context.name}: held-out loss {loss:.4f} before the first step")
        metrics: dict[str, float] = dict(self.steps.history[-1]) if self.steps.history else {}
        metrics.pop("step", None)
        for step in self.steps.remaining:
            if stopping is not None and best.since >= stopping.patience:
                break
            context.check()
            metrics = self._step(step)
            if data.held_out and self._is_due(step):
                metrics |= self._measure()
                lowest = best.after(step, metrics["sft/held_out_loss"])
                if lowest and stage.keep_best:
                    self._save_best(step)
            batch = partial(self._tensors, step)
            self.steps.done(step, metrics, batch, [data.rows.name(r) for r in data.plan[step - 1]])
        return metrics | self._ended(best)

    def _step(self, step: int) -> dict[str, float]:
        rows = self.data.plan[step - 1]
        batch = self.data.rows.batch(rows, self.pad_token_id)
        metrics = self.steps.take(batch)
        return metrics | {"tokens/total": float(sum(self.data.rows.tokens[row] for row in rows))}

    def _tensors(self, step: int) -> dict[str, Tensor]:
        return example_tensors(self.data.rows.batch(self.data.plan[step - 1], self.pad_token_id))

    def _is_due(self, step: int) -> bool:
        every = self.stage.evaluate_every
        return step == len(self.data.plan) or bool(every and step % every == 0)

    def _measure(self) -> dict[str, float]:
        """The loss per token over all held-out rows, and its perplexity."""
        total = count = 0.0
        size = BatchSize(
            self.stage.batch_size, self.stage.max_tokens_per_batch, self.data.rows.tokens
        )
        for rows in size.cut(self.data.held_out):
            self.context.check()
            batch = self.data.rows.batch(rows, self.pad_token_id)
            loss, tokens = self.trainer.call("likelihood", batch)
            total, count = total + loss, count + tokens
        loss = total / count
        perplexity = math.exp(min(loss, 700.0))  # e^710 is beyond a float
        return {"sft/held_out_loss": loss, "sft/held_out_perplexity": perplexity}

    def _save_best(self, step: int) -> None:
        """Keep the weights as they are after `step`, in the place of the best before."""
        state = LoopState(step, {}, [])
        save_checkpoint(self.context.checkpoints / BEST, self.trainer.stored, state)

    def _ended(self, best: BestLoss) -> dict[str, float]:
        """Take the best weights if they are wanted; what is known of the whole training."""
        context, stage, stopping = self.context, self.stage, self.stage.early_stopping
        if not best.step:
            return {}
        taken = int(self.steps.history[-1]["step"])
        found = {"sft/best_step": float(best.step)}
        if stopping is not None:
            early = taken < len(self.data.plan)
            found["sft/stopped_early"] = float(early)
            if early:
                context.reporter.say(
                    f"{context.name}: ends after step {taken} of {len(self.data.plan)}: "
                    f"{best.since} evaluations without an improvement"
                )
        if stage.keep_best:
            folder = context.checkpoints / BEST
            if read_step(folder) != best.step:
                raise RunError(
                    f"'{folder}' is not the model after step {best.step}: run with --fresh to "
                    "start the stage over"
                )
            load_checkpoint(folder, self.trainer.stored)
            found["sft/held_out_loss"] = best.loss
            found["sft/held_out_perplexity"] = math.exp(min(best.loss, 700.0))
            context.reporter.say(
                f"{context.name}: keeps the model after step {best.step}, held-out loss "
                f"{best.loss:.4f}"
            )
        context.tracker.log_summary(found)
        return found
