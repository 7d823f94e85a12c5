"""The LUSPO preset: GSPO whose long responses are not diluted."""

from __future__ import annotations

from posttrain.core.contracts import Algorithm, NoConfig


class Luspo(Algorithm[NoConfig]):
    """L = (1 / N_seq) sum_i n_i max(-A_i s_i, -A_i clip(s_i, 1 - 3e-4, 1 + 4e-4)).

    GSPO's loss of a response, s_i its geometric mean ratio, counted once per token: a response of
    twice the length weighs twice as much, so length is neither rewarded nor punished by the mean.
    Source: "Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length
    Variation in RLVR" (2026), code github.com/murphy4122/luspo; TRL 1.16, `loss_type="luspo"`.
    """

    name = "luspo"
    Config = NoConfig
    variant_of = "gspo"
    fields = {
        "advantage": "grpo",
        "policy_loss": {
            "name": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "allow_any_agg": True,
        },
        "aggregator": "seq-mean-token-sum",
        "kl": {"controller": {"name": "fixed", "coef": 0.0}},
    }
