"""Runs in which every preset trains a tiny random model, through the real command.

The task is to say a digit twice; the reward is the share of digits that are right, 0.07 at random.
One pipeline per seed has one stage per preset, all starting from the same weights. Preference
presets learn from a file and are judged by the share of unseen pairs that they rank right.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from tests.helpers.pipeline import prepared, run_loaded, write_config

REACHED = 0.9
LAST_STEPS = 5  # the final reward is the mean over these
SEEDS = tuple(int(seed) for seed in os.environ.get("POSTTRAIN_LEARNING_SEEDS", "0 1 2").split())
CHOSEN = os.environ.get("POSTTRAIN_LEARNING_PRESETS", "").split()
"""Presets and settings to try; empty = all."""
AT_ONCE = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Runs: each keeps one core busy, Prefect's server included one and a half."""
NO_KL = {"controller": {"name": "fixed", "coef": 0.0}}


@dataclass(frozen=True)
class Budget:
    """Steps a preset gets, and what it needs at this size in addition to the common settings.

    `preset` is what the stage trains with, where the stage has another name. `metric` is what it
    learns by.
    """

    steps: int = 30
    fields: dict[str, Any] = field(default_factory=dict)
    preset: str = ""
    metric: str = "reward/mean"


# KL terms are made weak, because a policy that copies lies 2.7 nats per token from a random one and
# published coefficients would forbid it. A critic learns as fast as the policy does.
# Four passes over each batch: at the common rate some runs fall back for a few steps.
SLOW: dict[str, Any] = {"optimizer": {"learning_rate": 2.0e-3}}
CRITIC = {"optimizer": {"learning_rate": 5.0e-3}}
# With lambda 0 the first token learns only from what the critic says of the second's state.
SHARP_CRITIC = {"epochs": 4, "clip": None, **CRITIC}
WEAK_REWARD_KL = {"controller": {"name": "fixed", "coef": 0.002}}
WEAK_ADAPTIVE_KL = {"controller": {"name": "adaptive", "coef": 0.002, "target": 6.0}}
BUDGETS: dict[str, Budget] = {
    "reinforce": Budget(),
    # The policy must not be faster than the critic it listens to.
    "a2c": Budget(150, {"critic": SHARP_CRITIC, "optimizer": {"learning_rate": 2.0e-3}}),
    "trpo": Budget(
        45, {"policy_loss": {"delta": 0.05, "fvp_token_fraction": 1.0}, "critic": CRITIC}
    ),
    "ppo": Budget(30, {"kl": WEAK_ADAPTIVE_KL, "critic": CRITIC, **SLOW}),
    "ppo_dual_clip": Budget(30, {"kl": WEAK_ADAPTIVE_KL, "critic": CRITIC, **SLOW}),
    "ppo_penalty": Budget(30, {"policy_loss": {"kl_target": 0.03}, "critic": CRITIC, **SLOW}),
    "ppo_ptx": Budget(
        30, {"kl": WEAK_REWARD_KL, "critic": CRITIC, "ptx": {"num_examples": 8}, **SLOW}
    ),
    # The worked answers of 8 problems.
    "chord": Budget(30, {"ptx": {"num_examples": 8}}),
    "prime": Budget(40, {"implicit_prm": {"optimizer": {"learning_rate": 1.0e-3}}}),
    "grpo": Budget(30, {"kl": {"controller": {"name": "fixed", "coef": 0.004}}}),
    "grpo_process": Budget(
        30,
        {
            "kl": {"controller": {"name": "fixed", "coef": 0.004}},
            "rewards": ["step_verdict"],
        },
    ),
    "dr_grpo": Budget(),
    "rloo": Budget(50, {"kl": WEAK_REWARD_KL}),
    "reinforce_pp": Budget(40, {"kl": {"controller": {"name": "fixed", "coef": 0.0005}}}),
    "remax": Budget(40),
    "gspo": Budget(),
    "gspo_token": Budget(),
    # Half right is half the verdict here, so the spread tells what a prompt can teach, and it earns
    # half the reward. Groups that are all right are not in the batch: what was learned shows in all
    # that was sampled.
    "dapo": Budget(
        30,
        {"sampler": {"name": "dynamic", "keep": "spread"}, "rewards": ["accuracy"]},
        metric="sampling/verdict_mean",
    ),
    "bapo": Budget(),
    "sapo": Budget(),
    # Answers of two digits call no tool; test_tools_learn.py has its tree.
    "arpo": Budget(30, {"sampler": "group"}),
    "cispo": Budget(),
    "gmpo": Budget(),
    "clip_cov": Budget(),
    "kl_cov": Budget(),
    "vapo": Budget(
        40,
        {
            # Its lambda is made for long answers, and 0 for those of two tokens.
            "advantage": {"name": "decoupled_gae", "alpha": 5.0},
            "critic": {**CRITIC, "pretrain_steps": 5},
        },
    ),
}


# Preferences teach no sampling: how often the greedy answer to unseen prompts is right is measured
# by a stage of its own. Each right answer stands against one wrong one. At the usual beta of 0.1
# DPO ranks as well, but may make both answers rare (its known failing), so no greedy one is right.
BETA = 0.5
PREFERENCES: dict[str, Budget] = {
    "dpo": Budget(3, {"data": "pairs.jsonl", "preference_loss": {"beta": BETA}}),
    "ipo": Budget(3, {"data": "pairs.jsonl"}),
    "kto": Budget(4, {"data": "labels.jsonl", "preference_loss": {"beta": BETA}}),
}


def chosen(budgets: dict[str, Budget]) -> dict[str, Budget]:
    """Those that `CHOSEN` names."""
    return {name: budget for name, budget in budgets.items() if not CHOSEN or name in CHOSEN}


