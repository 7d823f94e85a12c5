"""Sampled groups as JSON, exactly: what a resumed run is given equals what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from posttrain.core.contracts import PromptGroup, SampledGroup
from posttrain.core.errors import RunError
from posttrain.core.types import Completion, Problem

Json = dict[str, Any]  # Any: JSON
T = TypeVar("T")


def prompt_to_json(prompt: PromptGroup) -> Json:
    problem = prompt.problem
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return {
        "problem": values | {"metadata": dict(problem.metadata)},
        "prompt_ids": list(prompt.prompt_ids),
    }


def prompt_from_json(value: Mapping[str, Any]) -> PromptGroup:
    return PromptGroup(_made(Problem, value["problem"]), tuple(value["prompt_ids"]))


def groups_to_json(groups: Sequence[SampledGroup]) -> list[Json]:
    """Groups in order, each with its prompt and all that is known of its completions."""
    return [
        {
            "prompt": prompt_to_json(group.prompt),
            "completions": [asdict(completion) for completion in group.completions],
        }
        for group in groups
    ]


def groups_from_json(values: Sequence[Mapping[str, Any]]) -> list[SampledGroup]:
    """What `groups_to_json` was given. Raises `RunError` when it was written by another version."""
    return [
        SampledGroup(
            prompt_from_json(value["prompt"]),
            tuple(_made(Completion, completion) for completion in value["completions"]),
        )
        for value in values
    ]


def _made(cls: type[T], value: Mapping[str, Any]) -> T:
    try:
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
    except TypeError as error:
        raise RunError(
            f"a stored rollout does not fit this version ({error}): run with --fresh to start the "
            "stage anew"
        ) from error
