"""Where prompts, samples and scores come from: tasks, rewards, engines, samplers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from posttrain.core.contracts.base import ConfigT, Plugin
from posttrain.core.errors import RunError
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
    """Scores finished responses. One `Score` per sample, in order; None is "unscored", never 0.

    A reward runs in worker processes, sample by sample, with a time limit each, unless it says
    `runs_in = "host"`: for rewards that can neither hang nor crash, or that hold a model.
    """

    kind = "reward"
    runs_in: ClassVar[Literal["worker", "host"]] = "worker"
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
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each token but the first, given those before it."""

    @abstractmethod
    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Replace all weights by (name, tensor) pairs named as in the model's state dict."""

    def sync_adapter(self, folder: Path, policy_version: int) -> None:
        """Answer with the LoRA adapter in `folder` (as peft saves it) on top of the base weights.

        It takes the place of the adapter before it, and `sync_weights` drops it. The base weights
        stay as they are. `folder` may be changed or deleted after the call. Raises `RunError`, and
        keeps what it has, when it cannot take the adapter.
        """
        raise RunError(
            f"engine '{self.name}' takes no adapters: sync merged weights, or use the engine "
            "transformers, vllm or vllm_server"
        )

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


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """Groups for one rollout batch, and what there is to say of how they were found."""

    groups: Sequence[SampledGroup]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What a sampler is given to fill one rollout batch.

    `generate` draws `params.num_generations` responses to each prompt, whole episodes where the
    stage has an environment; `more_prompts(n)` takes n further prompts from the task; `verify`
    gives the verifier's raw verdict in [0, 1] on each response of a group, before any shaping;
    `check` raises when the run was told to stop. `policy_version` is that of the engine's weights.
    """

    engine: RolloutEngine[Any]
    prompts: Sequence[PromptGroup]
    params: SamplingParams
    policy_version: int
    generate: Callable[[Sequence[PromptGroup], SamplingParams], list[SampledGroup]]
    more_prompts: Callable[[int], Sequence[PromptGroup]]
    verify: Callable[[SampledGroup], Sequence[float]]
    check: Callable[[], None]


class Sampler(Plugin[ConfigT]):
    """Decides which prompts are sampled how often to fill one rollout batch."""

    kind = "sampler"
    adds_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns of the batch that it fills beside the responses (`node_id` of a tree)."""

    @abstractmethod
    def sample(self, request: RolloutRequest) -> SampledRollout:
        """Groups for one rollout batch."""

    def state(self) -> dict[str, Any]:  # Any: JSON
        """What a resumed run needs of it, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Stand where `state` was taken."""
