"""Runs in which a student learns a toy task from a teacher of the same run, without any reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.kit.tiny import (
    BARE_TEMPLATE,
    END,
    START,
    make_tiny_bpe_tokenizer,
    make_tiny_model,
)
from posttrain.core.types import Problem
from tests.helpers.learning import NO_KL, Learned, make_model, run, run_config
from tests.helpers.rollouts import load_tiny

STEP = {
    "kind": "rl",
    "prompts_per_step": 16,
    "num_generations": 8,
    "micro_batch_size": 128,
    "generation": {"max_response_length": 2},
    "evaluate_every": 0,
    "optimizer": {"learning_rate": 5.0e-3},
}
TASK = {"places": 1, "repeats": 2, "held_out_permille": 300}
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
BY_TEXT: dict[str, dict[str, Any]] = {
    "uld": {"distillation": "uld"},
    "observed": {"distillation": {"name": "uld", "merge": "observed", "divergence": "forward"}},
}
"""Stages whose teacher has another tokenizer."""


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
    config = run_config(make_model(folder, seed), seed, stages, TASK, held_out=1)
    config["limits"]["learner_ranks"] = ranks
    return run(folder, config)


def distil_texts(
    folder: Path,
    seed: int,
    students: dict[str, dict[str, Any]],
    *,
    steps: int,
    ranks: int = 1,
    end: str = END,
) -> Learned:
    """A run of `students` of characters, whose teacher has pieces of words, other ids and `end`."""
    listed = {"teachers": {"big": {"model": str(make_teacher(folder / "big", seed, end))}}}
    common = {**STEP, **listed, "inputs": {"model": "base"}, "algorithm": "gkd", "steps": steps}
    stages = {name: {**common, **fields} for name, fields in students.items()}
    config = run_config(make_model(folder, seed), seed, stages, TASK, held_out=1)
    config["limits"]["learner_ranks"] = ranks
    return run(folder, config)


def make_teacher(folder: Path, seed: int, end: str) -> Path:
    """A model of byte-level pieces that says a digit twice, and then `end`."""
    tokenizer = make_tiny_bpe_tokenizer(BARE_TEMPLATE)
    if end != END:
        named = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str().replace(END, end))
        tokenizer_class: Any = PreTrainedTokenizerFast  # Any: its constructor is not typed
        tokenizer = tokenizer_class(
            tokenizer_object=named,
            bos_token=START,
            eos_token=end,
            pad_token=end,
            chat_template=BARE_TEMPLATE,
        )
    make_tiny_model(folder, seed=seed, layers=1, init_std=0.05, tokenizer=tokenizer)
    chat, model = ChatTokenizer(tokenizer, None), load_tiny(folder, torch.float32)
    problems = [Problem(digit, digit, 2 * digit, 2 * digit) for digit in "0123456789"]
    rows = [(*chat.encode_prompt(p), *chat.encode_worked(p)) for p in problems]
    ids, optimizer = torch.tensor(rows), torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        labels = ids.clone()
        labels[:, :-3] = -100  # the answer and its end are learned
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder
