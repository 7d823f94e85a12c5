"""A KL coefficient that never changes."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import KlController, PluginConfig


class FixedConfig(PluginConfig):
    """Settings of `fixed`."""

    coef: float = Field(
        default=0.04, ge=0, le=1_000_000, description="0 = no KL term, no reference model needed"
    )


class FixedController(KlController[FixedConfig]):
    """beta_n = coef, whatever the KL is. It has no state.

    Source of the default 0.04: DeepSeekMath, arXiv:2402.03300, section 4.2.
    """

    name = "fixed"
    Config = FixedConfig

    def coefficient(self) -> float:
        """The configured coefficient."""
        return self.config.coef
