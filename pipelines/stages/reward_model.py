"""Stage `reward_model`: a Bradley-Terry reward model on pairs, of a file or of own answers."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.config.supervised_stages import RewardModelStage
from posttrain.core.contracts import PairLoss
from posttrain.core.data.preference import Pair
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.math.intervals import wilson
from posttrain.core.models.loading import load_reward_model, save_model
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.reward_model import pair_hits, reward_step
from posttrain.pipelines.stages.context import StageContext, StageOutput
from posttrain.pipelines.stages.preference_data import gather_pairs, mini_batches


def run_reward_model(context: StageContext) -> StageOutput:
    """Read or sample pairs, train, and measure pairs of unseen prompts."""
    stage = context.stage
    assert isinstance(stage, RewardModelStage)
    tokenizer = context.tokenizer()
    train, held_out = gather_pairs(context, stage, tokenizer)
    metrics = train_on_pairs(context, stage, tokenizer, train, held_out)
    return StageOutput({"reward_model": context.out / "reward_model"}, metrics)


def train_on_pairs(
    context: StageContext,
    stage: RewardModelStage,
    tokenizer: ChatTokenizer,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
) -> dict[str, float]:
    """Train, save, and return the held-out pair accuracy with its interval."""
    model = load_reward_model(context.model_dir, context.runtime, new_head=True)
    model.config.pad_token_id = tokenizer.pad_token_id
    schedule = mini_batches(context, stage, len(train))
    optimizer = MasterOptimizer(model, stage.optimizer, len(schedule))
    loss = context.build(PairLoss, stage.preference_loss)
    context.started(len(schedule))
    metrics: dict[str, float] = {}
    for step, chosen in enumerate(schedule, start=1):
        context.check()
        metrics = reward_step(
            model,
            optimizer,
            [train[i] for i in chosen],
            loss,
            micro_batch_size=stage.micro_batch_size,
            check=context.check,
        )
        context.log_step(step, metrics)
    optimizer.close()
    hits = pair_hits(model, held_out, stage.micro_batch_size, context.check)
    low, high = wilson(hits, len(held_out))
    final = {
        "rm/held_out_pair_accuracy": hits / len(held_out),
        "rm/held_out_low": low,
        "rm/held_out_high": high,
        "rm/num_pairs": float(len(train)),
        "rm/num_held_out_pairs": float(len(held_out)),
    }
    context.tracker.log_summary(final)
    save_model(model, tokenizer.tokenizer, context.out / "reward_model")
    return metrics | final
