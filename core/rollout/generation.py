"""One turn: every prompt's responses in one call of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.core.contracts import PromptGroup, RolloutEngine, SampledGroup
from posttrain.core.errors import RunError
from posttrain.core.types import SamplingParams


def generate_groups(
    engine: RolloutEngine[Any], prompts: Sequence[PromptGroup], params: SamplingParams
) -> list[SampledGroup]:
    """One group of `params.num_generations` completions for each prompt, in order."""
    completions = engine.generate([prompt.prompt_ids for prompt in prompts], params)
    sizes = [len(group) for group in completions]
    if sizes != [params.num_generations] * len(prompts):
        raise RunError(
            f"engine '{engine.name}' returned groups of {sizes} responses, expected "
            f"{len(prompts)} groups of {params.num_generations}: this is a fault of the "
            "engine, choose another one"
        )
    return [
        SampledGroup(prompt, tuple(group))
        for prompt, group in zip(prompts, completions, strict=True)
    ]
