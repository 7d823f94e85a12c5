"""The contract of each plugin kind: what a plugin receives, what it returns, what it may declare.

A plugin is a class with a `name`, a pydantic `Config`, a docstring (formula, shapes, source) and
the methods of its kind. Everything a third party imports is here, whatever file it lives in.

Names are loaded when they are first asked for: a reward needs nothing that loads torch, and a
process without torch forks thirty times faster.
"""

# ruff: noqa: F403, F405 - a type checker sees the names of `__all__` through the stars below
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.core.contracts.advantages import *
    from posttrain.core.contracts.aggregation import *
    from posttrain.core.contracts.base import *
    from posttrain.core.contracts.columns import *
    from posttrain.core.contracts.correction import *
    from posttrain.core.contracts.environment import *
    from posttrain.core.contracts.kl import *
    from posttrain.core.contracts.optimizer import *
    from posttrain.core.contracts.policy import *
    from posttrain.core.contracts.preference import *
    from posttrain.core.contracts.renderer import *
    from posttrain.core.contracts.rollout import *
    from posttrain.core.contracts.stage import *
    from posttrain.core.contracts.teaching import *

    CONTRACTS: dict[str, type[Plugin]]  # type: ignore[type-arg]

# Where the names are looked for, in this order: what needs no torch comes first.
_MODULES = (
    "base",
    "columns",
    "rollout",
    "stage",
    "environment",
    "optimizer",
    "renderer",
    "advantages",
    "aggregation",
    "correction",
    "kl",
    "policy",
    "preference",
    "teaching",
)


def __getattr__(name: str) -> object:
    """A public name, from the first of the modules that has it."""
    found: object
    if name == "CONTRACTS":
        named = [__getattr__(each) for each in __all__ if each != name]
        found = {c.kind: c for c in named if isinstance(c, type) and "kind" in vars(c)}  # type: ignore[attr-defined]
    elif name in __all__:
        modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
        found = next(vars(module)[name] for module in modules if name in vars(module))
    else:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found
    return found


__all__ = [
    "CONTRACTS",
    "REWARD_COLUMNS",
    "SEQUENCE_AGGREGATORS",
    "TEACHER_COLUMNS",
    "TEXT_COLUMNS",
    "AdvantageConfig",
    "AdvantageEstimator",
    "AdvantageTransform",
    "Advantages",
    "Aggregator",
    "AggregatorConfig",
    "Algorithm",
    "AlphaPoConfig",
    "AnchoredConfig",
    "AnchoredLoss",
    "AnyEnvironment",
    "BetaConfig",
    "BetaPairLoss",
    "ComparisonConfig",
    "Component",
    "ConfigT",
    "Correction",
    "CorrectionConfig",
    "Counts",
    "DistillationLoss",
    "DrawnToken",
    "EngineSetup",
    "EntropyController",
    "Environment",
    "FieldPlace",
    "GeneralCorrection",
    "GroupAdvantage",
    "GroupConfig",
    "KlController",
    "KlEstimator",
    "LabelLoss",
    "LabelledScores",
    "LiveEnvironment",
    "ModelEndpoint",
    "ModelSize",
    "MovingController",
    "NoConfig",
    "Observation",
    "Opening",
    "Optimizer",
    "Outcome",
    "PairLoss",
    "PairScores",
    "PlayedEnvironment",
    "Plugin",
    "PluginConfig",
    "PolicyLoss",
    "PreferenceLoss",
    "Prepared",
    "PromptGroup",
    "RatioConfig",
    "RegularExpression",
    "RejectConfig",
    "Rendered",
    "Renderer",
    "Reward",
    "RewardContext",
    "RolloutCorrection",
    "RolloutEngine",
    "RolloutRequest",
    "RowAdvantage",
    "RowLoss",
    "SampledGroup",
    "SampledRollout",
    "Sampler",
    "SequenceRatioConfig",
    "Stage",
    "StageBase",
    "StageConfigT",
    "StageEstimate",
    "StageOutput",
    "StageRun",
    "StageSetting",
    "StageTokenizer",
    "StartConfig",
    "Task",
    "TeacherRows",
    "TextLoss",
    "TokenAdvantage",
    "TokenLoss",
    "Tool",
    "ToolResult",
    "Turn",
    "TurnAdvantage",
    "TurnConfig",
    "ValueAdvantage",
    "ValueConfig",
    "WeightSource",
    "WeightedConfig",
    "WhitenedConfig",
]
