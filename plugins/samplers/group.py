"""The plain sampler: every prompt once, the same number of responses each."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.contracts import (
    NoConfig,
    PromptGroup,
    RolloutEngine,
    SampledGroup,
    Sampler,
)
from posttrain.core.errors import RunError
from posttrain.core.hooks import hookimpl
from posttrain.core.types import SamplingParams


class GroupSampler(Sampler[NoConfig]):
    """G responses for each of P prompts, in one call of the engine; nothing is filtered.

    Source: GRPO's outcome sampling, DeepSeekMath, arXiv:2402.03300, algorithm 1.
    """

    name = "group"
    Config = NoConfig

    def sample(
        self,
        engine: RolloutEngine,  # type: ignore[type-arg]
        prompts: Sequence[PromptGroup],
        params: SamplingParams,
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


@hookimpl
def posttrain_register() -> list[type[GroupSampler]]:
    """Offer this plugin."""
    return [GroupSampler]
