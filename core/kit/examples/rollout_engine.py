"""A rollout engine: one plain forward pass per token, on transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from posttrain.core.contracts import EngineSetup, NoConfig, RolloutEngine
from posttrain.core.types import Completion, SamplingParams


class Example(RolloutEngine[NoConfig]):
    """p(token) = softmax(logits / temperature), cut by top-k and top-p, renormalised.

    Slow, to be read: every token is a forward pass over all that stands before it.
    Source: an example.
    """

    name = "example"
    Config = NoConfig

    def __init__(self, config: NoConfig) -> None:
        super().__init__(config)
        self._model: Any = None  # Any: transformers' models are not typed

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """It runs wherever transformers does."""
        return None

    def start(self, setup: EngineSetup) -> None:
        """Load the model."""
        self._setup, self.policy_version = setup, 0
        auto = transformers.AutoModelForCausalLM
        model: Any = auto.from_pretrained(
            setup.model_dir, dtype=setup.dtype, trust_remote_code=False
        )
        self._model = model.to(setup.device).eval()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """Responses one after another, each with a random generator of its own."""
        if params.stop_strings or params.entropy:
            raise NotImplementedError("this example has no stop strings and no entropies")
        return [
            [
                self._one(prompt, params, index, index * params.num_generations + number)
                for number in range(params.num_generations)
            ]
            for index, prompt in enumerate(prompts)
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of each token but the first."""
        found = []
        for ids in sequences:
            rows = self._logits(ids).log_softmax(-1)[:-1]
            found.append(rows.gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist())
        return found

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy the weights into the model."""
        own = self._model.state_dict()
        for name, tensor in weights:
            own[name].copy_(tensor)
        self.policy_version = policy_version

    def close(self) -> None:
        """Let the model go."""
        self._model = None

    @torch.no_grad()
    def _logits(self, ids: Sequence[int]) -> Tensor:
        inputs = torch.tensor([list(ids)], device=self._setup.device)
        logits: Tensor = self._model(inputs).logits[0].float().cpu()
        return logits

    def _one(
        self, prompt: Sequence[int], params: SamplingParams, index: int, number: int
    ) -> Completion:
        seed = (params.seed * 1_000_003 + number) % 2**63
        draw = torch.Generator().manual_seed(seed)
        limit = params.max_tokens_each[index] if params.max_tokens_each else params.max_tokens
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < limit and not (ids and ids[-1] in self._setup.stop_token_ids):
            row = _distribution(self._logits([*prompt, *ids])[-1], params)
            if params.temperature == 0:
                token = int(row.argmax())
            else:
                token = int(torch.multinomial(row.exp(), 1, generator=draw))
            ids.append(token)
            logprobs.append(float(row[token]))
        ended = bool(ids) and ids[-1] in self._setup.stop_token_ids
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            finish_reason="stop" if ended else "length",
            policy_version=self.policy_version,
            seed=seed,
            engine=self.name,
            engine_version=transformers.__version__,
        )


def _distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs [V] that a token is drawn from; greedy has those of temperature 1."""
    row = (logits / (params.temperature or 1.0)).log_softmax(-1)
    if params.temperature == 0:
        return row
    best = row.sort(descending=True)
    before = best.values.exp().cumsum(-1) - best.values.exp()
    dropped = before >= params.top_p
    if params.top_k:
        dropped[params.top_k :] = True
    row[best.indices[dropped]] = -torch.inf
    return row.log_softmax(-1)
