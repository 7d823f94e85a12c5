"""Whole GRPO steps, ours and TRL's GRPOTrainer in turn in one run; prints one JSON line.

Same model, prompts, group size, lengths (every response is full) and precision; ours keeps float32
master weights, TRL's does not. TRL is set up `fastest` (eager attention, micro-batches of 32, fused
AdamW, freed memory kept, as ours) or as `documented`. A step of ours runs after each of TRL's, in
the same process. TRL is not among posttrain's dependencies:

    pip install --no-deps trl==1.16.0
    python tests/bench/step.py [--json] [--engine vllm] [--trl documented] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from posttrain.core.config.sections import ModelSection, OptimizerSection
from posttrain.core.contracts import (
    AdvantageEstimator,
    Aggregator,
    EngineSetup,
    PolicyLoss,
    RolloutEngine,
)
from posttrain.core.data.packing import response_batch
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.models.loading import ModelRuntime, load_policy
from posttrain.core.models.source import obtain
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.runtime.device import keep_freed_memory
from posttrain.core.training.learner import Learner
from posttrain.core.training.objective import LossTerm, Objective
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.updates import UpdateSettings
from posttrain.core.types import SamplingParams

MAX_LEN = 512
RATE = 1e-6


def questions(count: int) -> list[str]:
    """Prompts of about 40 tokens with the chat template."""
    return [f"Question {i}: what is {37 * i % 91} plus {53 * i % 87}?" for i in range(count)]


def reward_of(token_ids: Sequence[int]) -> float:
    """Any reward that differs within a group, so that both have something to learn."""
    return (sum(token_ids) % 97) / 97


class Ours:
    """Rollout, reward, advantages, update and sync, as the pipeline's RL step has them."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        device, dtype = torch.device("cpu"), getattr(torch, options.dtype)
        self.options, manager = options, PluginManager()
        self.tokenizer = ChatTokenizer.load(folder)
        self.prompts = [
            self.tokenizer.encode_chat([{"role": "user", "content": text}])
            for text in questions(options.prompts)
        ]
        self.engine: Any = manager.build(RolloutEngine, options.engine, {})
        rows = options.prompts * options.generations
        self.engine.start(
            EngineSetup(
                folder, dtype, device, MAX_LEN, rows, (), self.tokenizer.pad_token_id, seed=0
            )
        )
        mean = manager.build(Aggregator, "token-mean")
        term = LossTerm(manager.build(PolicyLoss, "ppo_clip", {}), mean)
        self.estimator = manager.build(AdvantageEstimator, "grpo", {})
        model = load_policy(folder, ModelRuntime(device, dtype, "stream"))
        self.learner = Learner(
            model,
            MasterOptimizer(model, OptimizerSection(learning_rate=RATE), 1000),
            Objective((term,), mean),
            UpdateSettings(1, 1, options.micro, 1.0, 0),
        )

    def step(self, number: int) -> dict[str, float]:
        """Seconds of each phase."""
        took, began = {}, time.perf_counter()

        def lap(name: str) -> None:
            nonlocal began
            took[name] = time.perf_counter() - began
            began = time.perf_counter()

        options = self.options
        params = SamplingParams(options.generations, options.tokens, seed=number)
        groups = self.engine.generate(self.prompts, params)
        lap("rollout")
        rows = [(g, c) for g, group in enumerate(groups) for c in group]
        batch = response_batch(
            prompts=[self.prompts[g] for g, _ in rows],
            responses=[c.token_ids for _, c in rows],
            group_ids=[g for g, _ in rows],
            pad_token_id=self.tokenizer.pad_token_id,
            problems=(),
            response_logprobs=[c.logprobs for _, c in rows],
            policy_versions=[c.policy_version for _, c in rows],
        )
        rewards = torch.tensor([reward_of(c.token_ids) for _, c in rows])
        batch = batch.with_columns(rewards=rewards)
        lap("reward")
        batch = batch.with_columns(advantages=self.estimator.advantages(batch).advantages)
        lap("advantages")
        self.learner.update(batch, number, 0.0)
        lap("update")
        self.engine.sync_weights(self.learner.model.state_dict().items(), policy_version=number)
        lap("sync")
        assert int(batch.mask.sum()) == options.tokens * len(rows)
        return took


class InTurn(transformers.TrainerCallback):  # type: ignore[misc]
    """Times TRL's steps, and takes one of ours after each."""

    def __init__(self, ours: Ours) -> None:
        self.ours, self.began, self.trl = ours, 0.0, list[float]()
        self.own: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trl.append(time.perf_counter() - self.began)
        self.own.append(self.ours.step(len(self.own)))


def train_with_trl(folder: Path, options: argparse.Namespace, in_turn: InTurn) -> None:
    """GRPOTrainer for as many steps as there are rounds, and one more to warm up."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    fastest = options.trl == "fastest"
    rows = options.prompts * options.generations
    micro = options.micro if fastest else 8
    prompts = [[{"role": "user", "content": text}] for text in questions(options.prompts)]
    steps = options.rounds + 1
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            max_steps=steps,
            learning_rate=RATE,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=options.generations,
            max_completion_length=options.tokens,
            generation_kwargs={"min_new_tokens": options.tokens},
            beta=0.0,
            temperature=1.0,
            lr_scheduler_type="constant",
            bf16=options.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=steps + 1,
            disable_tqdm=True,
            model_init_kwargs={"dtype": options.dtype}
            | ({"attn_implementation": "eager"} if fastest else {}),
            **({"optim": "adamw_torch_fused"} if fastest else {}),
        )
        trainer = GRPOTrainer(
            model=str(folder),
            args=config,
            reward_funcs=lambda completion_ids, **_: [reward_of(ids) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
            callbacks=[in_turn],
        )
        trainer.train()


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Medians over rounds, of times and of their ratios; the first round warms up."""
    if options.trl == "fastest":
        keep_freed_memory()
    folder = options.model or obtain(ModelSection(), options.home / "models").path
    ours = Ours(folder, options)
    in_turn = InTurn(ours)
    try:
        train_with_trl(folder, options, in_turn)
    finally:
        ours.engine.close()
    import trl

    theirs, own = in_turn.trl[1:], in_turn.own[1:]
    totals = [sum(phases.values()) for phases in own]
    ratios = [t / o for t, o in zip(theirs, totals, strict=True)]
    return {
        "benchmark": "step",
        "seconds": {
            "ours": round(statistics.median(totals), 2),
            "trl": round(statistics.median(theirs), 2),
        },
        "phases": {
            name: round(statistics.median(phases[name] for phases in own), 3) for name in own[0]
        },
        "trl_over_ours": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "trl_setup": options.trl,
        "engine": options.engine,
        "shape": f"{options.prompts} x {options.generations} x {options.tokens}",
        "dtype": options.dtype,
        "model": folder.name,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line, for machines")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--trl", choices=["fastest", "documented"], default="fastest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--model", type=Path, default=None, help="default: the bundled SmolLM2")
    parser.add_argument("--home", type=Path, default=Path(".posttrain"))
    options = parser.parse_args()
    print(json.dumps(measure(options), indent=None if options.json else 2))


if __name__ == "__main__":
    main()
