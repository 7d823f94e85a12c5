"""Memory of PPO against GRPO, from the estimates that `posttrain plan` prints."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from posttrain.core.analysis.pictures import Panel, Series
from posttrain.core.analysis.svg import Chart
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.estimate.estimate import Estimator
from posttrain.core.estimate.rates import Rates
from posttrain.core.estimate.shape import shape_of, stand_in
from posttrain.core.estimate.tokens import Lengths, RunData
from posttrain.core.plugin_manager import PluginManager

SIZES = (0.5e9, 1.5e9, 3e9, 7e9)
PROMPT, RESPONSE, MICRO = 256, 1024, 4
NO_KL: dict[str, Any] = {"kl": {"controller": {"name": "fixed", "coef": 0.0}}}
KL: dict[str, Any] = {"kl": {"controller": {"name": "fixed", "coef": 0.01}}}
METHODS: dict[str, dict[str, Any]] = {
    "GRPO without KL": {"algorithm": "grpo", **NO_KL},
    "GRPO": {"algorithm": "grpo", **KL},
    "PPO": {"algorithm": "ppo"},
    "GRPO, LoRA": {"algorithm": "grpo", **KL, "lora": {}},
    "PPO, both LoRA": {"algorithm": "ppo", "lora": {}, "critic": {"lora": {}}},
}
PARTS = ("weights", "masters", "gradients", "moments", "reference")


@cache
def memory(size: float) -> dict[str, dict[str, float]]:
    """GB by method and part for a Llama of about `size` parameters in bfloat16 on one GPU."""
    stages = {
        f"stage{i}": {
            "kind": "rl",
            "inputs": {"model": "base"},
            "micro_batch_size": MICRO,
            "generation": {"max_response_length": RESPONSE},
            "evaluate_every": 0,
            **fields,
        }
        for i, fields in enumerate(METHODS.values())
    }
    config = {
        "model": {"source": "any", "dtype": "bfloat16", "max_model_len": 4096},
        "task": {"name": "arithmetic"},
        "stages": stages,
    }
    manager = PluginManager()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        data = RunData(resolve(load_config([path], []), manager).config, manager)
    estimator = Estimator(
        data=data,
        lengths=Lengths(PROMPT, (RESPONSE / 2, RESPONSE), 0, "assumed"),
        shape=shape_of(stand_in(size)),
        rates=Rates.of_device("h100", bfloat16=True),
        engine="vllm_server",  # samples elsewhere, so that only training is counted here
        engine_rows=256,
        engine_bytes=0.0,
        weight_bytes=2,
        compute_bytes=2,
    )
    found = estimator.stages(list(stages))
    return {name: found[f"stage{i}"]["memory"] for i, name in enumerate(METHODS)}


def parameters(size: float) -> float:
    return shape_of(stand_in(size)).total


def held(parts: dict[str, float]) -> float:
    """What a method keeps all the time, GB."""
    return sum(parts.get(name, 0.0) for name in PARTS)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def values() -> dict[str, str]:
    labels = [f"{parameters(size) / 1e9:.1f} B" for size in SIZES]
    totals = [[name, *(f"{held(memory(size)[name]):.0f}" for size in SIZES)] for name in METHODS]
    largest = memory(SIZES[-1])
    parts = [[name, *(f"{largest[name].get(part, 0.0):.0f}" for part in PARTS)] for name in METHODS]
    ratio = held(largest["PPO"]) / held(largest["GRPO without KL"])
    return {
        "totals": _table(["GB held", *labels], totals),
        "parts": _table(["GB", *PARTS], parts),
        "size": labels[-1],
        "ratio": f"{ratio:.1f}",
        "bytes_policy": f"{1e9 * held(largest['GRPO without KL']) / parameters(SIZES[-1]):.0f}",
        "bytes_ppo": f"{1e9 * held(largest['PPO']) / parameters(SIZES[-1]):.0f}",
        "training": f"{largest['GRPO']['training']:.0f}",
        "micro": f"{MICRO}",
        "tokens": f"{PROMPT + RESPONSE}",
        "lora": f"{held(largest['GRPO, LoRA']):.0f}",
        "lora_ppo": f"{held(largest['PPO, both LoRA']):.0f}",
    }


def charts() -> dict[str, Chart]:
    xs = [parameters(size) / 1e9 for size in SIZES]
    lines = [Series(name, "", xs, [held(memory(size)[name]) for size in SIZES]) for name in METHODS]
    panel = Panel("Memory held while training, without activations", "GB", lines)
    x = "parameters of the policy, billions"
    return {"ppo-memory": Chart(panel, x=x, smooth=False, width=680)}
