"""`k2` under the name that follows the pattern of the straight-through estimates."""

from __future__ import annotations

from posttrain.plugins.kl.k2 import K2


class K2Plus(K2):
    """k2+ = d^2 / 2 with d = logprobs - ref_logprobs, [B, T]: the same as `k2`.

    The value of k2 with the gradient of k2. It is here so that every `+` name of verl 0.9.1 works.
    """

    name = "k2+"
