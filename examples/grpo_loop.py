"""GRPO in one loop on posttrain's core, without Prefect and MLflow: to be read and changed.

python examples/grpo_loop.py MODEL_FOLDER [STEPS]    (the reward is the share of digits)
"""

import sys
from pathlib import Path

import torch

from posttrain.core import contracts as kinds
from posttrain.core.config.sections import ModelSection, OptimizerSection
from posttrain.core.data.tokens import ChatTokenizer, rollout_batch
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rewards.scoring import with_rewards
from posttrain.core.rollout.episodes import generate_groups
from posttrain.core.rollout.weight_sync import send_policy
from posttrain.core.training.columns import ColumnFiller
from posttrain.core.training.learner import Learner
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import Problem, SamplingParams


def reward(text: str) -> float:
    """The share of digits among the characters of a response."""
    return sum(map(str.isdigit, text)) / max(1, len(text))


folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
runtime, build = ModelRuntime.from_config(ModelSection()), PluginManager().build
tokenizer, policy = ChatTokenizer.load(folder), load_policy(folder, runtime)
ends, pad = tokenizer.end_token_ids, tokenizer.pad_token_id
engine = build(kinds.RolloutEngine, "transformers")
engine.start(kinds.EngineSetup(folder, runtime.dtype, runtime.device, 256, 64, ends, pad, seed=0))
questions = [Problem(f"q{n}", f"Count to {n}.", "", "") for n in range(4)]
prompts = [kinds.PromptGroup(q, tokenizer.encode_prompt(q)) for q in questions]

advantage = build(kinds.AdvantageEstimator, "grpo")
aggregator = build(kinds.Aggregator, "token-mean")
clipped = build(kinds.PolicyLoss, "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})
optimizer = MasterOptimizer(policy, OptimizerSection(learning_rate=1e-3), total_steps=2 * steps)
settings = UpdateSettings(1, num_mini_batches=2, micro_batch_size=16, temperature=1.0, seed=0)
objective = Objective((LossTerm(clipped, aggregator),), aggregator)
learner = Learner(policy, optimizer, objective, settings)

for step in range(1, steps + 1):
    sampled = SamplingParams(num_generations=8, max_tokens=12, temperature=1.0, seed=step)
    batch = rollout_batch(generate_groups(engine, prompts, sampled), tokenizer)
    batch = with_rewards(batch, torch.tensor([reward(text) for text in batch.texts]))
    batch = batch.with_columns(advantages=advantage.estimate(batch).advantages)
    ready = ColumnFiller(learner).fill_for_update(batch, step, kl_coef=0.0)  # old log-probs
    metrics = ready.metrics | learner.update(ready.batch, step, kl_coef=0.0).metrics
    send_policy(engine, policy, policy_version=step)
    shown = f"loss {metrics['loss/total']:+.4f}  entropy {metrics['entropy/mean']:.2f}"
    print(f"step {step}  reward {batch.column('rewards').mean():.3f}  {shown}")
