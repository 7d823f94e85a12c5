"""The contract of each plugin kind: what a plugin receives, what it returns, what it may declare.

A plugin is a class with a `name`, a pydantic `Config`, a docstring (formula, shapes, source) and
the methods of its kind. Everything a third party imports is here, whatever file it lives in.

Names are loaded when they are first asked for: a reward needs nothing that loads torch, and a
process without torch forks thirty times faster.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.core.contracts.advantages import (
        AdvantageConfig,
        AdvantageEstimator,
        Advantages,
        ComparisonConfig,
        GroupAdvantage,
        GroupConfig,
        RowAdvantage,
        TokenAdvantage,
    )
    from posttrain.core.contracts.aggregation import Aggregator, AggregatorConfig, Counts
    from posttrain.core.contracts.algorithm import Algorithm
    from posttrain.core.contracts.base import (
        ConfigT,
        NoConfig,
        Plugin,
        PluginConfig,
        RegularExpression,
    )
    from posttrain.core.contracts.correction import (
        CorrectionConfig,
        GeneralCorrection,
        RejectConfig,
        WeightedConfig,
    )
    from posttrain.core.contracts.environment import (
        Environment,
        Observation,
        Opening,
        Tool,
        ToolResult,
        Turn,
    )
    from posttrain.core.contracts.kl import KlController, KlEstimator, MovingController, StartConfig
    from posttrain.core.contracts.policy import (
        SEQUENCE_AGGREGATORS,
        AnchoredConfig,
        AnchoredLoss,
        Correction,
        PolicyLoss,
        Prepared,
        RatioConfig,
        RolloutCorrection,
        SequenceRatioConfig,
        TokenLoss,
    )
    from posttrain.core.contracts.preference import (
        BetaConfig,
        BetaPairLoss,
        LabelledScores,
        LabelLoss,
        PairLoss,
        PairScores,
        PreferenceLoss,
    )
    from posttrain.core.contracts.rollout import (
        EngineSetup,
        PromptGroup,
        Reward,
        RewardContext,
        RolloutEngine,
        RolloutRequest,
        SampledGroup,
        SampledRollout,
        Sampler,
        Task,
    )
    from posttrain.core.contracts.value_advantages import ValueAdvantage, ValueConfig

    CONTRACTS: dict[str, type[Plugin]]  # type: ignore[type-arg]

# Where the names are looked for, in this order: what needs no torch comes first.
_MODULES = (
    "base",
    "rollout",
    "environment",
    "algorithm",
    "advantages",
    "aggregation",
    "correction",
    "kl",
    "policy",
    "preference",
    "value_advantages",
)
_KINDS = (
    "AdvantageEstimator",
    "PolicyLoss",
    "Aggregator",
    "KlEstimator",
    "KlController",
    "RolloutCorrection",
    "PreferenceLoss",
    "Reward",
    "Sampler",
    "Task",
    "Environment",
    "Tool",
    "RolloutEngine",
    "Algorithm",
)


def __getattr__(name: str) -> object:
    """A public name, from the first of the modules that has it."""
    found: object
    if name == "CONTRACTS":
        found = {__getattr__(kind).kind: __getattr__(kind) for kind in _KINDS}  # type: ignore[attr-defined]
    elif name in __all__:
        modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
        found = next(vars(module)[name] for module in modules if name in vars(module))
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found
    return found


__all__ = [
    "CONTRACTS",
    "SEQUENCE_AGGREGATORS",
    "AdvantageConfig",
    "AdvantageEstimator",
    "Advantages",
    "Aggregator",
    "AggregatorConfig",
    "Algorithm",
    "AnchoredConfig",
    "AnchoredLoss",
    "BetaConfig",
    "BetaPairLoss",
    "ComparisonConfig",
    "ConfigT",
    "Correction",
    "CorrectionConfig",
    "Counts",
    "EngineSetup",
    "Environment",
    "GeneralCorrection",
    "GroupAdvantage",
    "GroupConfig",
    "KlController",
    "KlEstimator",
    "LabelLoss",
    "LabelledScores",
    "MovingController",
    "NoConfig",
    "Observation",
    "Opening",
    "PairLoss",
    "PairScores",
    "Plugin",
    "PluginConfig",
    "PolicyLoss",
    "PreferenceLoss",
    "Prepared",
    "PromptGroup",
    "RatioConfig",
    "RegularExpression",
    "RejectConfig",
    "Reward",
    "RewardContext",
    "RolloutCorrection",
    "RolloutEngine",
    "RolloutRequest",
    "RowAdvantage",
    "SampledGroup",
    "SampledRollout",
    "Sampler",
    "SequenceRatioConfig",
    "StartConfig",
    "Task",
    "TokenAdvantage",
    "TokenLoss",
    "Tool",
    "ToolResult",
    "Turn",
    "ValueAdvantage",
    "ValueConfig",
    "WeightedConfig",
]
