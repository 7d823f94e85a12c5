"""Problems of a task in the order a stage consumes them, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.core.contracts import Task
from posttrain.core.data.json_lines import read_json_lines
from posttrain.core.errors import DataError
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.types import Problem


def training_problems(task: Task[Any], count: int, seed: int, purpose: str) -> list[Problem]:
    """`count` training problems for `purpose`; a finite task is gone through again, reshuffled."""
    available = task.available("train")
    distinct = count if available is None else min(count, available)
    if distinct == 0:
        raise DataError(f"task '{task.name}' has no training problems: the data set is empty")
    pool = task.problems("train", distinct, derive_seed(seed, "problems", purpose))
    return repeat_problems(pool, count, seed, purpose)


def held_out_problems(task: Task[Any], count: int, seed: int) -> list[Problem]:
    """The held-out problems of every evaluation of a run; all there are, if fewer than `count`."""
    available = task.available("held_out")
    wanted = count if available is None else min(count, available)
    if wanted == 0:
        raise DataError(
            f"task '{task.name}' has no held-out problems: give it a held_out_path, or raise its "
            "held_out_permille"
        )
    return task.problems("held_out", wanted, derive_seed(seed, "problems", "held_out"))


def check_worked(task: Task[Any], problems: Sequence[Problem]) -> None:
    """Raise `DataError` if a problem has no worked answer to imitate."""
    missing = [problem for problem in problems if not problem.worked]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(problems)} training problems of task '{task.name}' have no "
            f"worked answer to imitate, such as {missing[0].prompt[:60]!r}: leave supervised "
            "learning out of the run, or choose other data"
        )


def problems_digest(problems: Sequence[Problem]) -> str:
    rows = [[p.key, p.prompt, p.answer, p.worked] for p in problems]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check_disjoint(train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """Raise `DataError` if a training problem is also held out: the task broke its contract."""
    shared = {p.key for p in train} & {p.key for p in held_out}
    if shared:
        raise DataError(
            f"{len(shared)} problem(s) are in both splits, for example {sorted(shared)[0]!r}: "
            "the task must keep train and held_out disjoint"
        )


def read_problems(path: Path) -> list[Problem]:
    """Problems of a data set that a stage made: JSON Lines with the fields of a `Problem`."""
    problems = []
    for row in read_json_lines(path, "inputs.dataset", '{"key": ..., "prompt": ...}'):
        values = row.values
        metadata = values.get("metadata")
        texts = {name: values.get(name) for name in ("key", "prompt", "answer", "worked")}
        plain = {name: text for name, text in texts.items() if isinstance(text, str)}
        if not isinstance(metadata, dict) or plain.keys() != texts.keys():
            raise DataError(f"{row.where} is no problem: run the stage that made it again")
        told = {str(name): str(value) for name, value in metadata.items()}
        problems.append(Problem(**plain, metadata=told))
    return problems


def repeat_problems(pool: Sequence[Problem], count: int, seed: int, purpose: str) -> list[Problem]:
    """`count` problems of `pool`, in order, then again and again in other orders."""
    chosen = list(pool)
    for epoch in range(1, -(-count // len(pool))):
        order = torch.randperm(len(pool), generator=generator(seed, "epoch", purpose, epoch))
        chosen += [pool[i] for i in order.tolist()]
    return chosen[:count]
