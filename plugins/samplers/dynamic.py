"""Dynamic sampling: prompts without a gradient are replaced by others (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from pydantic import Field

from posttrain.core.contracts import (
    PluginConfig,
    PromptGroup,
    RolloutRequest,
    SampledGroup,
    SampledRollout,
    Sampler,
)
from posttrain.core.errors import RunError
from posttrain.core.rollout.episodes import (
    groups_from_json,
    groups_to_json,
    prompt_from_json,
    prompt_to_json,
)
from posttrain.core.runtime.seeding import derive_seed

Kind = Literal["kept", "all_right", "all_wrong", "equal", "failed"]


class DynamicConfig(PluginConfig):
    """Settings of `dynamic`."""

    keep: Literal["mixed", "spread"] = Field(
        default="mixed",
        description="mixed: groups with a right and a wrong response (DAPO); spread: those whose "
        "verdicts have a standard deviation above `tolerance`, for verifiers that give part marks",
    )
    tolerance: float = Field(default=1e-6, ge=0, le=1, description="of `spread`")
    max_rounds: int = Field(
        default=10,
        ge=1,
        le=1_000_000,
        description="rounds of sampling per step, at most (NeMo-RL 10, SkyRL 30)",
    )
    max_round_size: float = Field(
        default=2.0,
        ge=1,
        le=10_000,
        description="prompts of one round, at most, in multiples of the batch",
    )
    surplus: Literal["carry_over", "drop"] = Field(
        default="carry_over", description="groups kept beyond the batch: for the next step, or gone"
    )
    max_carry: int | None = Field(
        default=None, ge=0, description="groups carried over, at most; null = one batch"
    )
    max_lag: int = Field(
        default=1,
        ge=0,
        le=1_000,
        description="policy versions that a carried group may be older than the engine's; older "
        "ones are dropped",
    )
    on_exhaustion: Literal["train_partial", "pad_degenerate", "error", "replace"] = Field(
        default="train_partial",
        description="when max_rounds did not fill the batch: train on what there is; fill it with "
        "groups that were dropped; stop the run; fill it with copies of kept groups (biased)",
    )


@dataclass
class _Found:
    """One step's groups so far."""

    size: int
    kept: list[SampledGroup] = field(default_factory=list)
    dropped: list[SampledGroup] = field(default_factory=list)
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(get_args(Kind), 0))
    rounds: int = 0
    verdicts: float = 0.0
    responses: int = 0
    tokens: int = 0
    wasted: int = 0

    @property
    def missing(self) -> int:
        """Groups that the batch still lacks."""
        return max(0, self.size - len(self.kept))

    @property
    def drawn(self) -> int:
        """Prompts sampled in this step."""
        return sum(self.counts.values())

    def add(self, group: SampledGroup, kind: Kind, verdicts: Sequence[float]) -> None:
        """Count a group that was sampled, and keep or drop it."""
        self.counts[kind] += 1
        self.verdicts += math.fsum(verdicts)
        self.responses += len(verdicts)
        self.tokens += group.sampled_tokens
        (self.kept if kind == "kept" else self.dropped).append(group)
        self.wasted += 0 if kind == "kept" else group.sampled_tokens


