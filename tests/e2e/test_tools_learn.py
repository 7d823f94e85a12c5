"""RL through the real command: a tiny model learns to call a tool whose answer it needs.

Fine-tuning shows the model, as a cold start, how a call is written, in a part of its examples; the
others guess. What is left to reinforcement is to call always, and that pays. Unseen problems show
that nothing was learned by heart. A call is text between tags, with the tree of ARPO, or a message
that follows a JSON schema, with GRPO.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from tests.helpers.learning import SEEDS, Learned, final, run, run_config

every_seed = pytest.mark.parametrize("seed", SEEDS)
SFT: dict[str, Any] = {"batch_size": 32, "optimizer": {"learning_rate": 5.0e-3}}
RL = {"prompts_per_step": 16, "num_generations": 8, "micro_batch_size": 128}


def learning_config(
    folder: Path,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    *,
    environment: dict[str, Any],
    task: dict[str, Any],
    sft: dict[str, Any],
    rl: dict[str, Any],
    length: int,
) -> dict[str, Any]:
    """Fine-tuning, then RL with answers of `length` tokens, and the gain on unseen problems."""
    model = make_tiny_model(
        folder / "model", seed=seed, kv_heads=2, init_std=0.05, tokenizer=tokenizer
    )
    judged = {"kind": "evaluate", "environment": environment}
    stages: dict[str, Any] = {
        "sft": {"kind": "sft", "inputs": {"model": "base"}} | SFT | sft,
        "before": judged | {"inputs": {"model": "sft"}},
        "rl": {
            "kind": "rl",
            "inputs": {"model": "sft"},
            "environment": environment,
            "generation": {"max_response_length": length},
            **RL,
            **rl,
        },
        "after": judged | {"inputs": {"model": "rl", "baseline": "before"}},
    }
    config = run_config(model, seed, stages, {}, held_out=60)
    config["model"]["max_model_len"] = 64
    config["evaluation"] |= {"max_response_length": length, "num_samples": 2}
    path = str(folder / "problems.jsonl")
    return config | {"task": {"path": path, "match": "exact", "held_out_permille": 200, **task}}


def assert_learned(learned: Learned, steps: int, *, start: float) -> None:
    """It calls nearly always in the end, and is right nearly always, also on unseen problems."""
    rewards = learned.history("rl", "reward/mean")
    calls = learned.history("rl", "tools/calls_per_response")
    assert len(rewards) == steps
    assert rewards[0] < start and final(rewards) > 0.9
    assert calls[0] < 0.75 and final(calls) > 0.95
    assert max(learned.history("rl", "mismatch/k3")) < 1e-6, "engine and trainer agree"
    assert learned.metric("after", "eval/greedy_accuracy") > 0.9, "on problems it never saw"
    assert learned.metric("after", "eval/sampled_accuracy") > 0.85


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- calls between tags --------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ARPO_STEPS = 60


def write_facts(folder: Path) -> None:
    """Pairs of letters with a digit that only a text file knows, and worked answers to imitate."""
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
    write_rows(folder / "problems.jsonl", rows)


def arpo_config(folder: Path, seed: int) -> dict[str, Any]:
    """ARPO's tree with the preset's settings."""
    write_facts(folder)
    search = {"name": "search", "path": str(folder / "facts.txt"), "passage": "line", "top": 1}
    environment = {
        "name": "tools",
        "tools": [search],
        "call_open": "",
        "call_close": "?",
        "result": "[{result}]",
        "instructions": "",
        "max_calls": 1,
        "max_turns": 2,
    }
    return learning_config(
        folder,
        seed,
        make_tiny_tokenizer(f"\n0123456789?[] {LETTERS}", BARE_TEMPLATE),
        environment=environment,
        task={"name": "jsonl", "worked_field": "worked"},
        sft={"steps": 160},
        rl={
            "algorithm": "arpo",
            "steps": ARPO_STEPS,
            "evaluate_every": ARPO_STEPS,
            "optimizer": {"learning_rate": 3.0e-3},
        },
        length=14,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_seed
def test_arpo_learns_to_call_its_tool(tmp_path: Path, seed: int) -> None:
    learned = run(tmp_path, arpo_config(tmp_path, seed))
    assert_learned(learned, ARPO_STEPS, start=0.7)
    assert set(learned.history("rl", "tree/leaves")) == {8.0}
    branches = learned.history("rl", "tree/branches")
    assert max(branches) > 1 and min(branches) >= 0
    assert max(learned.history("rl", "tree/shared_tokens_frac")) > 0.05
    at_end = [value for _, value in learned.curve("rl", "eval/greedy_accuracy")]
    assert at_end[-1] == learned.metric("after", "eval/greedy_accuracy")


# --- calls by a JSON schema ----------------------------------------------------------------------

GRPO_STEPS = 50
# A call is two tokens and its expression, so that a tiny model can write it.
OPEN = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
CLOSE = '"}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name[0] }}{{ tool.function.name[1:] }}\n"
    "{% endfor %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|im_start|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>"
    "{% elif message.role == 'tool' %}[{{ message.content }}]"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def write_chats(folder: Path) -> None:
    """Sums of two numbers: chats to imitate, half with a call, and questions for other sums."""
    draw = random.Random(7)
    sums = [(a, b) for a in range(10, 60) for b in range(10, 40)]
    draw.shuffle(sums)
    chats = []
    for a, b in sums[:1000]:
        said: list[dict[str, Any]]
        if draw.random() < 0.5:
            call = {"name": "calculator", "arguments": {"expression": f"{a}+{b}"}}
            said = [
                {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
                {"role": "tool", "name": "calculator", "content": str(a + b)},
                {"role": "assistant", "content": str(a + b)},
            ]
        else:
            said = [{"role": "assistant", "content": str(draw.randrange(20, 98))}]
        chats.append({"messages": [asking(a, b), *said], "tools": [CALCULATOR]})
    problems = [{"prompt": [asking(a, b)], "answer": str(a + b)} for a, b in sums[1000:]]
    write_rows(folder / "chats.jsonl", chats)
    write_rows(folder / "problems.jsonl", problems)


def asking(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a}+{b}"}


def grpo_config(folder: Path, seed: int) -> dict[str, Any]:
    """GRPO on questions as messages. Rates fall to 0, or the last steps undo exact copying."""
    write_chats(folder)
    tokenizer = make_tiny_tokenizer("\n0123456789+[]calcutor", TEMPLATE)
    tokenizer.add_tokens([OPEN, CLOSE])
    return learning_config(
        folder,
        seed,
        tokenizer,
        environment={"name": "tool_calls", "tools": ["calculator"], "max_turns": 2},
        task={"name": "rows"},
        sft={
            "data": str(folder / "chats.jsonl"),
            "steps": 1000,
            "optimizer": SFT["optimizer"] | {"schedule": "linear"},
        },
        rl={
            "algorithm": "grpo",
            "steps": GRPO_STEPS,
            "optimizer": {"learning_rate": 1.5e-3, "schedule": "linear"},
        },
        length=24,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_seed
def test_grpo_learns_to_call_a_tool_by_its_schema(tmp_path: Path, seed: int) -> None:
    learned = run(tmp_path, grpo_config(tmp_path, seed))
    assert_learned(learned, GRPO_STEPS, start=0.75)
    assert learned.metric("before", "eval/sampled_accuracy") < 0.6
