"""GRPO on chats through the real command: a tiny model learns to call a tool by its JSON schema.

The prompt is a message that asks for the sum of two numbers, which a calculator knows. Fine-tuning
on chats shows the model, as a cold start, how a call is written, in half of its examples; the
others guess. What is left to reinforcement is to call always. Unseen sums show that nothing was
learned by heart.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.learning import SEEDS, Learned, final, run, run_config
from tests.helpers.tiny import make_tiny_model, make_tiny_tokenizer

STEPS = 50
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


def make_tokenizer() -> PreTrainedTokenizerFast:
    made = make_tiny_tokenizer("\n0123456789+[]calcutor", TEMPLATE)
    made.add_tokens([OPEN, CLOSE])
    return made


def write_chats(folder: Path) -> None:
    """Chats to imitate, half of them with a call, and the questions of the rl stage."""
    draw = random.Random(7)
    sums = [(a, b) for a in range(10, 60) for b in range(10, 40)]
    draw.shuffle(sums)
    chats, problems = [], []
    for a, b in sums[:1000]:
        asked = {"role": "user", "content": f"{a}+{b}"}
        problems.append({"prompt": [asked], "answer": str(a + b)})
        if draw.random() < 0.5:
            call = {"name": "calculator", "arguments": {"expression": f"{a}+{b}"}}
            said: list[dict[str, Any]] = [
                {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
                {"role": "tool", "name": "calculator", "content": str(a + b)},
                {"role": "assistant", "content": str(a + b)},
            ]
        else:
            said = [{"role": "assistant", "content": str(draw.randrange(20, 98))}]
        chats.append({"messages": [asked, *said], "tools": [CALCULATOR]})
    for name, rows in (("chats", chats), ("problems", problems)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat_config(folder: Path, seed: int) -> dict[str, Any]:
    """Fine-tuning on the chats, then GRPO on the questions, and the gain on unseen ones."""
    model = make_tiny_model(
        folder / "model", seed=seed, kv_heads=2, init_std=0.05, tokenizer=make_tokenizer()
    )
    write_chats(folder)
    environment = {"name": "tool_calls", "tools": ["calculator"], "max_turns": 2}
    stages: dict[str, Any] = {
        "sft": {
            "kind": "sft",
            "inputs": {"model": "base"},
            "data": str(folder / "chats.jsonl"),
            "steps": 1000,
            "batch_size": 32,
            "optimizer": {"learning_rate": 5.0e-3},
        },
        "before": {"kind": "evaluate", "inputs": {"model": "sft"}, "environment": environment},
        "rl": {
            "kind": "rl",
            "inputs": {"model": "sft"},
            "algorithm": "grpo",
            "environment": environment,
            "steps": STEPS,
            "prompts_per_step": 16,
            "num_generations": 8,
            "micro_batch_size": 128,
            "generation": {"max_response_length": 24},
            "optimizer": {"learning_rate": 1.5e-3},
        },
        "after": {
            "kind": "evaluate",
            "inputs": {"model": "rl", "baseline": "before"},
            "environment": environment,
        },
    }
    task = {
        "name": "rows",
        "path": str(folder / "problems.jsonl"),
        "match": "exact",
        "held_out_permille": 200,
    }
    config = run_config(model, seed, stages, {}, held_out=60)
    config["model"]["max_model_len"] = 64
    config["evaluation"] |= {"max_response_length": 24, "num_samples": 2}
    return {**config, "task": task}


def assert_learned(learned: Learned) -> None:
    """It calls nearly always in the end, and is right nearly always, also on unseen sums."""
    rewards = learned.history("rl", "reward/mean")
    calls = learned.history("rl", "tools/calls_per_response")
    assert len(rewards) == STEPS
    assert rewards[0] < 0.75 and final(rewards) > 0.9
    assert calls[0] < 0.8 and final(calls) > 0.95
    assert max(learned.history("rl", "mismatch/k3")) < 1e-6, "engine and trainer agree"
    assert learned.metric("after", "eval/greedy_accuracy") > 0.9, "on sums it never saw"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_learns_to_call_a_tool_by_its_schema(tmp_path: Path, seed: int) -> None:
    assert_learned(run(tmp_path, chat_config(tmp_path, seed)))