class DynamicSampler(Sampler[DynamicConfig]):
    """Keep a group iff 0 < #correct < G by the raw verdict; sample until P groups are kept.

    A round asks for missing / acceptance prompts, acceptance being the share of this step's groups
    that were kept, and for `max_round_size` * P at most. Surplus goes to the next step while it is
    no more than `max_lag` policy versions old. Failed episodes do not count. Filtering changes the
    distribution of prompts: easy and hard ones vanish, so what is dropped is counted.
    Source: DAPO, arXiv:2503.14476, section 3.2, eq. 11.
    """

    name = "dynamic"
    needs_verdicts = True
    Config = DynamicConfig

    def __init__(self, config: DynamicConfig) -> None:
        super().__init__(config)
        self._carried: list[SampledGroup] = []
        self._waiting: list[PromptGroup] = []  # given for a batch that carried groups filled

    def max_lag(self) -> int:
        """How much older than the engine's policy its groups may be."""
        return self.config.max_lag if self.config.surplus == "carry_over" else 0

    def smallest_group(self) -> int:
        """A single response is never mixed."""
        return 2

    def sample(self, request: RolloutRequest) -> SampledRollout:
        """As many kept groups as there are prompts in `request`, fewer only on exhaustion."""
        found = _Found(size=len(request.prompts))
        stale = self._take_carried(found, request.policy_version)
        carried_in = len(found.kept)
        self._waiting += request.prompts
        while found.missing and found.rounds < self.config.max_rounds:
            request.check()
            self._round(found, request)
        exhausted = found.missing > 0
        if exhausted:
            self._exhausted(found)
        surplus = found.kept[found.size :]
        limit = found.size if self.config.max_carry is None else self.config.max_carry
        self._carried = surplus[:limit] if self.config.surplus == "carry_over" else []
        found.wasted += sum(group.sampled_tokens for group in surplus[len(self._carried) :])
        return SampledRollout(
            found.kept[: found.size],
            {
                "sampling/rounds": found.rounds,
                "sampling/prompts_drawn": found.drawn,
                "sampling/dropped_all_right": found.counts["all_right"],
                "sampling/dropped_all_wrong": found.counts["all_wrong"],
                "sampling/dropped_equal": found.counts["equal"],
                "sampling/dropped_failed": found.counts["failed"],
                "sampling/dropped_stale": stale,
                "sampling/dropped_surplus": len(surplus) - len(self._carried),
                "sampling/carried_in": carried_in,
                "sampling/carried_out": len(self._carried),
                "sampling/exhausted": float(exhausted),
                "sampling/tokens_drawn": found.tokens,
                "sampling/tokens_wasted": found.wasted,
            }
            | _shares(found),
        )

    def state(self) -> dict[str, Any]:  # Any: JSON
        """Carried groups, and prompts that wait to be sampled."""
        return {
            "carried": groups_to_json(self._carried),
            "waiting": [prompt_to_json(prompt) for prompt in self._waiting],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._carried = groups_from_json(state["carried"])
        self._waiting = [prompt_from_json(prompt) for prompt in state["waiting"]]

    def _take_carried(self, found: _Found, version: int) -> int:
        """Put carried groups that are fresh enough into the batch; how many were too old."""
        fresh = [g for g in self._carried if version - g.policy_version <= self.config.max_lag]
        old = [g for g in self._carried if version - g.policy_version > self.config.max_lag]
        found.kept += fresh
        found.wasted += sum(group.sampled_tokens for group in old)
        self._carried = []
        return len(old)

    def _round(self, found: _Found, request: RolloutRequest) -> None:
        """Sample the prompts that should fill the batch, and sort their groups."""
        count = round_size(
            found.missing,
            found.counts["kept"],
            found.drawn,
            math.floor(self.config.max_round_size * found.size),
        )
        if count > len(self._waiting):
            self._waiting += request.more_prompts(count - len(self._waiting))
        prompts, self._waiting = self._waiting[:count], self._waiting[count:]
        # Prompts of a small task come again in a later round: not with the same draws.
        seed = request.params.seed
        seed = derive_seed(seed, "round", found.rounds) if found.rounds else seed
        for group in request.generate(prompts, replace(request.params, seed=seed)):
            verdicts = group.of_episodes(request.verify(group))
            found.add(group, self._kind(verdicts), verdicts)
        found.rounds += 1

    def _kind(self, verdicts: Sequence[float]) -> Kind:
        """Kept, or why not."""
        if not verdicts:
            return "failed"
        right = sum(verdict >= 1 for verdict in verdicts)
        if self.config.keep == "spread":
            keep = statistics.pstdev(verdicts) > self.config.tolerance
        else:
            keep = 0 < right < len(verdicts)
        if keep:
            return "kept"
        if right == len(verdicts):
            return "all_right"
        # Equal part marks are neither: only `spread` looks at them.
        none_right = self.config.keep == "mixed" or not any(verdicts)
        return "all_wrong" if none_right else "equal"

    def _exhausted(self, found: _Found) -> None:
        """What the config says of a batch that could not be filled."""
        mode = self.config.on_exhaustion
        if mode == "error":
            raise RunError(
                f"dynamic sampling kept {len(found.kept)} of the {found.size} groups wanted after "
                f"{found.rounds} rounds and {found.drawn} prompts ({found.counts['all_right']} all "
                f"right, {found.counts['all_wrong']} all wrong): raise sampler.max_rounds, choose "
                "easier or harder problems, or set on_exhaustion: train_partial"
            )
        if mode == "pad_degenerate":
            filling = found.dropped[: found.missing]
            found.wasted -= sum(group.sampled_tokens for group in filling)
            found.kept += filling
        elif mode == "replace" and found.kept:
            good = list(found.kept)
            found.kept += [good[i % len(good)] for i in range(found.missing)]


def round_size(missing: int, accepted: int, drawn: int, largest: int) -> int:
    """Prompts to sample when `missing` groups lack and `accepted` of `drawn` were kept so far.

    Never fewer than `missing`, nor more than `largest` where that is more. With nothing kept yet,
    one of those drawn is taken for kept.
    """
    if drawn == 0:
        return missing
    wanted = -(-missing * drawn // max(1, accepted))
    return max(missing, min(wanted, largest))


def _shares(found: _Found) -> dict[str, float]:
    """What has no value in a step that sampled nothing, or no episode that did not fail."""
    if found.drawn == 0:
        return {}
    shares = {"sampling/acceptance": found.counts["kept"] / found.drawn}
    if found.responses:
        shares["sampling/verdict_mean"] = found.verdicts / found.responses
    return shares
