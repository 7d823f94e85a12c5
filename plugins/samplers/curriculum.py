"""Curriculum: prompts whose pass rate says that they are neither too easy nor too hard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, model_validator

from posttrain.core.contracts import (
    PluginConfig,
    PromptGroup,
    RolloutRequest,
    SampledRollout,
    Sampler,
)
from posttrain.core.math.splits import stable_hash

Band = Literal["unseen", "below", "inside", "above"]


class CurriculumConfig(PluginConfig):
    """Settings of `curriculum`."""

    low: float = Field(default=0.2, ge=0, le=1, description="lower end of the target band")
    high: float = Field(default=0.8, ge=0, le=1, description="upper end of the target band")
    explore: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="share of a batch for prompts that were never sampled, then for those that "
        "were not sampled for longest",
    )
    candidates: float = Field(
        default=4.0,
        ge=1,
        le=1_000,
        description="prompts to choose among, in multiples of the batch; the others come again "
        "when the task's problems do",
    )
    decay: float = Field(
        default=0.5, ge=0, lt=1, description="weight of the pass rate so far in the running one"
    )

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> CurriculumConfig:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self


@dataclass
class _Known:
    """What is known of one problem: its running pass rate, and the step that sampled it last."""

    rate: float
    step: int


class CurriculumSampler(Sampler[CurriculumConfig]):
    """A batch of prompts with low <= p <= high, and a share `explore` of prompts to measure.

    p <- decay * p + (1 - decay) * (mean verdict of the group) for each problem, beginning with the
    first group's mean. Where the candidates have too few prompts inside the band the batch is
    filled with new ones, then with those nearest to the band. Pass rates are of the raw verdict;
    failed episodes do not count. It needs problems that come again: a task that makes a new problem
    for every prompt has none whose pass rate is known.
    Source: own; target bands as in curricula by pass rate (Kimi k1.5, arXiv:2501.12599, 2.4.3).
    """

    name = "curriculum"
    needs_verdicts = True
    Config = CurriculumConfig

    def __init__(self, config: CurriculumConfig) -> None:
        super().__init__(config)
        self._known: dict[str, _Known] = {}
        self._step = 0

    def sample(self, request: RolloutRequest) -> SampledRollout:
        """As many groups as there are prompts in `request`, of different problems if there are."""
        size = len(request.prompts)
        wanted = math.ceil(self.config.candidates * size)
        candidates = [*request.prompts, *request.more_prompts(wanted - size)]
        chosen = self._choose(candidates, size)
        bands = [self._band(prompt) for prompt in chosen]
        groups = request.generate(chosen, request.params)
        self._step += 1
        measured: dict[Band, list[float]] = {}
        for group, band in zip(groups, bands, strict=True):
            verdicts = group.of_episodes(request.verify(group))
            if verdicts:
                rate = fmean(verdicts)
                measured.setdefault(band, []).append(rate)
                self._learn(_key(group.prompt), rate)
        return SampledRollout(groups, self._metrics(bands, measured))

    def _learn(self, key: str, rate: float) -> None:
        known, decay = self._known.get(key), self.config.decay
        mixed = rate if known is None else decay * known.rate + (1 - decay) * rate
        self._known[key] = _Known(mixed, self._step)

    def _choose(self, candidates: Sequence[PromptGroup], size: int) -> list[PromptGroup]:
        """`size` of the candidates: those to measure, then by how well they fit; in their order."""
        first: dict[str, int] = {}
        for index, prompt in enumerate(candidates):
            first.setdefault(_key(prompt), index)
        different = sorted(first.values())
        # Problems that are measured: new ones, then those of the oldest pass rates.
        oldest = sorted(different, key=lambda i: self._measured(candidates[i]))
        picked = oldest[: min(size, math.ceil(self.config.explore * size))]
        rest = [i for i in different if i not in set(picked)]
        rest.sort(key=lambda i: self._distance(candidates[i]))
        picked += rest[: size - len(picked)]
        again = [i for i in range(len(candidates)) if i not in set(picked)]
        picked += again[: size - len(picked)]  # fewer problems than a batch has prompts
        return [candidates[i] for i in sorted(picked)]

    def _measured(self, prompt: PromptGroup) -> int:
        """The step in which a prompt was sampled last; 0 = never."""
        known = self._known.get(_key(prompt))
        return 0 if known is None else known.step

    def _distance(self, prompt: PromptGroup) -> float:
        """How far a prompt's pass rate is outside the band; one without is nearer than any."""
        known = self._known.get(_key(prompt))
        if known is None:
            return 1e-9
        return max(self.config.low - known.rate, known.rate - self.config.high, 0.0)

    def _band(self, prompt: PromptGroup) -> Band:
        known = self._known.get(_key(prompt))
        return "unseen" if known is None else self._band_of(known.rate)

    def _band_of(self, rate: float) -> Band:
        if rate < self.config.low:
            return "below"
        return "above" if rate > self.config.high else "inside"

    def _metrics(
        self, bands: Sequence[Band], measured: Mapping[Band, Sequence[float]]
    ) -> dict[str, float]:
        """What was sampled, by the bands of before, and how all known problems are spread."""
        known = [self._band_of(each.rate) for each in self._known.values()]
        metrics = {
            "curriculum/known": float(len(known)),
            "curriculum/unseen_frac": bands.count("unseen") / len(bands),
            "curriculum/inside_frac": bands.count("inside") / len(bands),
        }
        for band in ("below", "inside", "above"):
            if known:
                metrics[f"curriculum/known_frac/{band}"] = known.count(band) / len(known)
        for band, rates in measured.items():
            metrics[f"curriculum/pass_rate/{band}"] = fmean(rates)
        return metrics

    def state(self) -> dict[str, Any]:  # Any: JSON
        """Pass rates, by a digest of the problem's key."""
        known = {key: [each.rate, each.step] for key, each in self._known.items()}
        return {"step": self._step, "known": known}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._step = int(state["step"])
        self._known = {
            key: _Known(float(rate), int(step)) for key, (rate, step) in state["known"].items()
        }


def _key(prompt: PromptGroup) -> str:
    """64 bits of the problem's key, which may be a long text."""
    return f"{stable_hash(prompt.problem.key) >> 192:016x}"
