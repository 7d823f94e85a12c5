"""The contract of each plugin kind: what a plugin receives, what it returns, what it may declare.

A plugin is a class with a `name`, a pydantic `Config`, a docstring (formula, shapes, source) and
the one method of its kind. Axes: B sequences, T response tokens, K reward components.

Longer than other files on purpose: who writes a plugin finds every contract on one page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.types import (
    Completion,
    Problem,
    RewardSample,
    SamplingParams,
    Score,
    Split,
    Verdict,
)


class PluginConfig(BaseModel):
    """Base of every plugin config: unknown keys are errors and values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoConfig(PluginConfig):
    """Config of a plugin without settings."""


ConfigT = TypeVar("ConfigT", bound=PluginConfig)


class Plugin(ABC, Generic[ConfigT]):
    """Base of every plugin. `kind` comes from the contract, `name` is what users write in YAML."""

    kind: ClassVar[str]
    name: ClassVar[str]
    Config: type[ConfigT]

    def __init__(self, config: ConfigT) -> None:
        self.config = config


# --- the maths of one policy update ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advantages:
    """`advantages` [B, T], exactly 0 where `mask` is 0; `returns` [B, T] only for a critic."""

    advantages: Tensor
    returns: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AdvantageEstimator(Plugin[ConfigT]):
    """Turns the rewards of a whole rollout batch into per-token advantages, without gradient."""

    kind = "advantage"
    needs: ClassVar[frozenset[str]] = frozenset({"token_rewards", "scored"})

    @abstractmethod
    def estimate(self, batch: RolloutBatch) -> Advantages:
        """Advantages of every row of `batch`; group statistics run over its scored rows."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`loss` [B, T] (unreduced, to be minimised) and `mask` [B, T], a subset of the batch's mask.

    `metrics` are [B, T] tensors; the learner averages each over the mask of the global mini-batch.
    """

    loss: Tensor
    mask: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(Plugin[ConfigT]):
    """The policy term of the loss, token by token. It never reduces: the aggregator divides."""

    kind = "policy_loss"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})

    @abstractmethod
    def token_loss(self, logprobs: Tensor, micro: RolloutBatch) -> TokenLoss:
        """Loss of `logprobs` [B, T] (float32, with gradient) on the rows of `micro`."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What aggregators divide by, counted once over the *global* mini-batch from `mask`.

    `num_tokens` is N_tok; `num_seqs` is N_seq, the rows with at least one token.
    """

    num_tokens: float
    num_seqs: float


class Aggregator(Plugin[ConfigT]):
    """[B, T] token losses to one scalar: the only place that divides, and only by global counts."""

    kind = "aggregator"

    @abstractmethod
    def weights(self, mask: Tensor, counts: Counts) -> Tensor:
        """Weight [B, T] of each token, from the rows' full `mask` [B, T] and global `counts`."""

    def aggregate(self, token_loss: TokenLoss, mask: Tensor, counts: Counts) -> Tensor:
        """Weighted sum of the token losses; micro-batches' results add up to the global value.

        `mask` [B, T] is the batch's mask: it makes the counts. `token_loss.mask` only zeroes terms.
        Where it is 0 the loss may hold anything, NaN included.
        """
        weighted = token_loss.loss * self.weights(mask, counts)
        return torch.where(token_loss.mask.bool(), weighted, torch.zeros_like(weighted)).sum()


class KlEstimator(Plugin[ConfigT]):
    """Per-token estimate of KL(policy || reference) from the log-probs of sampled tokens."""

    kind = "kl"

    @abstractmethod
    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """KL [B, T] in nats; gradient flows through `logprobs` [B, T]."""


class KlController(Plugin[ConfigT]):
    """Decides the KL coefficient; its `state` is checkpointed."""

    kind = "kl_controller"

    @abstractmethod
    def coefficient(self) -> float:
        """The coefficient in force."""

    def update(self, kl_per_token: float, kl_per_sequence: float, num_rows: int) -> None:
        """Told the measured KL (nats) after each rollout batch; a fixed controller ignores it."""

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's `state`."""


class PreferenceLoss(Plugin[ConfigT]):
    """Loss of (chosen, rejected) pairs. Scores are rewards (reward model) or log-prob ratios."""

    kind = "preference_loss"

    @abstractmethod
    def pair_loss(self, chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
        """Loss [B] of `chosen` and `rejected` scores [B] with a `margin` [B] (0 = none)."""


# --- where prompts, samples and scores come from ------------------------------------------------


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

    @abstractmethod
    def sample(
        self, engine: RolloutEngine[Any], prompts: Sequence[PromptGroup], params: SamplingParams
    ) -> list[SampledGroup]:
        """Groups for one rollout batch, in the order of `prompts`."""


class Algorithm(Plugin[ConfigT]):
    """A preset: names one plugin per axis. Every field it sets can be overridden in the YAML."""

    kind = "algorithm"

    @abstractmethod
    def expand(self) -> dict[str, object]:
        """Fields of an `rl` stage that this algorithm sets, as they would be written in YAML."""


CONTRACTS: dict[str, type[Plugin]] = {  # type: ignore[type-arg]
    contract.kind: contract
    for contract in (
        AdvantageEstimator,
        PolicyLoss,
        Aggregator,
        KlEstimator,
        KlController,
        PreferenceLoss,
        Reward,
        Sampler,
        Task,
        RolloutEngine,
        Algorithm,
    )
}
