"""Stage `sft`: a short supervised run on the task's worked answers."""

from __future__ import annotations

from functools import partial

from posttrain.core.config.stages import SftStage
from posttrain.core.data.lengths import LengthRule, fitting_worked
from posttrain.core.data.row_task import check_worked, repeat_problems
from posttrain.core.training.sft import worked_batch
from posttrain.core.training.step_record import example_tensors
from posttrain.pipelines.ranks.trainer import open_trainer
from posttrain.pipelines.stage.context import StageContext, StageOutput
from posttrain.pipelines.stage.trained import save_trained
from posttrain.pipelines.stages.steps import Steps


def run_sft(context: StageContext) -> StageOutput:
    """Fine-tune the input model; saves the result as a Hugging Face directory."""
    stage = context.stage
    assert isinstance(stage, SftStage)
    count, limit = stage.steps * stage.batch_size, context.run.model.max_model_len
    given = context.training_problems(count)
    check_worked(context.task, given)
    tokenizer = context.tokenizer()
    rule = LengthRule.of(context.run.model, "worked answers with their prompt")
    fitting = fitting_worked(tokenizer, given, rule)
    context.report_lengths(rule)
    problems = repeat_problems(fitting, count, context.run.seed, context.name)
    metrics: dict[str, float] = {}
    with open_trainer(context) as trainer:
        steps = Steps.begin(context, trainer, stage.steps)
        for step in steps.remaining:
            context.check()
            part = problems[(step - 1) * stage.batch_size : step * stage.batch_size]
            batch = worked_batch(tokenizer, part, limit).bare()
            metrics = trainer.call("step", batch)
            keys = [problem.key for problem in part]
            steps.done(step, metrics, partial(example_tensors, batch), keys)
        trainer.finish()
        examples = [{"prompt": p.prompt, "worked answer": p.worked} for p in problems[:32]]
        context.tracker.log_table("examples", 0, examples)
        save_trained(context, trainer.trained_model(), tokenizer, "model")
    return StageOutput({"model": context.out / "model"}, metrics, steps.resumed)
