"""Runs in which a model teaches itself by what it does after it has read an answer.

The task answers a digit with another one, said twice, by a table: nothing in the question tells it.
A first stage makes a model that repeats the answer it has read, whatever it is, and knows no table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.core.kit.tiny import make_tiny_model, make_tiny_tokenizer
from tests.helpers.distilling import STEP
from tests.helpers.learning import Learned, run, run_config

TABLE = "3957160284"
CHAT = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '<|im_start|>' if message['role'] == 'user' else '<|im_end|>' }}{% endfor %}"
)
IMITATE = {
    "kind": "sft",
    "inputs": {"model": "base"},
    "batch_size": 100,
    "micro_batch_size": 100,
    "optimizer": {"learning_rate": 1.0e-2},
}
OWN = {"self": {"policy": {"template": "{prompt}\n{context}"}}}
SDFT = {"algorithm": "sdft", "teachers": OWN, "optimizer": {"learning_rate": 1.0e-2}}
FORWARD = {**SDFT, "distillation": {"name": "gkd", "divergence": "forward"}}
SDPO = {
    "algorithm": "sdpo",
    "teachers": OWN,
    "generation": {"max_response_length": 2, "temperature": 3.0},
    "num_generations": 16,
    "micro_batch_size": 160,
}


SIBLINGS = {"algorithm": "sdpo", "teachers": OWN, "optimizer": {"learning_rate": 1.0e-3}}
"""Students that know a third of the answers, in groups of 8."""
HINTS = 4  # right answers in addition to ten that are each digit once


def learn_from_siblings(
    folder: Path, seed: int, students: dict[str, dict[str, Any]], *, steps: int
) -> Learned:
    """A run of a model that repeats what it reads and is right in a third of its answers without,
    and of `students` that start from it.
    """
    copies = [
        {"prompt": f"{digit}\n{2 * str(said)}", "completion": 2 * str(said)}
        for digit in range(10)
        for said in range(10)
    ]
    guesses = [
        {"prompt": str(digit), "completion": 2 * said}
        for digit, right in enumerate(TABLE)
        for said in ("0123456789" + HINTS * right)
    ]
    write_rows(folder / "start.jsonl", [*copies, *guesses])
    start = {**IMITATE, "data": str(folder / "start.jsonl"), "steps": 150}
    start |= {"batch_size": 240, "micro_batch_size": 240}
    stages: dict[str, Any] = {"start": start}
    for name, fields in students.items():
        groups = {"prompts_per_step": 10, "num_generations": 8, "inputs": {"model": "start"}}
        stages[name] = {**STEP, **groups, "steps": steps, **fields}
    return run_by_table(folder, seed, stages)


def self_distil(
    folder: Path, seed: int, students: dict[str, dict[str, Any]], *, copy_steps: int, steps: int
) -> Learned:
    """A run of a model that repeats what it reads, and of `students` that start from it."""
    copies = [
        {"prompt": f"{digit}\n{2 * str(said)}", "completion": 2 * str(said)}
        for digit in range(10)
        for said in range(10)
    ]
    write_rows(folder / "copies.jsonl", copies)
    stages: dict[str, Any] = {
        "copy": {**IMITATE, "data": str(folder / "copies.jsonl"), "steps": copy_steps}
    }
    for name, fields in students.items():
        stages[name] = {**STEP, "prompts_per_step": 10, "inputs": {"model": "copy"}, **fields}
        stages[name].setdefault("steps", steps)
    return run_by_table(folder, seed, stages)


def learn_from_halves(folder: Path, seed: int, *, teacher_steps: int, steps: int) -> Learned:
    """A run of two models that know one half of the table each, and a student of both."""
    halves = {"low": range(5), "high": range(5, 10)}
    stages: dict[str, Any] = {}
    for name, digits in halves.items():
        rows = [{"prompt": str(d), "completion": 2 * TABLE[d]} for d in digits]
        write_rows(folder / f"{name}.jsonl", rows)
        stages[name] = {**IMITATE, "data": str(folder / f"{name}.jsonl"), "steps": teacher_steps}
    inputs = {"model": "base", "low": "low", "high": "high"}
    student = {"algorithm": "mopd", "teachers": {"low": {}, "high": {}}, "inputs": inputs}
    stages["both"] = {**STEP, "prompts_per_step": 10, "steps": steps, **student}
    return run_by_table(folder, seed, stages)


def run_by_table(folder: Path, seed: int, stages: dict[str, Any]) -> Learned:
    """A run of `stages` on the table, whose two halves are the data sets `low` and `high`."""
    problems = [
        {"prompt": str(d), "answer": 2 * said, "dataset": "low" if d < 5 else "high"}
        for d, said in enumerate(TABLE)
    ]
    write_rows(folder / "problems.jsonl", problems)
    write_rows(folder / "held_out.jsonl", [{**problems[0], "prompt": "00"}])
    tokenizer = make_tiny_tokenizer("\n0123456789", CHAT)
    model = make_tiny_model(
        folder / "model", seed=seed, layers=1, kv_heads=2, init_std=0.05, tokenizer=tokenizer
    )
    config = run_config(model, seed, stages, {}, held_out=1)
    config["task"] = {
        "name": "jsonl",
        "path": str(folder / "problems.jsonl"),
        "held_out_path": str(folder / "held_out.jsonl"),
        "match": "exact",
        "metadata_fields": ["dataset"],
    }
    return run(folder, config)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
