"""Stage `transform`: a task's problems, rewritten for integer answers, as a data set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.core.config.schema import TransformStage
from posttrain.core.contracts import RolloutEngine, StageOutput
from posttrain.core.data.problem_sets import training_problems
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.data.transformation import (
    REASONS,
    Outcome,
    Rewriting,
    Transformer,
    outcome_metrics,
)
from posttrain.core.errors import DataError
from posttrain.core.math.splits import loose_key
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Message, SamplingParams
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import PROBLEMS_FILE


def run_transform(context: StageContext) -> StageOutput:
    """Rewrite training problems; saves those that verify, and those that do not with the reason."""
    stage = context.stage
    assert isinstance(stage, TransformStage)
    available = context.task.available("train")
    count = stage.num_problems if available is None else min(stage.num_problems, available)
    problems = training_problems(context.task, count, context.run.seed, context.name)
    context.record_dataset("train", problems)
    held_out = context.held_out(context.run.evaluation)
    context.started(len(problems))
    outcomes: list[Outcome] = []
    with context.engines.lease(context.model_dir) as engine:
        asker = _Asker(context, stage, engine)
        transformer = Transformer(
            task=context.task,
            settings=Rewriting(
                template=stage.prompt,
                votes=stage.num_solutions,
                agreement=stage.agreement,
                by_rule=stage.rewrite != "model",
                by_model=stage.rewrite != "rules",
            ),
            ask=asker.ask,
            fits=asker.fits,
            held_out={loose_key(problem.key) for problem in held_out},
        )
        for start in range(0, len(problems), stage.batch_size):
            context.check()
            outcomes += transformer.transform(problems[start : start + stage.batch_size])
            context.reporter.step_done(context.name, len(outcomes), {})
    return _report(context, outcomes)


class _Asker:
    def __init__(
        self, context: StageContext, stage: TransformStage, engine: RolloutEngine[Any]
    ) -> None:
        self.context, self.stage, self.engine = context, stage, engine
        self.tokenizer: ChatTokenizer = context.tokenizer()

    def ask(self, questions: Sequence[str], count: int) -> list[list[str]]:
        """One greedy reply to each question, or `count` sampled ones."""
        if not questions:
            return []
        section = self.stage.generation
        params = SamplingParams(
            num_generations=max(1, count),
            max_tokens=section.max_response_length,
            temperature=section.temperature if count else 0.0,
            top_p=section.top_p if count else 1.0,
            top_k=section.top_k if count else 0,
            seed=derive_seed(self.context.run.seed, self.context.name, "solutions"),
        )
        groups = self.engine.generate([self._ids(text) for text in questions], params)
        return [[self.tokenizer.decode_response(c.token_ids) for c in group] for group in groups]

    def fits(self, question: str) -> bool:
        room = self.context.run.model.max_model_len - self.stage.generation.max_response_length
        return len(self._ids(question)) <= room

    def _ids(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode_chat([Message("user", text)])


def _report(context: StageContext, outcomes: Sequence[Outcome]) -> StageOutput:
    metrics = outcome_metrics(outcomes)
    folder = context.out / "dataset"
    folder.mkdir(parents=True)
    kept = [outcome for outcome in outcomes if outcome.made is not None]
    dropped = [outcome for outcome in outcomes if outcome.made is None]
    if not kept:
        reported = "; ".join(sorted({f"{o.reason}: {REASONS[o.reason]}" for o in dropped}))
        raise DataError(
            f"stage '{context.name}' kept none of {len(outcomes)} problems ({reported}): use a "
            "stronger model, lower `agreement`, or raise num_problems"
        )
    _write(folder / PROBLEMS_FILE, kept)
    _write(folder / "dropped.jsonl", dropped)
    context.tracker.log_table("kept", 0, [_shown(outcome) for outcome in kept[:100]])
    context.tracker.log_table("dropped", 0, [_shown(outcome) for outcome in dropped[:100]])
    context.tracker.log_summary(metrics)
    reasons = {o.reason: int(metrics[f"transform/dropped/{o.reason}"]) for o in dropped}
    reported = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
    context.reporter.say(
        f"{context.name}: kept {len(kept)} of {len(outcomes)} problems"
        + (f"; dropped: {reported}" if reported else "")
    )
    return StageOutput({"dataset": folder}, metrics)


def _write(path: Path, outcomes: Sequence[Outcome]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for outcome in outcomes:
            stream.write(json.dumps(outcome.row()) + "\n")


def _shown(outcome: Outcome) -> dict[str, object]:
    made, before = outcome.made, outcome.original
    return {
        "original": before.prompt,
        "original answer": before.answer,
        "rewritten": None if made is None else made.prompt,
        "answer": None if made is None else made.answer,
        "how": outcome.how if made is not None else outcome.reason,
        "detail": outcome.detail,
        "agreement": outcome.agreement,
    }
