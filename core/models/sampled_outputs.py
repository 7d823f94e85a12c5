"""Reuse of linear outputs: an update does not compute again what sampling has just computed.

An update begins with a forward pass over tokens that the engine has sampled with the same weights
and, on a CPU, in the same process: a third of the update's matrix products. `why_no_reuse` decides
which stages may reuse them, `record_outputs` records them while the engine samples,
`SampledOutputs.find` looks them up by the token ids of prompt and response, so that a row which
this policy did not sample is not found, and `outputs_reused` lets the trained model's linear layers
return them. Attention, norms and activations are computed as usual; gradients are too.
Axes: K recorded tokens, A tokens of a micro-batch's prompts and responses, R response tokens,
S tokens of a pass, N sequences that are sampled together, V vocabulary, I and O sizes of a layer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.models.linear import WideLinear, linear_gradients
from posttrain.core.models.lora import is_adapted

logger = logging.getLogger(__name__)

# Limits for one step's rollouts. An update never holds more logits at a time than this either:
# 5,461 rows of 49k words in bfloat16, 2,730 in float32.
MAX_BYTES = 2 * 10**9
MAX_LOGITS_BYTES = 512 * 2**20
HEAD = ""
Ids = tuple[int, ...]


def why_no_reuse(
    run: RunConfig,
    stage: RlStage,
    *,
    recordable: bool,
    streams: bool,
    window: int | None,
    corrects: bool,
    owns_update: bool,
) -> str | None:
    """Why the updates of an `rl` stage compute all linear outputs themselves; None if they do not.

    `recordable` as `can_record` says; the model is computed as one token stream if `streams`, and
    its layers see `window` tokens (None: all). `corrects`: the stage has a rollout correction;
    `owns_update`: its loss takes its own steps.
    """
    checks = (
        (not stage.reuse_outputs, "reuse_outputs is false"),
        (not recordable, "only the engine 'transformers' on a CPU can be recorded"),
        (stage.max_staleness > 0, "rollouts come from an older policy than the updated one"),
        (stage.environment is not None, "responses are sampled in several turns"),
        (stage.lora is not None, "the policy has a LoRA adapter"),
        (corrects, "the rollout correction compares the engine with the trainer"),
        (owns_update, "the trust region computes its own derivatives"),
        (run.trains_elsewhere, "other processes train the model"),
        (run.model.dtype == "autocast", "the engine's weights have another precision"),
        (run.model.gradient_checkpointing, "gradient checkpointing computes the layers again"),
        (not streams, "the model is not computed as one token stream"),
        (
            window is not None and window < run.model.max_model_len,
            "the model's sliding window is narrower than max_model_len",
        ),
    )
    return next((reason for applies, reason in checks if applies), None)


# --- recording


@runtime_checkable
class RecordableEngine(Protocol):
    """An engine whose model runs in this process, and which reports to `recorder` what it feeds."""

    recorder: OutputRecorder | None

    @property
    def model(self) -> Any:  # Any: transformers' model classes are not typed
        """The model; None before the engine starts."""


def can_record(engine: object) -> bool:
    """Whether the linear outputs of `engine` can be recorded. A GPU's memory is too scarce."""
    return (
        isinstance(engine, RecordableEngine)
        and engine.model is not None
        and engine.model.device.type == "cpu"
    )


@contextmanager
def record_outputs(
    engine: object,
    policy: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
) -> Iterator[SampledOutputs | None]:
    """Inside, what `engine` generates is recorded; None if it cannot be.

    Nothing is recorded while `policy` equals its `reference`. Their KL is then exactly 0 if one
    program computes both; the engine's rounding would give it a gradient, and AdamW turns the
    smallest gradient into a full step where it is the only one.
    """
    unmoved = policy is not None and reference is not None and _same_weights(policy, reference)
    recordable = cast(RecordableEngine, engine)
    # The layers of an adapted model are not those of the trained one.
    if unmoved or not can_record(engine) or is_adapted(recordable.model):
        yield None
        return
    recorder = OutputRecorder(recordable.model)
    recordable.recorder = recorder
    try:
        with recorder.listening():
            yield recorder.outputs
    finally:
        recordable.recorder = None


def _same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def linear_layers(model: Any) -> dict[str, torch.nn.Linear]:  # Any: as above
    """The linear layers of `model` below its head, by name."""
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    }


def num_linear_outputs(model: Any) -> int:  # Any: as above
    """How many numbers they return for each token."""
    return sum(layer.out_features for layer in linear_layers(model).values())


