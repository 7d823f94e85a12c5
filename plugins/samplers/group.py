"""The plain sampler: every prompt once, the same number of responses each."""

from __future__ import annotations

from posttrain.core.contracts import NoConfig, RolloutRequest, SampledRollout, Sampler


class GroupSampler(Sampler[NoConfig]):
    """G responses for each of P prompts, in one call of the engine; nothing is filtered.

    Source: GRPO's outcome sampling, DeepSeekMath, arXiv:2402.03300, algorithm 1.
    """

    name = "group"
    Config = NoConfig
    is_plain = True

    def sample(self, request: RolloutRequest) -> SampledRollout:
        """One group of `params.num_generations` completions for each prompt, in order."""
        return SampledRollout(request.generate(request.prompts, request.params))
