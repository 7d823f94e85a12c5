"""Stage `evaluate`: greedy and sampled accuracy of a model on held-out problems."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.core.analysis.statistics import MeasuredRun, group_tests, read_outcomes
from posttrain.core.config.evaluation_stages import EvaluateStage
from posttrain.core.contracts import StageOutput
from posttrain.core.evaluation.accuracy import Evaluation, evaluate_policy
from posttrain.pipelines.stage.context import (
    StageContext,
    evaluation_table,
    write_evaluation,
)
from posttrain.pipelines.stage.inputs import episodes_of, load_tokenizer
from posttrain.pipelines.stage.on_nodes import answered_on_nodes
from posttrain.pipelines.stage.own_answers import ranking_model


def run_evaluate(context: StageContext) -> StageOutput:
    """Evaluate the input model; with a `baseline` input, also the gains over it."""
    stage = context.stage
    assert isinstance(stage, EvaluateStage)
    evaluation = measure(context, stage, context.model_dir)
    metrics = dict(evaluation.metrics)
    folder = write_evaluation(context.out / "evaluation", evaluation)
    if "baseline" in context.inputs:
        metrics |= gains(context.inputs["baseline"].path, folder)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2))
    context.tracker.log_table("held_out", 0, evaluation_table(evaluation))
    context.tracker.log_summary(metrics, context.inputs["model"].mlflow_model_id)
    return StageOutput({"evaluation": folder}, metrics)


def measure(context: StageContext, stage: EvaluateStage, model_dir: Path) -> Evaluation:
    """Evaluate the model in `model_dir` as `stage` says, within the stage that asks for it."""
    section = stage.evaluation or context.run.evaluation
    problems = context.held_out_problems(section)
    tokenizer = load_tokenizer(model_dir, context.run, context.manager)

    def progress(done: int) -> None:
        context.check()
        context.reporter.step_done(context.name, done, {})

    with episodes_of(context, stage.environment, tokenizer, context.check) as episodes:
        encoder, longest = episodes or tokenizer, section.max_response_length
        prompts = context.encode_prompts(encoder, problems, longest, "eval")
        context.started(len(prompts))
        ranker = None
        if "reward_model" in context.inputs:  # not where `promote` measures the champion
            ranker = ranking_model(context, section.batch_size)
        with context.engines.lease(model_dir) as engine, answered_on_nodes(context, episodes):
            return evaluate_policy(
                *(engine, tokenizer, context.task, prompts, section, context.run.seed),
                progress=progress,
                episodes=episodes,
                reward_model=ranker,
            )


GAINS = {"greedy": "eval/gain", "sampled": "eval/sampled_gain"}


def gains(baseline: Path, evaluation: Path) -> dict[str, float]:
    """Accuracy minus the baseline's, greedy and sampled, with 95 % intervals.

    Both are artifacts of kind `evaluation`. Where they are of the same problems each problem is
    compared with itself; else only greedy accuracies are, as independent ones.
    """
    before, after = (
        [MeasuredRun(str(folder), 0, read_outcomes(folder))] for folder in (baseline, evaluation)
    )
    metrics: dict[str, float] = {}
    for test in group_tests(before, after, ("baseline", "evaluation")):
        name = GAINS[test.measure]
        metrics |= {name: test.difference, f"{name}_low": test.low, f"{name}_high": test.high}
    return metrics
