"""Replay: earlier groups that taught something are trained on again, next to fresh ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from posttrain.core.contracts import (
    PluginConfig,
    RolloutRequest,
    SampledGroup,
    SampledRollout,
    Sampler,
)
from posttrain.core.rollout.episodes import groups_from_json, groups_to_json
from posttrain.core.runtime.seeding import derive_seed


class ReplayConfig(PluginConfig):
    """Settings of `replay`."""

    share: float = Field(
        default=0.25, gt=0, lt=1, description="of a batch, groups taken from the buffer, at most"
    )
    capacity: int = Field(
        default=256, ge=1, le=1_000_000, description="groups kept; those of least priority leave"
    )
    max_lag: int = Field(
        default=4,
        ge=1,
        le=1_000,
        description="policy versions that a group may be older than the engine's; older ones leave",
    )
    max_uses: int = Field(default=1, ge=1, le=1_000, description="how often a group is taken")
    exponent: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="of the priority in the chance to be taken; 0 = all alike",
    )
    tolerance: float = Field(
        default=1e-6,
        ge=0,
        le=1,
        description="groups whose verdicts have a standard deviation up to this are not kept",
    )


@dataclass
class _Kept:
    """A group of the buffer, its priority, and how often it was taken."""

    group: SampledGroup
    priority: float
    uses: int = 0


class ReplaySampler(Sampler[ReplayConfig]):
    """P groups, of which up to `share` * P were sampled before, with chance ~ priority^exponent.

    The priority of a group is the standard deviation of its raw verdicts: 0 where its advantages
    are, largest where half of its responses are right. Groups older than `max_lag` policy versions
    leave the buffer. What is taken keeps its log-probs and versions, so that the rollout correction
    weighs it by its own age; a stage without a correction is refused. Prompts of the step whose
    place a replayed group takes are not sampled.
    Source: prioritised replay, Schaul et al., arXiv:1511.05952; groups stand for transitions.
    """

    name = "replay"
    needs_verdicts = True
    Config = ReplayConfig
    needs_correction = True

    def __init__(self, config: ReplayConfig) -> None:
        super().__init__(config)
        self._kept: list[_Kept] = []

    def max_lag(self) -> int:
        """How much older than the engine's policy its groups may be."""
        return self.config.max_lag

    def smallest_group(self) -> int:
        """The verdicts of a single response do not differ."""
        return 2

    def sample(self, request: RolloutRequest) -> SampledRollout:
        """Fresh groups first, then those taken from the buffer."""
        size, version = len(request.prompts), request.policy_version
        fits = [k for k in self._kept if version - k.group.policy_version <= self.config.max_lag]
        expired, self._kept = len(self._kept) - len(fits), fits
        taken = self._take(request)
        groups = request.generate(request.prompts[: size - len(taken)], request.params)
        admitted = self._admit(groups, request)
        metrics = {
            "replay/taken_frac": len(taken) / size,
            "replay/buffer": float(len(self._kept)),
            "replay/admitted": float(admitted),
            "replay/expired": float(expired),
            "sampling/tokens_drawn": float(sum(group.sampled_tokens for group in groups)),
        }
        if taken:
            lags = [version - kept.group.policy_version for kept in taken]
            metrics["replay/lag_mean"] = statistics.fmean(lags)
            metrics["replay/priority_mean"] = statistics.fmean(kept.priority for kept in taken)
        return SampledRollout([*groups, *(kept.group for kept in taken)], metrics)

    def _take(self, request: RolloutRequest) -> list[_Kept]:
        """Groups for a batch, drawn without replacement from the buffer.

        They are those of the largest u^(1 / weight), u uniform (Efraimidis and Spirakis).
        """

        def rank(index: int) -> float:
            chance = (derive_seed(request.params.seed, "replay", index) + 1) / 2**63
            return math.log(chance) / math.pow(self._kept[index].priority, self.config.exponent)

        count = math.floor(self.config.share * len(request.prompts))
        order = sorted(range(len(self._kept)), key=rank, reverse=True)
        taken = [self._kept[index] for index in order[:count]]
        for kept in taken:
            kept.uses += 1
        self._kept = [kept for kept in self._kept if kept.uses < self.config.max_uses]
        return taken

    def _admit(self, groups: Sequence[SampledGroup], request: RolloutRequest) -> int:
        """Keep the fresh groups that differ, within the capacity; how many came."""
        new = []
        for group in groups:
            verdicts = group.of_episodes(request.verify(group))
            priority = statistics.pstdev(verdicts) if verdicts else 0.0
            if priority > self.config.tolerance:
                new.append(_Kept(group, priority))
        self._kept += new
        # Of equal priority the newest stay.
        worst = sorted(range(len(self._kept)), key=lambda i: (self._kept[i].priority, i))
        gone = set(worst[: max(0, len(self._kept) - self.config.capacity)])
        self._kept = [kept for i, kept in enumerate(self._kept) if i not in gone]
        return len(new)

    def state(self) -> dict[str, Any]:  # Any: JSON
        """The buffer with its groups."""
        return {
            "groups": groups_to_json([kept.group for kept in self._kept]),
            "priorities": [kept.priority for kept in self._kept],
            "uses": [kept.uses for kept in self._kept],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        groups = groups_from_json(state["groups"])
        columns = zip(groups, state["priorities"], state["uses"], strict=True)
        self._kept = [_Kept(*each) for each in columns]
