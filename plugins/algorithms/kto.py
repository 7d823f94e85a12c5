"""The KTO preset: labelled answers against a reference point."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Kto(Algorithm[NoConfig]):
    """L = mean of 1 - sigmoid(0.1 (u - z_ref)); with the sign turned for unwanted answers.

    Needs no pairs, only single answers with a label. z_ref estimates the KL from the reference.
    Source: arXiv:2402.01306, eq. 8.
    """

    name = "kto"
    Config = NoConfig
    stage = "preference"
    fields = {
        "preference_loss": {
            "name": "kto",
            "beta": 0.1,
            "desirable_weight": 1.0,
            "undesirable_weight": 1.0,
        },
        "batch_size": 32,
    }