class OutputRecorder:
    """Fills `outputs` with what the linear layers of an engine's `model` return.

    The engine calls `begin`, `feed` and `end`. Nothing is kept once it could exceed `MAX_BYTES`.
    """

    def __init__(self, model: Any) -> None:  # Any: as above
        self.outputs = SampledOutputs()
        self._head = model.get_output_embeddings()
        self._layers = linear_layers(model)
        size = num_linear_outputs(model) * model.dtype.itemsize
        self._max_tokens = MAX_BYTES // size if size else 0
        self._max_logits = MAX_LOGITS_BYTES // (self._head.out_features * model.dtype.itemsize)
        self._num_tokens = self._num_logits = 0  # rows of all blocks
        self._call: _Call | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the layers report their outputs."""
        hooks = [
            layer.register_forward_hook(partial(self._on_layer, name))
            for name, layer in self._layers.items()
        ]
        hooks.append(self._head.register_forward_hook(self._on_head))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(
        self, prompts: Sequence[Sequence[int]], common: int, rows: int, max_tokens: int
    ) -> None:
        """The engine will feed the `common` first tokens of all `prompts`, then the rest of each,
        padded on the left, then `rows` sequences token by token.
        """
        max_fed = rows * (max_tokens - 1)
        call = _Call(prompts, common, max_fed, self._num_tokens, self._num_logits)
        self._num_tokens += call.num_tokens
        self._num_logits += call.num_logits
        if self._num_logits > self._max_logits:
            self.outputs.logits.clear()
        if self._num_tokens > self._max_tokens:
            self.outputs.forget()
            _warn_once(self._num_tokens, self._max_tokens)
        else:
            self._call = call

    def feed(self, sequences: Tensor, rows: Tensor, num_rows: int) -> None:
        """The engine will feed the next token of `sequences` [n], numbered within this call.

        They are in these of the pass's `num_rows` rows; a row may hold several of them.
        """
        if self._call is not None:
            self._call.fed.append((sequences.cpu(), rows.cpu(), num_rows))

    def end(self, owners: Sequence[int], responses: Sequence[Ids]) -> None:
        """All sequences have ended: sequence i answered prompt `owners[i]` with `responses[i]`."""
        call, outputs = self._call, self.outputs
        if call is None:
            return
        self._call = None
        outputs.prompts |= call.prompt_places()
        outputs.responses |= call.response_places(owners, responses)
        logits = call.blocks.pop(HEAD, None)
        if logits is not None:
            outputs.logits.append(logits)
        for name in list(self._layers):
            if call.is_whole(name):
                outputs.layers.setdefault(name, []).append(call.blocks[name])
            else:
                outputs.layers.pop(name, None)
                del self._layers[name]

    def _on_layer(self, name: str, module: Any, args: Any, output: Tensor) -> None:
        if self._call is not None and name in self._layers:
            self._call.put(name, output, self._call.num_tokens)

    def _on_head(self, module: Any, args: Any, output: Tensor) -> None:
        if self._call is not None and self._num_logits <= self._max_logits:
            self._call.put(HEAD, output, self._call.num_logits)


@cache
def _warn_once(tokens: int, limit: int) -> None:
    """Every step of a stage is alike."""
    logger.info(
        "linear outputs are not recorded for the update: up to %d tokens are sampled in a step, "
        "and the limit is %d",
        tokens,
        limit,
    )


class _Call:
    """One batch of sequences of the engine: the blocks it fills, and whose each row is."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        common: int,
        max_fed: int,
        first_token: int,
        first_logits: int,
    ) -> None:
        self.prompts = [tuple(prompt) for prompt in prompts]
        self._common, self._width = common, max(map(len, prompts)) - common
        self._num_prompt_tokens = common + len(prompts) * self._width
        self.num_tokens = self._num_prompt_tokens + max_fed
        self.num_logits = len(prompts) + max_fed
        self._first_token, self._first_logits = first_token, first_logits
        self.blocks: dict[str, Tensor] = {}
        self._filled: Counter[str] = Counter()
        self.fed: list[tuple[Tensor, Tensor, int]] = []

    def put(self, name: str, output: Tensor, size: int) -> None:
        """Add rows to a block of `size` rows."""
        rows = output.flatten(0, -2)
        if name not in self.blocks:
            with torch.inference_mode(False):  # compiled layers save it for a backward pass
                self.blocks[name] = rows.new_empty(size, rows.shape[-1])
        start = self._filled[name]
        self._filled[name] += len(rows)
        if self._filled[name] <= size:  # else tokens go through this layer more than once
            self.blocks[name][start : start + len(rows)] = rows

    def is_whole(self, name: str) -> bool:
        """Whether every token went through the layer once, in order."""
        return self._filled[name] == self._num_prompt_tokens + sum(
            count for _, _, count in self.fed
        )

    def prompt_places(self) -> dict[Ids, Tensor]:
        """Where the tokens of each prompt are among all recorded tokens."""
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
        """Where the tokens of each response but its last are, and the logits of all of them."""
        found = {}
        fed = self._fed_places(len(responses))
        first_fed = self._first_token + self._num_prompt_tokens
        for own, owner, response in zip(fed, owners, responses, strict=True):
            own = own[: len(response) - 1]
            logits = torch.cat([torch.tensor([owner]), len(self.prompts) + own])
            places = (first_fed + own, self._first_logits + logits)
            found[self.prompts[owner], response] = places
        return found

    def _fed_places(self, rows: int) -> Tensor:
        """[N, T]: place of token t of a sequence among all fed ones; -1 where it was not fed."""
        found = torch.full((rows, len(self.fed)), -1)
        start = 0
        for step, (sequences, places, count) in enumerate(self.fed):
            found[sequences, step] = start + places
            start += count
        return found