PREFERENCE_TASK = {"places": 3, "repeats": 2, "held_out_permille": 300}


def learning_config(model_dir: Path, budgets: Mapping[str, Budget], seed: int) -> dict[str, Any]:
    """A run with one rl stage per budget, each from the same random weights."""
    stages = {}
    for name, budget in budgets.items():
        preset = budget.preset or name
        stages[name] = {
            "kind": "rl",
            "inputs": {"model": "base"},
            "algorithm": preset,
            "steps": budget.steps,
            "prompts_per_step": 16,
            "num_generations": 8,
            "micro_batch_size": 128,
            "generation": {"max_response_length": 2},
            "evaluate_every": 0,
            "optimizer": {"learning_rate": 5.0e-3},
            **named(budget.fields, preset),
        }
    task = {"places": 1, "repeats": 2, "held_out_permille": 300}
    return run_config(model_dir, seed, stages, task, held_out=1)


def preference_config(folder: Path, model_dir: Path, seed: int) -> dict[str, Any]:
    """A run with one preference stage per preset, each followed by an evaluation."""
    stages: dict[str, Any] = {}
    for name, budget in chosen(PREFERENCES).items():
        stages[name] = {
            "kind": "preference",
            "inputs": {"model": "base"},
            "algorithm": name,
            "epochs": budget.steps,
            "batch_size": 32,
            "micro_batch_size": 64,
            "evaluate_every": 6,
            "optimizer": {"learning_rate": 5.0e-3},
            **named(budget.fields, name),
            "data": str(folder / budget.fields["data"]),
        }
        stages[f"evaluate_{name}"] = {"kind": "evaluate", "inputs": {"model": name}}
    return run_config(model_dir, seed, stages, PREFERENCE_TASK, held_out=100)


def run_config(
    model_dir: Path, seed: int, stages: dict[str, Any], task: dict[str, int], *, held_out: int
) -> dict[str, Any]:
    """What both kinds of run share."""
    return {
        "name": "presets",
        "seed": seed,
        "engine": "transformers",
        "model": {"source": str(model_dir), "dtype": "float32", "max_model_len": 16},
        "task": {"name": "digits", **task},
        "evaluation": {"num_problems": held_out, "max_response_length": 2, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": stages,
    }


def write_preferences(folder: Path) -> None:
    """Pairs and labelled answers for the prompts that the task trains on."""
    from posttrain.core.contracts import Task
    from posttrain.core.plugin_manager import PluginManager

    task = PluginManager().build(Task, "digits", PREFERENCE_TASK)
    pairs, labels = [], []
    problems = task.problems("train", task.available("train") or 1, seed=0)
    for number, problem in enumerate(problems):
        wrong = str((int(problem.answer[0]) + 1 + number % 9) % 10) * 2
        labels.append({"prompt": problem.prompt, "completion": problem.answer, "label": True})
        labels.append({"prompt": problem.prompt, "completion": wrong, "label": False})
        pairs.append({"prompt": problem.prompt, "chosen": problem.answer, "rejected": wrong})
    for name, rows in (("pairs", pairs), ("labels", labels)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


def named(fields: dict[str, Any], preset: str) -> dict[str, Any]:
    """Settings of a preset's own loss carry its name, as YAML wants it."""
    own = {axis: fields[axis] for axis in ("policy_loss", "preference_loss") if axis in fields}
    return {**fields, **{axis: {"name": preset, **loss} for axis, loss in own.items()}}


@dataclass(frozen=True)
class Learned:
    """A finished run of several presets, and where its metrics are."""

    result: dict[str, Any]

    def history(self, name: str, metric: str) -> list[float]:
        """A tracked metric of a stage at each step that has it."""
        return [value for _, value in self.curve(name, metric)]

    def curve(self, name: str, metric: str) -> list[tuple[int, float]]:
        """The same with the steps."""
        from mlflow import MlflowClient

        client = MlflowClient(self.result["mlflow_uri"])
        stage = self.result["stages"][name]["mlflow_run_id"]
        found = client.get_metric_history(stage, metric)
        return sorted((point.step, point.value) for point in found)

    def metric(self, name: str, metric: str) -> float:
        """A stage's final metric."""
        return float(self.result["stages"][name]["metrics"][metric])


def start(
    pool: Executor, folder: Path, budgets: Mapping[str, Budget], seed: int
) -> Future[Learned]:
    """Train one rl stage per budget from the weights of `seed`, in one pipeline run."""
    # Weights are drawn here: torch's generator is one for all threads.
    config = learning_config(make_model(folder, seed), budgets, seed)
    return pool.submit(run, folder, config)


def start_preferences(pool: Executor, folder: Path, seed: int) -> Future[Learned]:
    """Train every preference preset from the weights of `seed`, and evaluate each."""
    write_preferences(folder)
    config = preference_config(folder, make_model(folder, seed), seed)
    return pool.submit(run, folder, config)


def make_model(folder: Path, seed: int) -> Path:
    """A random model of one layer that knows ten digits."""
    tokenizer = make_tiny_tokenizer("\n0123456789", BARE_TEMPLATE)
    return make_tiny_model(
        folder / "model", seed=seed, layers=1, kv_heads=2, init_std=0.05, tokenizer=tokenizer
    )


def run(folder: Path, config: dict[str, Any]) -> Learned:
    """The real command on `config`."""
    path = write_config(folder / "run.yaml", config)
    done = run_loaded(
        "run", str(path), "--home", str(prepared(folder / "home")), "--json", timeout=1800
    )
    if done.code != 0:
        raise SystemExit(done.text[-3000:])
    return Learned(done.result)


def final(curve: Sequence[float]) -> float:
    """Mean reward over the last steps."""
    last = curve[-LAST_STEPS:]
    return sum(last) / len(last)
