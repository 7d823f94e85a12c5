"""The GSPO-token preset: GSPO's ratio with a gradient per token."""

from __future__ import annotations

from posttrain.plugins.algorithms.gspo import Gspo


class GspoToken(Gspo):
    """GSPO with s_it = sg(s_i) pi_it / sg(pi_it), so that advantages may differ between tokens.

    With one advantage per response, value and gradient are those of `gspo`.
    Source: arXiv:2507.18071, eq. 13 and 14.
    """

    name = "gspo_token"
    fields = {
        **Gspo.fields,
        "policy_loss": {"name": "gspo_token", "clip_low": 3e-4, "clip_high": 4e-4},
    }
