"""What linear layers gave while responses were sampled, kept for the update of the same policy.

An update begins with a forward pass over tokens that sampling has just been through, with the same
weights: what its linear layers give is known, a third of the update's products. Here it is kept,
layer by layer and token by token, and found again by what prompts and responses say, so that
nothing is known of a row that this policy did not sample.
Axes: K tokens kept, N sequences that are sampled together, P prompts, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# The most that is kept of one step's rollouts, and of the logits that tokens were drawn from (5,461
# of 49k words in bfloat16, 2,730 in float32): an update never holds more of these at a time either.
MOST_BYTES = 2 * 10**9
MOST_LOGITS_BYTES = 512 * 2**20
HEAD = ""
Ids = tuple[int, ...]


@dataclass
class SampledProducts:
    """Outputs [K, out] of linear layers and logits [.., V], a block for each call of the engine.

    A block has room for the longest responses: rows that nobody filled are of no token.
    """

    layers: dict[str, list[Tensor]] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)
    """Empty where there were too many to keep."""
    prompts: dict[Ids, Tensor] = field(default_factory=dict)
    """Where a prompt's tokens lie among K."""
    responses: dict[tuple[Ids, Ids], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Of a prompt and a response: where its tokens but the last lie among K, and the places among
    all logits of those that each of its tokens was drawn from."""

    def forget(self) -> None:
        """Nothing is known any more: the policy has moved, or there was too much."""
        for kept in (self.layers, self.logits, self.prompts, self.responses):
            kept.clear()


def linear_layers(model: Any) -> dict[str, torch.nn.Linear]:  # Any: transformers' are not typed
    """The linear layers of `model` below its head, by name."""
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    }


def linear_outputs(model: Any) -> int:  # Any: as above
    """Numbers that they give for each token."""
    return sum(layer.out_features for layer in linear_layers(model).values())


class ProductKeeper:
    """Listens to the linear layers of an engine's `model` and fills `products`.

    Nothing is kept once it could be more than `MOST_BYTES`.
    """

    def __init__(self, model: Any) -> None:  # Any: as above
        self.products = SampledProducts()
        self._head = model.get_output_embeddings()
        self._layers = linear_layers(model)
        size = linear_outputs(model) * model.dtype.itemsize
        self._most_tokens = MOST_BYTES // size if size else 0
        self._most_logits = MOST_LOGITS_BYTES // (self._head.out_features * model.dtype.itemsize)
        self._num_tokens = self._num_logits = 0  # rows of all blocks
        self._call: _Call | None = None

    @contextmanager
    def listening(self) -> Iterator[SampledProducts]:
        """Inside, what the engine generates is kept."""
        hooks = [
            layer.register_forward_hook(partial(self._made, name))
            for name, layer in self._layers.items()
        ]
        hooks.append(self._head.register_forward_hook(self._scored))
        try:
            yield self.products
        finally:
            for hook in hooks:
                hook.remove()

    def begin(
        self, prompts: Sequence[Sequence[int]], common: int, rows: int, max_tokens: int
    ) -> bool:
        """The `common` first tokens of all `prompts` are fed next, then what follows, padded on the
        left, then `rows` sequences token by token. False when nothing of it is kept.
        """
        most_fed = rows * (max_tokens - 1)
        call = _Call(prompts, common, most_fed, self._num_tokens, self._num_logits)
        self._num_tokens += call.num_tokens
        self._num_logits += call.num_logits
        if self._num_logits > self._most_logits:
            self.products.logits.clear()
        if self._num_tokens > self._most_tokens:
            self.products.forget()
            _say_once(self._num_tokens, self._most_tokens)
            return False
        self._call = call
        return True

    def feed(self, sequences: Tensor, rows: Tensor, num_rows: int) -> None:
        """The `sequences` [n] (numbers among all of this call) are fed their next token.

        They are in these of the `num_rows` rows that go through the layers; several may be in one.
        """
        assert self._call is not None, "begin() comes first"
        self._call.fed.append((sequences.cpu(), rows.cpu(), num_rows))

    def end(self, owners: Sequence[int], responses: Sequence[Ids]) -> None:
        """All have ended: row i answered prompt `owners[i]` of the call with `responses[i]`."""
        call, products = self._call, self.products
        assert call is not None, "begin() comes first"
        self._call = None
        products.prompts |= call.prompt_places()
        products.responses |= call.response_places(owners, responses)
        logits = call.blocks.pop(HEAD, None)
        if logits is not None:
            products.logits.append(logits)
        for name in list(self._layers):
            if call.is_whole(name):
                products.layers.setdefault(name, []).append(call.blocks[name])
            else:
                products.layers.pop(name, None)
                del self._layers[name]

    def _made(self, name: str, module: Any, given: Any, output: Tensor) -> None:
        if self._call is not None and name in self._layers:
            self._call.put(name, output, self._call.num_tokens)

    def _scored(self, module: Any, given: Any, output: Tensor) -> None:
        if self._call is not None and self._num_logits <= self._most_logits:
            self._call.put(HEAD, output, self._call.num_logits)


@cache
def _say_once(tokens: int, most: int) -> None:
    """Every step of a stage is alike."""
    logger.info(
        "what linear layers give is not kept for the update: %d tokens may be sampled in a step, "
        "and %d are the most",
        tokens,
        most,
    )


class _Call:
    """One call of the engine: the blocks that it fills, and which sequences each row is of."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        common: int,
        most_fed: int,
        first_token: int,
        first_logits: int,
    ) -> None:
        self.prompts = [tuple(prompt) for prompt in prompts]
        self._common, self._width = common, max(map(len, prompts)) - common
        self._num_prompt_tokens = common + len(prompts) * self._width
        self.num_tokens = self._num_prompt_tokens + most_fed
        self.num_logits = len(prompts) + most_fed
        self._first_token, self._first_logits = first_token, first_logits
        self.blocks: dict[str, Tensor] = {}
        self._filled: Counter[str] = Counter()
        self.fed: list[tuple[Tensor, Tensor, int]] = []

    def put(self, name: str, output: Tensor, room: int) -> None:
        """The next rows of a block of `room` rows."""
        rows = output.flatten(0, -2)
        if name not in self.blocks:
            with torch.inference_mode(False):  # compiled layers save it for a backward pass
                self.blocks[name] = rows.new_empty(room, rows.shape[-1])
        start = self._filled[name]
        self._filled[name] += len(rows)
        if self._filled[name] <= room:  # else it is no layer that each token goes through once
            self.blocks[name][start : start + len(rows)] = rows

    def is_whole(self, name: str) -> bool:
        """Whether all tokens went through the layer, one by one and in order."""
        return self._filled[name] == self._num_prompt_tokens + sum(
            count for _, _, count in self.fed
        )

    def prompt_places(self) -> dict[Ids, Tensor]:
        """The places of prompts among all tokens."""
        start = torch.arange(self._first_token, self._first_token + self._common)
        own_start = self._first_token + self._common
        ends = [own_start + (n + 1) * self._width for n in range(len(self.prompts))]
        return {
            prompt: torch.cat([start, torch.arange(end - len(prompt) + self._common, end)])
            for prompt, end in zip(self.prompts, ends, strict=True)
        }

    def response_places(
        self, owners: Sequence[int], responses: Sequence[Ids]
    ) -> dict[tuple[Ids, Ids], tuple[Tensor, Tensor]]:
        """The places of responses without their last tokens, and of all of their logits."""
        found = {}
        fed = self._fed_places(len(responses))
        first_fed = self._first_token + self._num_prompt_tokens
        for own, owner, response in zip(fed, owners, responses, strict=True):
            own = own[: len(response) - 1]
            drawn = torch.cat([torch.tensor([owner]), len(self.prompts) + own])
            places = (first_fed + own, self._first_logits + drawn)
            found[self.prompts[owner], response] = places
        return found

    def _fed_places(self, rows: int) -> Tensor:
        """[N, T]: where token t of a sequence lies among all that were fed; -1 where it was not."""
        found = torch.full((rows, len(self.fed)), -1)
        start = 0
        for step, (sequences, places, count) in enumerate(self.fed):
            found[sequences, step] = start + places
            start += count
        return found
