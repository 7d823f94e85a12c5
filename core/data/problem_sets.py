"""Problems of a task or a file, as stages take them: how many, in which order, their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.core.contracts import Task
from posttrain.core.data.problems import FIELDS, problem_content, problem_from_json
from posttrain.core.errors import DataError
from posttrain.core.runtime.json_files import read_json_lines
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
    rows = [problem_content(problem) for problem in problems]
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
        known = {name: value for name, value in row.values.items() if name in FIELDS}
        try:
            problems.append(problem_from_json(known))
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{row.where} is not a problem ({error}): run the stage that made it again"
            ) from error
    return problems


def repeat_problems(pool: Sequence[Problem], count: int, seed: int, purpose: str) -> list[Problem]:
    """`count` problems of `pool`, in order, then again and again in other orders.

    Raises `DataError` for an empty pool; `purpose` is the stage that reads it.
    """
    if not pool:
        raise DataError(
            f"stage '{purpose}': the dataset that it reads has no problems, expected one or more "
            "lines in the problems.jsonl that its stage writes"
        )
    chosen = list(pool)
    for epoch in range(1, -(-count // len(pool))):
        order = torch.randperm(len(pool), generator=generator(seed, "epoch", purpose, epoch))
        chosen += [pool[i] for i in order.tolist()]
    return chosen[:count]


EXAMPLE = '{"prompt": "2 + 2 =", "completion": "4"}'


def read_examples(path: str, setting: str) -> list[Problem]:
    """Every line of the file as a problem whose worked answer is its `completion`."""
    file = Path(path)
    examples = []
    for row in read_json_lines(file, setting, EXAMPLE):
        prompt, completion = row.values.get("prompt"), row.values.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str) or not prompt:
            raise DataError(
                f"{row.where} needs the texts 'prompt' and 'completion', such as {EXAMPLE}; it has "
                f"{sorted(row.values)}: correct this line"
            )
        examples.append(Problem(row.where, prompt, completion, completion))
    return examples
