"""The DPO preset: a logistic loss on the gap of log-ratios of pairs."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Dpo(Algorithm[NoConfig]):
    """L = mean of -logsigmoid(0.1 (u - v)), u and v the log-ratios of chosen and rejected.

    No reward model and no sampling: pairs, a policy and its frozen copy.
    Source: arXiv:2305.18290, eq. 7.
    """

    name = "dpo"
    Config = NoConfig
    stage = "preference"
    fields = {
        "preference_loss": {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0},
        "f_divergence": "reverse_kl",
    }
