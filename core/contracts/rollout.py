"""Where prompts, samples and scores come from: tasks, rewards, engines, samplers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from posttrain.core.contracts.base import ConfigT, Plugin
from posttrain.core.types import (
    Completion,
    Problem,
    RewardSample,
    SamplingParams,
    Score,
    Split,
    StepVerdict,
    Verdict,
)


class Task(Plugin[ConfigT]):
    """A source of problems with a verifier. The two splits are disjoint by construction."""

    kind = "task"

    @abstractmethod
    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems of `split`, with distinct keys, the same for the same `seed`.

        Raises `DataError` when the task cannot supply that many. No key of `train` is ever a key of
        `held_out`, whatever the seeds.
        """

    def available(self, split: Split) -> int | None:
        """How many problems `split` holds; None when the task generates more than anyone asks for.

        Training longer than that goes through the problems again, in another order.
        """
        return None

    def fingerprint(self) -> str:
        """Digest of outside data this task reads (files), so that changed data recompute stages."""
        return ""

    @abstractmethod
    def verify(self, problem: Problem, text: str) -> Verdict:
        """Whether `text` answers `problem`; never raises on any text."""

    def verify_steps(self, problem: Problem, text: str) -> tuple[StepVerdict, ...]:
        """The verdict on each step of `text`, in order; none from a task that knows no steps."""
        return ()


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward may need to start: the stage's input artifacts and how to load models."""

    inputs: Mapping[str, Path]
    dtype: torch.dtype
    device: torch.device
    attention: str
    batch_size: int


class Reward(Plugin[ConfigT]):
    """Scores finished responses. One `Score` per sample, in order; None is "unscored", never 0."""

    kind = "reward"
    needs_inputs: ClassVar[frozenset[str]] = frozenset()
    gives_steps: ClassVar[bool] = False
    """Whether its scores carry `steps`, which process-supervised advantages read."""

    def setup(self, context: RewardContext) -> None:  # noqa: B027 - most rewards need nothing
        """Load what scoring needs; called once before the first `score`."""

    @abstractmethod
    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Scores of `samples`, in order."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine needs to start: weights, precision, limits, the ids that end a response."""

    model_dir: Path
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    max_batch_size: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    seed: int


class RolloutEngine(Plugin[ConfigT]):
    """Samples responses: token ids in, token ids and log-probs out, weights replaced in place."""

    kind = "rollout_engine"
    policy_version: int = 0

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """None when the engine can run here, else one sentence with the mend."""

    @abstractmethod
    def start(self, setup: EngineSetup) -> None:
        """Load the model; the policy version is 0 afterwards."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """`params.num_generations` completions for each prompt, in the order of `prompts`."""

    @abstractmethod
    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Replace all weights by (name, tensor) pairs named as in the model's state dict."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; may be called twice."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """One prompt of a rollout: its problem and token ids."""

    problem: Problem
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A prompt with the completions drawn for it."""

    prompt: PromptGroup
    completions: tuple[Completion, ...]


class Sampler(Plugin[ConfigT]):
    """Decides which prompts are sampled how often to fill one rollout batch."""

    kind = "sampler"
    adds_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns of the batch that it fills beside the responses (`node_id` of a tree)."""

    @abstractmethod
    def sample(
        self, engine: RolloutEngine[Any], prompts: Sequence[PromptGroup], params: SamplingParams
    ) -> list[SampledGroup]:
        """Groups for one rollout batch, in the order of `prompts`."""
