"""No importance weight."""

from __future__ import annotations

from posttrain.core.contracts import CorrectionConfig, GeneralCorrection


class NoCorrection(GeneralCorrection[CorrectionConfig]):
    """w = 1 and every token kept: the engine is taken to be the trainer's policy.

    With `reject`, tokens or responses that are too far off are dropped, still without a weight.
    Formula: the general form of verl 0.9.1, `rollout_is: null`.
    """

    name = "none"
    Config = CorrectionConfig
