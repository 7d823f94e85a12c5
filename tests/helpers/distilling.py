"""Runs in which a student learns a toy task from a teacher of the same run, without any reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.learning import NO_KL, Learned, make_model, run, run_config

STEP = {
    "kind": "rl",
    "prompts_per_step": 16,
    "num_generations": 8,
    "micro_batch_size": 128,
    "generation": {"max_response_length": 2},
    "evaluate_every": 0,
    "optimizer": {"learning_rate": 5.0e-3},
}
TEACHER = {**STEP, "inputs": {"model": "base"}, "algorithm": "grpo", "kl": NO_KL}
CANDIDATES = {"name": "gkd", "divergence": "forward", "support": "topk", "top_k": 4}
REF_KL = {"algorithm": "opd", "advantage_transform": [], "policy_loss": "ref_kl"}
IW_OPD = {"algorithm": "opd", "advantage_transform": "iw_opd", "policy_loss": "vanilla_pg"}
STUDENTS: dict[str, dict[str, Any]] = {
    "opd": {"algorithm": "opd"},
    "gkd": {"algorithm": "gkd"},
    "candidates": {"algorithm": "gkd", "distillation": CANDIDATES},
    "ref_kl": REF_KL,
    "iw_opd": IW_OPD,
}
"""A stage for each way to learn from a teacher."""
ITSELF: dict[str, Any] = {
    "algorithm": "sdft",
    "inputs": {"model": "big"},
    "teachers": {"self": {"policy": {"weights": "ema"}}},
    "steps": 2,
}
"""A stage whose teacher is the policy itself; `test_self_distillation.py` shows that it learns."""


def distil(
    folder: Path,
    seed: int,
    students: dict[str, dict[str, Any]],
    *,
    teacher_steps: int,
    steps: int,
    ranks: int = 1,
) -> Learned:
    """A run of a teacher and, from the same random weights, of `students` that learn from it."""
    stages: dict[str, Any] = {"big": {**TEACHER, "steps": teacher_steps}}
    for name, fields in students.items():
        inputs = {"model": "base", "teacher": "big"}
        stages[name] = {**STEP, "inputs": inputs, "steps": steps, **fields}
    task = {"places": 1, "repeats": 2, "held_out_permille": 300}
    config = run_config(make_model(folder, seed), seed, stages, task, held_out=1)
    config["limits"]["learner_ranks"] = ranks
    return run(folder, config)
