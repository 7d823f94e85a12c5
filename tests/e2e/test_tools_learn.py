"""ARPO through the real command: a tiny model learns when to call a tool whose answer it needs.

The prompt is a pair of letters, the answer a digit that only a text file knows. Fine-tuning shows
the model, as a cold start, how a call is written, in half of its examples; the others guess. What
is left to reinforcement is to call always, and that pays: a guess is right once in ten. Unseen
pairs show that nothing was learned by heart.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.learning import SEEDS, Learned, final, run, run_config
from tests.helpers.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEPS = 40


def write_texts(folder: Path) -> None:
    """What the tool finds, and problems with worked answers, half of them with a call."""
    draw = random.Random(7)
    pairs = [a + b for a in LETTERS for b in LETTERS]
    facts = {pair: str(draw.randrange(10)) for pair in pairs}
    (folder / "facts.txt").write_text("".join(f"{k} {v}\n" for k, v in facts.items()))
    rows = []
    for pair, answer in facts.items():
        call = f"{pair}?[{pair} {answer}]{answer}"
        # By chance, so that nothing in a prompt tells which it is.
        worked = call if draw.random() < 0.5 else str(draw.randrange(10))
        rows.append({"prompt": pair, "answer": answer, "worked": worked})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "problems.jsonl").write_text(text)


def tools_config(folder: Path, seed: int) -> dict[str, Any]:
    """Fine-tuning, then ARPO's tree with the preset's settings, and the gain on unseen pairs."""
    tokenizer = make_tiny_tokenizer(f"\n0123456789?[] {LETTERS}", BARE_TEMPLATE)
    model = make_tiny_model(
        folder / "model", seed=seed, kv_heads=2, init_std=0.05, tokenizer=tokenizer
    )
    write_texts(folder)
    environment = {
        "name": "tools",
        "tools": [
            {"name": "search", "path": str(folder / "facts.txt"), "passage": "line", "top": 1}
        ],
        "call_open": "",
        "call_close": "?",
        "result": "[{result}]",
        "instructions": "",
        "max_calls": 1,
        "max_turns": 2,
    }
    stages: dict[str, Any] = {
        "sft": {
            "kind": "sft",
            "inputs": {"model": "base"},
            "steps": 160,
            "batch_size": 32,
            "optimizer": {"learning_rate": 5.0e-3},
        },
        "before": {"kind": "evaluate", "inputs": {"model": "sft"}, "environment": environment},
        "rl": {
            "kind": "rl",
            "inputs": {"model": "sft"},
            "algorithm": "arpo",
            "environment": environment,
            "steps": STEPS,
            "prompts_per_step": 16,
            "num_generations": 8,
            "micro_batch_size": 128,
            "generation": {"max_response_length": 14},
            "evaluate_every": STEPS,
            "optimizer": {"learning_rate": 3.0e-3},
        },
        "after": {
            "kind": "evaluate",
            "inputs": {"model": "rl", "baseline": "before"},
            "environment": environment,
        },
    }
    task = {
        "name": "jsonl",
        "path": str(folder / "problems.jsonl"),
        "worked_field": "worked",
        "match": "exact",
        "held_out_permille": 200,
    }
    config = run_config(model, seed, stages, {}, held_out=60)
    config["model"]["max_model_len"] = 32
    config["evaluation"] |= {"max_response_length": 14, "num_samples": 2}
    return {**config, "task": task}


def assert_learned(learned: Learned) -> None:
    """It calls nearly always in the end, is right nearly always, and its trees are trees."""
    rewards = learned.history("rl", "reward/mean")
    calls = learned.history("rl", "tools/calls_per_response")
    assert len(rewards) == STEPS
    assert rewards[0] < 0.7 and final(rewards) > 0.9
    assert calls[0] < 0.75 and final(calls) > 0.95
    assert set(learned.history("rl", "tree/leaves")) == {8.0}
    branches = learned.history("rl", "tree/branches")
    assert max(branches) > 1 and min(branches) >= 0
    assert max(learned.history("rl", "tree/shared_tokens_frac")) > 0.05
    assert max(learned.history("rl", "mismatch/k3")) < 1e-6, "engine and trainer agree"
    assert learned.metric("after", "eval/greedy_accuracy") > 0.9, "on pairs it never saw"
    assert learned.metric("after", "eval/sampled_accuracy") > 0.85
    at_end = [value for _, value in learned.curve("rl", "eval/greedy_accuracy")]
    assert at_end[-1] == learned.metric("after", "eval/greedy_accuracy")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_arpo_learns_to_call_its_tool(tmp_path: Path) -> None:
    assert_learned(run(tmp_path, tools_config(tmp_path, seed=0)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS[1:])
def test_arpo_learns_to_call_its_tool_from_other_seeds(tmp_path: Path, seed: int) -> None:
    assert_learned(run(tmp_path, tools_config(tmp_path, seed=seed)))
