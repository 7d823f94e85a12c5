"""Progress: of several tasks, those whose pass rate changes most come most often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pydantic import Field, model_validator

from posttrain.core.contracts import (
    PluginConfig,
    PromptGroup,
    RolloutRequest,
    SampledRollout,
    Sampler,
)
from posttrain.core.types import TASK, of_tasks


class ProgressConfig(PluginConfig):
    """Settings of `progress`."""

    explore: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="part of each task's share that it keeps, whatever its progress",
    )
    fast: float = Field(
        default=0.5, ge=0, lt=1, description="weight of the past in the pass rate of the last steps"
    )
    slow: float = Field(
        default=0.9, gt=0, lt=1, description="weight of the past in the pass rate of more steps"
    )
    candidates: float = Field(
        default=8.0,
        ge=1,
        le=1_000,
        description="prompts to choose among, in multiples of the batch; the others come again "
        "when the task's problems do",
    )

    @model_validator(mode="after")
    def _fast_is_faster(self) -> ProgressConfig:
        if self.fast >= self.slow:
            raise ValueError(f"fast {self.fast:g} is not below slow {self.slow:g}")
        return self


@dataclass
class _Rates:
    """Two running pass rates of a task, of the last steps and of more."""

    fast: float
    slow: float

    @property
    def change(self) -> float:
        return self.fast - self.slow


class ProgressSampler(Sampler[ProgressConfig]):
    """share_k = explore * s_k + (1 - explore) * s_k |c_k| / sum_j s_j |c_j|, for tasks k.

    s_k is the share in the task `mixture`, c_k = fast - slow the change of the task's pass rate,
    from running means of the raw verdict; a task that is forgotten counts as one that is learned.
    While nothing has changed the shares are the mixture's. Failed episodes do not count.
    Source: teacher-student curriculum learning, arXiv:1707.00183, section 3 (absolute learning
    progress); the two running means are own.
    """

    name = "progress"
    needs_verdicts = True
    Config = ProgressConfig
    needs_tasks = True

    def __init__(self, config: ProgressConfig) -> None:
        super().__init__(config)
        self._rates: dict[str, _Rates] = {}
        self._credit: dict[str, float] = {}

    def sample(self, request: RolloutRequest) -> SampledRollout:
        """As many groups as there are prompts in `request`."""
        size = len(request.prompts)
        more = request.more_prompts(math.ceil(self.config.candidates * size) - size)
        candidates = [*request.prompts, *more]
        places = of_tasks([prompt.problem for prompt in candidates])
        usual = {label: len(found) / len(candidates) for label, found in places.items()}
        shares = self._shares(usual)
        chosen = self._choose(candidates, places, shares, size)
        groups = request.generate(chosen, request.params)
        measured: dict[str, list[float]] = {}
        for group in groups:
            if verdicts := group.of_episodes(request.verify(group)):
                label = group.prompt.problem.metadata.get(TASK, "")
                measured.setdefault(label, []).append(fmean(verdicts))
        for label, rates in measured.items():
            self._learn(label, fmean(rates))
        return SampledRollout(groups, self._metrics(chosen))

    def _shares(self, usual: Mapping[str, float]) -> dict[str, float]:
        """How much of a batch each task gets; they sum to 1."""
        explore = self.config.explore
        known = {label: self._rates.get(label) for label in usual}
        progress = {
            label: usual[label] * (0.0 if rates is None else abs(rates.change))
            for label, rates in known.items()
        }
        total = sum(progress.values())
        if total == 0:
            return dict(usual)
        return {
            label: explore * usual[label] + (1 - explore) * progress[label] / total
            for label in usual
        }

    def _choose(
        self,
        candidates: Sequence[PromptGroup],
        places: Mapping[str, Sequence[int]],
        shares: Mapping[str, float],
        size: int,
    ) -> list[PromptGroup]:
        """`size` of the candidates, in their order; what a task lacks the others give.

        Fractions of a prompt are owed to a task in the next step.
        """
        left = {label: list(found) for label, found in places.items()}
        picked: list[int] = []
        for label, share in shares.items():
            self._credit[label] = min(size, self._credit.get(label, 0.0) + share * size)
        while len(picked) < size and any(left.values()):
            label = max((k for k in left if left[k]), key=lambda k: self._credit[k])
            picked.append(left[label].pop(0))
            self._credit[label] -= 1
        rest = [i for i in range(len(candidates)) if i not in set(picked)]
        picked += rest[: size - len(picked)]  # there is one task alone
        return [candidates[i] for i in sorted(picked)]

    def _learn(self, label: str, rate: float) -> None:
        known, config = self._rates.get(label), self.config
        if known is None:
            self._rates[label] = _Rates(rate, rate)
            return
        known.fast = config.fast * known.fast + (1 - config.fast) * rate
        known.slow = config.slow * known.slow + (1 - config.slow) * rate

    def _metrics(self, chosen: Sequence[PromptGroup]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for label, places in of_tasks([prompt.problem for prompt in chosen]).items():
            metrics[f"progress/share/{label}"] = len(places) / len(chosen)
        for label, rates in self._rates.items():
            if label:
                metrics[f"progress/pass_rate/{label}"] = rates.fast
                metrics[f"progress/change/{label}"] = rates.change
        return metrics

    def state(self) -> dict[str, Any]:  # Any: JSON
        """Pass rates, and what tasks are owed."""
        rates = {label: [each.fast, each.slow] for label, each in self._rates.items()}
        return {"rates": rates, "credit": dict(self._credit)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        rates = state["rates"].items()
        self._rates = {label: _Rates(float(fast), float(slow)) for label, (fast, slow) in rates}
        self._credit = {label: float(owed) for label, owed in state["credit"].items()}
