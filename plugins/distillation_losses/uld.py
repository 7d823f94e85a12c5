"""ULD: a divergence from a teacher of another tokenizer, over stretches of text that both cut."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.contracts import PluginConfig, RowLoss, TeacherRows, TextLoss
from posttrain.core.math.alignment import SMALLEST
from posttrain.core.math.divergence import (
    Divergence,
    divergence,
    relative_entropy,
    sorted_distance,
)


class UldConfig(PluginConfig):
    """Settings of `uld`."""

    merge: Literal["bayesian", "observed"] = Field(
        default="bayesian",
        description="the distribution of a stretch of several tokens: of its last one, after the "
        "others (bayesian), or of its first one (observed); times the probabilities of the others",
    )
    hybrid: bool = Field(
        default=True,
        description="tokens that are in both vocabularies are compared one by one, the others by "
        "their sorted probabilities; false = all are sorted, which is blind to which token is "
        "likely (ULD)",
    )
    divergence: Divergence = Field(
        default="jsd", description="of the tokens in both vocabularies, as of gkd"
    )
    beta: float = Field(default=0.5, ge=0.01, le=0.99, description="the teacher's share in jsd")
    weight: float = Field(default=0.5, ge=0, le=1, description="of forward in jeffreys")
    matched_weight: float | None = Field(
        default=None,
        ge=0,
        le=1_000,
        description="factor of the tokens in both vocabularies; null = their share of the "
        "teacher's vocabulary",
    )
    unmatched_weight: float | None = Field(
        default=None, ge=0, le=1_000, description="factor of the others; null = 1 - that share"
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="the policy's logits are divided by it, in addition to the sampling "
        "temperature",
    )
    teacher_temperature: float | None = Field(
        default=None, gt=0, le=100, description="the same of the teacher's; null = the same value"
    )

    @model_validator(mode="after")
    def _both_weights(self) -> UldConfig:
        if (self.matched_weight is None) is not (self.unmatched_weight is None):
            raise ValueError(
                "matched_weight and unmatched_weight are factors of two parts of one sum; give "
                "both, or neither"
            )
        if not self.hybrid and self.matched_weight is not None:
            raise ValueError("without hybrid there is one part; remove matched_weight")
        return self


class UldLoss(TextLoss[UldConfig]):
    """sum |sort(p_S) - sort(p_T)| per stretch [N]; hybrid: m D(p_S, p_T) over tokens in both
    vocabularies + u times that sum over the others.

    A row is a stretch: the shortest piece of the response that both tokenisations cut out. p is the
    distribution of one of its tokens times the probabilities (at least 1e-8) of the others, so the
    p of several tokens does not sum to 1. D is of `gkd`, with log p of at least log 1e-8; where a
    side has no other tokens, the second part is 0. The end of a response is a stretch of its own.
    The aggregator counts stretches. Sources: arXiv:2402.12030 (ULD); TRL's GOLD, which divides by
    the stretches of a response, then by responses (`aggregator: seq-mean-token-mean`), and reads
    logits one position late in `observed`, which this does not.
    """

    name = "uld"
    Config = UldConfig

    def __init__(self, config: UldConfig) -> None:
        super().__init__(config)
        self.at = "last" if config.merge == "bayesian" else "first"

    def temperatures(self) -> tuple[float, float]:
        config = self.config
        return config.temperature, config.teacher_temperature or config.temperature

    def rows(self, logits: Tensor, teacher: TeacherRows) -> RowLoss:
        """The distance [N] of stretches, whose logits are [N, V] and the teacher's [N, V']."""
        config = self.config
        assert teacher.logits is not None, "a loss of texts is given the teacher's logits"
        own, other = self.temperatures()
        log_t = torch.log_softmax(teacher.logits / other, dim=-1)
        p_s, p_t = torch.softmax(logits / own, dim=-1), log_t.exp()
        metrics = {"distil/teacher_entropy": -relative_entropy(log_t, torch.zeros_like(log_t))}
        pairs = teacher.matched
        if config.hybrid:
            assert pairs is not None, "a loss of texts is given the tokens in both vocabularies"
            shared = p_s.detach()[:, pairs[:, 0]].sum(dim=1)
            metrics["distil/matched_mass"] = shared
        if teacher.others is not None:
            p_s = p_s * teacher.others[:, None]
        if teacher.teacher_others is not None:
            p_t = p_t * teacher.teacher_others[:, None]
        if config.hybrid and pairs is not None:
            loss = self._hybrid(p_s, p_t, pairs)
        else:
            loss = sorted_distance(p_s, p_t)
        metrics["distil/divergence"] = loss.detach()
        return RowLoss(loss, torch.ones_like(loss, dtype=torch.bool), metrics)

    def _hybrid(self, p_s: Tensor, p_t: Tensor, pairs: Tensor) -> Tensor:
        """Both parts [N] of probabilities [N, V] and [N, V']."""
        config = self.config
        weights = config.matched_weight, config.unmatched_weight
        share = len(pairs) / p_t.shape[1]
        matched, unmatched = (
            given if given is not None else by_share
            for given, by_share in zip(weights, (share, 1 - share), strict=True)
        )
        log_s, log_t = (
            p[:, ids].clamp(min=SMALLEST).log()
            for p, ids in zip((p_s, p_t), pairs.unbind(dim=1), strict=True)
        )
        weight = config.weight if config.divergence == "jeffreys" else config.beta
        total = matched * divergence(log_s, log_t, config.divergence, weight)
        rest_s, rest_t = (_rest(p, ids) for p, ids in zip((p_s, p_t), pairs.T, strict=True))
        if rest_s.shape[1] and rest_t.shape[1]:
            total = total + unmatched * sorted_distance(rest_s, rest_t)
        return total


def _rest(probabilities: Tensor, ids: Tensor) -> Tensor:
    """`probabilities` [N, V] without the columns `ids`."""
    kept = torch.ones(probabilities.shape[1], dtype=torch.bool, device=ids.device)
    kept[ids] = False
    return probabilities[:, kept]
