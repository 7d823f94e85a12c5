"""Stage `reward_model`: a Bradley-Terry reward model on pairs, of a file or of own answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from posttrain.core.config.preference_stages import RewardModelStage
from posttrain.core.contracts import StageOutput
from posttrain.core.data.preference import Pair
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.math.intervals import clustered_share, tallied
from posttrain.core.training.step_record import preference_tensors
from posttrain.pipelines.ranks.trainer import open_trainer
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.trained import save_trained
from posttrain.pipelines.stages.microscope import log_pages
from posttrain.pipelines.stages.preference import gather_pairs, mini_batches
from posttrain.pipelines.stages.steps import Steps


def run_reward_model(context: StageContext) -> StageOutput:
    """Read or sample pairs, train, and measure pairs of unseen prompts."""
    stage = context.stage
    assert isinstance(stage, RewardModelStage)
    tokenizer = context.tokenizer()
    train, held_out = gather_pairs(context, stage, tokenizer)
    metrics, resumed = train_on_pairs(context, stage, tokenizer, train, held_out)
    return StageOutput({"reward_model": context.out / "reward_model"}, metrics, resumed)


def train_on_pairs(
    context: StageContext,
    stage: RewardModelStage,
    tokenizer: ChatTokenizer,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
) -> tuple[dict[str, float], bool]:
    """Train and save; the held-out pair accuracy with its interval, and whether it was resumed."""
    schedule = mini_batches(context, stage, len(train))
    metrics: dict[str, float] = {}
    with open_trainer(context, len(schedule)) as trainer:
        steps = Steps.begin(context, trainer, len(schedule))
        for step in steps.remaining:
            context.check()
            rows = [train[i] for i in schedule[step - 1]]
            metrics = steps.take(rows)
            keys = [pair.key for pair in rows]
            steps.done(step, metrics, partial(preference_tensors, rows), keys)
        trainer.finish()
        in_order: list[bool] = trainer.call("in_order", held_out)
        model = trainer.trained_model()
    log_pages(context)
    share, low, high = clustered_share(tallied((pair.key for pair in held_out), in_order))
    final = {
        "rm/held_out_pair_accuracy": share,
        "rm/held_out_low": low,
        "rm/held_out_high": high,
        "rm/num_pairs": float(len(train)),
        "rm/num_held_out_pairs": float(len(held_out)),
    }
    context.tracker.log_summary(final)
    save_trained(context, model, tokenizer, "reward_model")
    return metrics | final, steps.resumed