# --- lookup


@dataclass
class SampledOutputs:
    """Linear outputs [K, O] by layer and logits [.., V], in one block for each batch of the engine.

    A block has room for the longest responses, so some of its rows may be unused.
    """

    layers: dict[str, list[Tensor]] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)
    """Empty if they exceed `MAX_LOGITS_BYTES`."""
    prompts: dict[Ids, Tensor] = field(default_factory=dict)
    """Where a prompt's tokens are among K."""
    responses: dict[tuple[Ids, Ids], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By prompt and response: where its tokens but the last are among K, and which rows of the
    logits each of its tokens was drawn from."""

    def forget(self) -> None:
        """Drop everything: the policy has moved, or the outputs take too much memory."""
        for recorded in (self.layers, self.logits, self.prompts, self.responses):
            recorded.clear()

    def find(
        self, batch: RolloutBatch, prompt_rows: Tensor, *, last: bool = False
    ) -> FoundOutputs | None:
        """The outputs of a micro-batch, with each prompt taken from one of `prompt_rows` [P].

        None if one of its rows was not recorded. Use `last` for the last micro-batch, which gets
        the only reference to the outputs: they are freed as they are used.
        """
        rows = [_row_ids(batch, row) for row in range(len(batch))]
        known = [ids for ids in rows if ids is not None and ids in self.responses]
        if not self.layers or len(known) < len(batch):
            return None
        prompts = [self.prompts[known[row][0]] for row in prompt_rows.tolist()]
        responses = [self.responses[ids] for ids in known]
        found = FoundOutputs(
            layers={name: _joined(blocks) for name, blocks in self.layers.items()},
            places=torch.cat([*prompts, *(places for places, _ in responses)]),
            logits=_joined(self.logits) if self.logits else None,
            logit_places=torch.cat([places for _, places in responses]),
            last=last,
        )
        if last:
            self.forget()
        return found


@dataclass(frozen=True, slots=True)
class FoundOutputs:
    """What `find` returns: `layers` [K, O] and `logits` (None: not recorded).

    `places` [A] are the rows of `layers` for the tokens of prompts and of responses without their
    last token, `logit_places` [R] the rows of `logits` for all response tokens, row by row. With
    `last` nobody else reads the tensors.
    """

    layers: dict[str, Tensor]
    places: Tensor
    logits: Tensor | None
    logit_places: Tensor
    last: bool


def _joined(blocks: list[Tensor]) -> Tensor:
    """All blocks as one, which replaces them."""
    if len(blocks) > 1:
        blocks[:] = [torch.cat(blocks)]
    return blocks[0]


def _row_ids(batch: RolloutBatch, row: int) -> tuple[Ids, Ids] | None:
    """Prompt and response of a row; None if the policy did not sample the whole response."""
    sampled = batch.response_mask[row].bool()
    length = int(sampled.sum())
    if not sampled[:length].all():
        return None
    prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
    return tuple(prompt.tolist()), tuple(batch.response_ids[row, :length].tolist())


# --- reuse in a forward pass


class _Reused(torch.autograd.Function):
    """Rows `places` of `outputs`, with the gradients of x @ weight.T + bias.

    They are a copy: torch.compile treats a view of an argument as having no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: Tensor, places: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return outputs.index_select(0, places).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        return *linear_gradients(ctx, x, weight, grad), None, None


class _ReusingLinear(torch.nn.Linear):
    """A linear layer during one forward pass in which it returns rows `places` of `outputs`."""

    outputs: Tensor
    places: Tensor

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Reused.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.outputs, self.places
        )
        del self.outputs  # used once, and freed layer by layer
        return output


@contextmanager
def outputs_reused(
    model: torch.nn.Module, outputs: dict[str, Tensor], places: Tensor
) -> Iterator[None]:
    """Inside, linear layers named in `outputs` return rows `places` [S] of it [K, O].

    Layers of other classes than torch's own and `WideLinear` compute as usual. `outputs` is empty
    afterwards.
    """
    layers: list[tuple[Any, type]] = []  # Any: linear layers that take new attributes
    for name in list(outputs):
        rows, layer = outputs.pop(name), cast(Any, model.get_submodule(name))
        if type(layer) in (torch.nn.Linear, WideLinear):
            layers.append((layer, type(layer)))
            layer.__class__ = _ReusingLinear
            layer.outputs, layer.places = rows, places
    try:
        yield
    finally:
        for layer, own in layers:
            layer.__class__ = own
            layer.__dict__.pop("outputs", None)
            del layer.places
