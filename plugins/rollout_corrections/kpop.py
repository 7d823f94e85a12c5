"""KPop: drop tokens whose two probabilities are far apart as a coin's would be."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import CorrectionConfig, GeneralCorrection
from posttrain.core.math.correction import Rejection


class KpopConfig(CorrectionConfig):
    """Settings of `kpop`."""

    phi: float = Field(
        default=2.0,
        gt=0,
        description="largest KL kept, nats (AReaL: 2; its authors tried 0.1 to 2, which drops 10 "
        "to 30 % of the tokens)",
    )


class Kpop(GeneralCorrection[KpopConfig]):
    """Keep token t iff max(b(p, q), b(q, p)) <= phi, b(p, q) = p ln(p/q) + (1-p) ln((1-p)/(1-q)).

    p and q are the trainer's and the engine's probability of the token: the KL of token against
    rest, whichever way is larger. It drops likely tokens that moved far (0.9 against 0.5, a ratio
    of 1.8) and keeps large ratios of rare ones (1e-4 against 1e-5); `mis_token` does the opposite.
    No weight; the counts stay. The same as `reject: [{stat: binary_kl, level: token, high: phi}]`.
    Source: `binary_kl` of AReaL 4aef98d8d.
    """

    name = "kpop"
    Config = KpopConfig

    def rejections(self) -> tuple[Rejection, ...]:
        """The KL of single tokens, and the config's own."""
        return (Rejection("binary_kl", "token", self.config.phi), *super().rejections())
