"""Stage `sft`: a short supervised run on the task's worked answers."""

from __future__ import annotations

from posttrain.core.config.supervised_stages import SftStage
from posttrain.core.data.problems import check_worked
from posttrain.core.models.loading import load_policy, save_model
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.sft import sft_step, worked_batch
from posttrain.pipelines.stages.context import StageContext, StageOutput


def run_sft(context: StageContext) -> StageOutput:
    """Fine-tune the input model; saves the result as a Hugging Face directory."""
    stage = context.stage
    assert isinstance(stage, SftStage)
    problems = context.training_problems(stage.steps * stage.batch_size)
    check_worked(context.task, problems)
    tokenizer = context.tokenizer()
    model = load_policy(context.model_dir, context.runtime)
    optimizer = MasterOptimizer(model, stage.optimizer, stage.steps)
    context.started(stage.steps)
    metrics: dict[str, float] = {}
    for step in range(1, stage.steps + 1):
        context.check()
        part = problems[(step - 1) * stage.batch_size : step * stage.batch_size]
        metrics = sft_step(
            model,
            optimizer,
            worked_batch(tokenizer, part),
            micro_batch_size=stage.micro_batch_size,
            check=context.check,
        )
        context.log_step(step, metrics)
    optimizer.close()
    examples = [{"prompt": p.prompt, "worked answer": p.worked} for p in problems[:32]]
    context.tracker.log_table("examples", 0, examples)
    save_model(model, tokenizer.tokenizer, context.out / "model")
    return StageOutput({"model": context.out / "model"}, metrics)
