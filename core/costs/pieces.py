"""Pieces of a run's work on made-up weights and tokens, to be timed: layers, vocabulary, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from transformers import DynamicCache, PreTrainedModel
from transformers.initialization import no_init_weights

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import LoraSection
from posttrain.core.costs.rates import Groups, HeadWork, Sequences
from posttrain.core.costs.shape import SMALL_VOCABULARY, make_model, truncated
from posttrain.core.data.packing import response_batch
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.checkpointing import use_checkpointing
from posttrain.core.models.decoding import DecodingMemory, can_share
from posttrain.core.models.grouped_attention import can_group, use_grouped_attention
from posttrain.core.models.loading import attend_as
from posttrain.core.models.lora import add_adapter
from posttrain.core.models.packed_linear import pack
from posttrain.core.models.runtime import ModelRuntime
from posttrain.core.models.sampled_outputs import linear_layers, outputs_reused
from posttrain.core.models.wide_products import product, widen
from posttrain.core.training.forward import response_states
from posttrain.core.training.head_targets import KnownLogits
from posttrain.core.training.logprobs import cut_logprobs

VALUE = 0.01
"""Of all weights: far from the tiny numbers that processors are slow with."""


def few_layers(
    config: Any,  # Any: transformers' class for the architecture
    layers: int,
    runtime: ModelRuntime,
    *,
    checkpointing: bool = False,
    lora: LoraSection | None = None,
) -> PreTrainedModel:
    """A model of that many layers and a small vocabulary, ready to be trained as the run's is."""
    model = _made(config, layers, runtime)
    attend_as(model, runtime)
    widen(model)
    if checkpointing:
        use_checkpointing(model)
    if lora is not None:
        add_adapter(model, lora, seed=0)
    return model


def few_engine_layers(
    config: Any,  # Any: as above
    layers: int,
    runtime: ModelRuntime,
    *,
    packed: bool,
) -> PreTrainedModel:
    """The same as the `transformers` engine holds it."""
    model = _made(config, layers, runtime)
    model.requires_grad_(False)
    if runtime.device.type == "cpu" and can_group(model):
        use_grouped_attention(model)
    if packed:
        pack(model)
    else:
        widen(model)
    return model


