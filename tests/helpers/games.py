"""Runs of a tiny model in the game of `live.py`, or with the program of `program.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from tests.helpers import live, program
from tests.helpers.pipeline import journal_lines


def game_model(folder: Path, seed: int = 1) -> Path:
    """A tiny model whose characters are those of the game, nearly uniform."""
    tokenizer = make_tiny_tokenizer(live.CHARACTERS, live.TEMPLATE)
    return make_tiny_model(folder, seed=seed, init_std=0.02, tokenizer=tokenizer)


def game(name: str, **fields: Any) -> dict[str, Any]:
    """The section `environment` of a class of either file."""
    place = live if hasattr(live, name) else program
    return {"name": f"{place.__file__}:{name}", **fields}


def game_run(model: Path, *, evaluate: bool = False, **rl: Any) -> dict[str, Any]:
    """A config with an RL stage, and an evaluation in its environment if that is wanted."""
    placed = {name: rl[name] for name in ("environment",) if name in rl}
    measured = {"kind": "evaluate", "inputs": {"model": "rl"}, **placed}
    stage = {
        "kind": "rl",
        "inputs": {"model": "base"},
        "algorithm": "grpo",
        "prompts_per_step": 4,
        "num_generations": 4,
        "micro_batch_size": 64,
        "generation": {"max_response_length": 32},
        "rewards": ["environment"],
        "evaluate_every": 0,
        "optimizer": {"learning_rate": 1.0e-3},
        **rl,
    }
    return {
        "name": "game",
        "engine": "transformers",
        "model": {"source": str(model), "dtype": "float32", "max_model_len": 64},
        "task": {"name": "episodes", "prompt": "3"},
        "evaluation": {"num_problems": 8, "max_response_length": 32, "num_samples": 0},
        "limits": {"num_threads": 1},
        "stages": {"rl": stage, **({"evaluate": measured} if evaluate else {})},
    }


def metrics_of(home: Path) -> dict[int, dict[str, float]]:
    """What the run noted of each step of its RL stage."""
    lines = map(json.loads, journal_lines(home, "rl"))
    return {each["step"]: each["metrics"] for each in lines if each["metrics"]}
