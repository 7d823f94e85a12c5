"""A sampler: the groups whose responses differ most in their verdicts."""

from __future__ import annotations

from statistics import pvariance

from pydantic import Field

from posttrain.core.contracts import PluginConfig, RolloutRequest, SampledRollout, Sampler


class ExampleConfig(PluginConfig):
    """Settings of `example`."""

    oversample: float = Field(
        default=1.5, ge=1, le=8, description="prompts sampled for one that is used"
    )


class Example(Sampler[ExampleConfig]):
    """Of oversample * P prompts, the P whose verdicts have the largest variance.

    Source: an example, after the filters of DAPO, arXiv:2503.14476, section 3.2.
    """

    name = "example"
    Config = ExampleConfig

    def sample(self, request: RolloutRequest) -> SampledRollout:
        """P groups, in the order of their prompts."""
        wanted = len(request.prompts)
        extra = round(wanted * (self.config.oversample - 1))
        prompts = [*request.prompts, *(request.more_prompts(extra) if extra else ())]
        groups = request.generate(prompts, request.params)
        spread = [pvariance(request.verify(group)) for group in groups]
        best = sorted(range(len(groups)), key=lambda i: -spread[i])[:wanted]
        kept = [groups[i] for i in sorted(best)]
        return SampledRollout(kept, {"plugin/left_out": float(len(groups) - len(kept))})