def _made(config: Any, layers: int, runtime: ModelRuntime) -> PreTrainedModel:  # Any: as above
    with no_init_weights(), torch.device(runtime.device):
        model = make_model(
            truncated(config, layers),
            dtype=runtime.dtype,
            attn_implementation=runtime.plain_attention,
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(VALUE)
    model.train(False)
    return model


def unlike(number: int, length: int) -> list[int]:
    """A text of that many tokens, which no other number's begins like."""
    return [1 + number % (SMALL_VOCABULARY - 1)] * length


def made_up_batch(rows: Sequences, count: int) -> RolloutBatch:
    """`count` rows of that form, all as long; prompts of one group are equal, and nothing else is.

    But for the first `shared` tokens of prompts: tokens with the same history are one.
    """
    return ragged_batch(replace(rows, longest=None).uneven(count), rows.shared)


def ragged_batch(groups: Groups, shared: int = 0) -> RolloutBatch:
    """Rows of those lengths, no two of which begin alike but by the prompt of a group.

    But for the first `shared` tokens of prompts.
    """
    prompts = [
        [1] * shared + unlike(group, prompt - shared) for group, (prompt, _) in enumerate(groups)
    ]
    lengths = [response for _, responses in groups for response in responses]
    return response_batch(
        prompts=[
            ids for ids, (_, responses) in zip(prompts, groups, strict=True) for _ in responses
        ],
        responses=[unlike(row, length) for row, length in enumerate(lengths)],
        group_ids=[group for group, (_, responses) in enumerate(groups) for _ in responses],
        pad_token_id=0,
        problems=(),
    )


def forward_pass(model: PreTrainedModel, batch: RolloutBatch) -> None:
    """Hidden states of the responses, without gradient."""
    with torch.no_grad():
        response_states(model, batch, include_last=False)


def training_pass(model: PreTrainedModel, batch: RolloutBatch) -> None:
    """Forward and backward through the layers."""
    states, _, _, _ = response_states(model, batch, include_last=False)
    states.float().sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def products_of(model: PreTrainedModel, batch: RolloutBatch) -> dict[str, Tensor]:
    """What the linear layers give for the stream of `batch`."""
    found: dict[str, Tensor] = {}

    def note(module: Any, given: Any, output: Tensor, name: str) -> None:  # Any: torch's hooks
        found[name] = output.detach().flatten(0, -2)

    layers = linear_layers(model)
    hooks = [layer.register_forward_hook(partial(note, name=n)) for n, layer in layers.items()]
    forward_pass(model, batch)
    for hook in hooks:
        hook.remove()
    return found


def reusing(
    work: Callable[[PreTrainedModel, RolloutBatch], None],
    model: PreTrainedModel,
    batch: RolloutBatch,
    known: dict[str, Tensor],
) -> None:
    """A pass whose linear layers are told that they give what is `known`."""
    rows = len(next(iter(known.values())))
    with outputs_reused(model, dict(known), torch.arange(rows)):
        work(model, batch)


def kept_bytes(model: PreTrainedModel, batch: RolloutBatch) -> int:
    """What the forward pass keeps for the backward pass, weights left out.

    On the `meta` device nothing is computed, and the bytes are those that would be kept.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:  # tensors on `meta` have no address
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        states, _, _, _ = response_states(model, batch, include_last=False)
    del states
    return sum(kept.values())


class Decoder:
    """A `transformers` engine in the middle of a rollout: sequences as `form` has them.

    At most `most` of them, `rows` in all: whole groups, or a part of one.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, form: Sequences, most: int) -> None:
        group = min(form.group, most)
        prompts, longest = most // group, form.prompt + form.response
        shares = group > 1 and can_share(model, longest)
        # What cannot be shared is as long for being read as a prompt.
        ids = torch.ones(1, form.prompt if shares else longest, dtype=torch.int64)
        mask, cache = ids.to(model.device), DynamicCache(config=model.config)
        _read(model, mask, cache)
        cache.batch_repeat_interleave(prompts)  # reading them all would take longer than decoding
        mask = mask.repeat(prompts, 1)
        self.model, self.rows = model, prompts * group
        self.memory = DecodingMemory.of_prompts(model, cache, mask, longest, several=group > 1)
        self.memory.keep(torch.arange(prompts).repeat_interleave(group).to(model.device))
        if self.memory.prompts is not None:
            for layer, keys in enumerate(self.memory.prompts.keys):
                so_far = keys.new_ones(self.rows, keys.shape[1], form.response, keys.shape[3])
                self.memory.cache.update(so_far, so_far, layer)
            self.memory.positions += form.response
        self.ids = torch.ones(self.rows, 1, dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def step(self) -> None:
        """One more token of each sequence."""
        self.model.base_model(input_ids=self.ids, use_cache=True, **self.memory.next_token())


@torch.inference_mode()
def read_prompts(model: PreTrainedModel, batch: RolloutBatch) -> None:
    """The engine's first pass, over the prompts of all rows."""
    _read(model, batch.prompt_ids.to(model.device), DynamicCache(config=model.config))


def _read(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> None:
    model.base_model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=torch.arange(ids.shape[1], device=model.device).expand(len(ids), -1),
        past_key_values=cache,
        use_cache=True,
    )


def head_pass(
    hidden: Tensor, weight: Tensor, targets: Tensor, work: HeadWork, *, packed: bool = False
) -> Callable[[], object]:
    """The vocabulary's part, ready to be run; an engine's weight may be packed."""
    if work in ("logits", "engine"):
        columns, hidden_size = weight.shape
        layer = Linear(hidden_size, columns, bias=False, device="meta")
        layer.weight = Parameter(weight, requires_grad=False)
        if packed:
            pack(layer)
        else:
            widen(layer)
        return torch.inference_mode()(partial(layer, hidden))

    known = None
    if work == "reused":
        places = torch.arange(len(hidden), device=hidden.device)
        known = KnownLogits(product(hidden, weight.t()).detach(), places)

    def run() -> None:
        values, _, _ = cut_logprobs(hidden, weight, targets, Cut(), known=known)
        if values.requires_grad:
            values.sum().backward()  # type: ignore[no-untyped-call]
            hidden.grad = weight.grad = None

    return run
