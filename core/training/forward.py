"""Log-probs of responses under a policy: each prompt computed once, logits for responses only.

Axes: B rows, L padded prompt width, T padded response width, P distinct prompts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.errors import ConfigError
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.decoding import why_no_shared_keys, widest_window
from posttrain.core.models.layers import is_compiled
from posttrain.core.models.paths import OutputHead, output_head, paths_of
from posttrain.core.models.prefixes import distinct_states
from posttrain.core.models.sampled_outputs import FoundOutputs, SampledOutputs, outputs_reused
from posttrain.core.models.sharded import casting, compute_dtype, put_away, run_backbone
from posttrain.core.models.stream_attention import STREAM, prepared
from posttrain.core.training.agreement import Passes, settle
from posttrain.core.training.logprobs import KnownLogits, cut_logprobs
from posttrain.core.training.ranks import ALONE, Ranks, in_place
from posttrain.core.training.splitting import micro_rows
from posttrain.core.training.stream import TokenStream, distinct_prompts, stream_of

UNCUT = Cut()


class States(NamedTuple):
    """Hidden states [B, n (+ 1), H] of responses, ids and mask [B, n], as `response_states` gives.

    Where `places` [B, n (+ 1)] are equal so are the states; None where that is not known.
    """

    hidden: Tensor
    ids: Tensor
    mask: Tensor
    places: Tensor | None = None


DISTILLED = ("divergence", "slope", "gap")
_COLUMNS = ("logprobs", "entropy", "log_kept", *DISTILLED)


@dataclass(frozen=True, slots=True)
class ResponseForward:
    """`logprobs` [B, T] and `entropy` [B, T] in nats, 0 where `response_mask` is 0.

    `log_kept` [B, T] is the log of the probability that top-k and top-p keep, where they cut.
    `reused`: linear layers returned what sampling had computed. `observed` [B, T] are the log-probs
    of the tokens in `obs_mask` at temperature 1, where they were asked for. `divergence` [B, T] are
    the values of a distillation loss, `slope` [B, T] the norms of their d loss / d logits, `gap`
    [B, T] the teacher's log-prob minus the policy's.
    """

    logprobs: Tensor
    entropy: Tensor
    log_kept: Tensor | None = None
    reused: bool = False
    observed: Tensor | None = None
    divergence: Tensor | None = None
    slope: Tensor | None = None
    gap: Tensor | None = None

    @classmethod
    def full(cls, like: Tensor, value: float, *more: str) -> ResponseForward:
        """Log-probs, entropy and the columns `more`, all of them `value`, shaped as `like`."""
        made = cls(torch.full_like(like, value), torch.full_like(like, value))
        return made.having({name: torch.full_like(like, value) for name in more})

    def having(self, columns: Mapping[str, Tensor]) -> ResponseForward:
        """The same with these `columns` in place of its own."""
        return replace(self, **columns)  # type: ignore[arg-type]  # no flag in it

    def map(self, change: Callable[[Tensor], Tensor]) -> ResponseForward:
        """The columns of an update, with `change` made to each that is here."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        changed = {name: change(c) for name, c in columns.items() if c is not None}
        return ResponseForward(self.logprobs, self.entropy).having(changed)

    def rows(self, index: Tensor) -> ResponseForward:
        """The rows `index` [n], in that order."""
        return self.map(lambda values: values[index])

    def put(self, index: Tensor, found: ResponseForward) -> None:
        """Write `found` [n, T], detached, over the rows `index` [n] of the columns in both."""
        for name in _COLUMNS:
            into, values = getattr(self, name), getattr(found, name)
            if into is not None and values is not None:
                into[index] = values.detach().to(into)


def response_logprobs(
    model: PreTrainedModel, batch: RolloutBatch, *, temperature: float, cut: Cut = UNCUT
) -> ResponseForward:
    """Log-probs and entropy of each response token of `batch` at the sampling temperature."""
    return response_pass(model, batch, temperature=temperature, cut=cut)[1]


def response_pass(
    model: PreTrainedModel,
    batch: RolloutBatch,
    *,
    temperature: float,
    cut: Cut = UNCUT,
    outputs: SampledOutputs | None = None,
    last: bool = False,
    observed: bool = False,
) -> tuple[States, ResponseForward]:
    """What `response_states` gives, and what follows from it.

    Linear outputs that sampling recorded in `outputs` are reused, with `last` for the last time.
    With `observed` the same pass evaluates the tokens in `obs_mask`, and reuses nothing.
    """
    if observed:
        return _observing_pass(model, batch, temperature, cut)
    check_passes(model)  # not inside of what reuses outputs
    found: FoundOutputs | None = None
    reusing: AbstractContextManager[None] = nullcontext()
    if outputs is not None:
        found = outputs.find(batch, distinct_prompts(batch)[0], last=last)
    if found is not None:
        kept = stream_of(batch, include_last=False).kept
        reusing = outputs_reused(model, found.layers, found.places[kept])
    with reusing:
        states = response_states(model, batch, include_last=False)
    return states, project_states(
        model,
        states,
        batch.response_ids.shape,
        temperature=temperature,
        cut=cut,
        found=found,
    )


def _observing_pass(
    model: PreTrainedModel, batch: RolloutBatch, temperature: float, cut: Cut
) -> tuple[States, ResponseForward]:
    """`response_pass` with the log-probs of observed tokens."""
    sampled, others = batch.response_mask, batch.column("obs_mask")
    both = replace(batch, response_mask=((sampled + others) > 0).to(sampled.dtype))
    states = response_states(model, both, include_last=False)
    length, device, shape = states.mask.shape[1], states.mask.device, batch.response_ids.shape
    own, rest = (states._replace(mask=m[:, :length].bool().to(device)) for m in (sampled, others))
    found = project_states(model, own, shape, temperature=temperature, cut=cut)
    predicted = project_states(model, rest, shape, temperature=1.0)
    return own, replace(found, observed=predicted.logprobs)


@torch.no_grad()
def forward_only(
    model: PreTrainedModel,
    batch: RolloutBatch,
    micro_batch_size: int,
    temperature: float,
    check: Callable[[], None] = lambda: None,
    cut: Cut = UNCUT,
    max_tokens: int | None = None,
    ranks: Ranks = ALONE,
    outputs: SampledOutputs | None = None,
) -> ResponseForward:
    """Log-probs and entropy [B, T] of `model` without gradient, on the CPU, in micro-batches.

    Linear outputs recorded in `outputs` are reused.
    """
    order, rows, parts = micro_rows(batch, micro_batch_size, max_tokens, ranks.size), [], []
    for index, counts in ranks.share(order):
        check()
        micro = batch.select(index)
        _, out = response_pass(model, micro, temperature=temperature, cut=cut, outputs=outputs)
        if counts:
            rows.append(index)
            parts.append(out)
    put_away(model)

    def of_all(columns: list[Tensor]) -> Tensor:
        return ranks.add(in_place(rows, columns, batch.response_ids.shape))

    return ResponseForward(
        of_all([part.logprobs for part in parts]),
        of_all([part.entropy for part in parts]),
        of_all([part.log_kept for part in parts if part.log_kept is not None]) if cut else None,
    )


def response_states(model: PreTrainedModel, batch: RolloutBatch, *, include_last: bool) -> States:
    """Hidden states after the prompt and after each response token, with ids and mask [B, n].

    Column t of the states [B, n (+ 1 with `include_last`), H] is the state that predicts token t; n
    is the longest response. A prompt of a group is computed once, and gradients flow into it from
    all of its rows. A model that cannot take a stream computes responses padded, on copies of its
    prompts' keys and values; one that knows earlier tokens by other means computes whole sequences.
    A loaded model has the short cuts checked before its first pass. Where only a model itself can
    make its logits, the states are these logits [B, n (+ 1), V].
    """
    check_passes(model)
    found = _states(model, batch, include_last=include_last)
    head = paths_of(model).head
    hidden = found.hidden.to(compute_dtype(model))
    return found._replace(
        hidden=hidden if head is None or head.inputs == 1.0 else hidden * head.inputs
    )


def check_passes(model: PreTrainedModel) -> None:
    """Compare the passes below with the model's own, once; see `agreement.settle`."""

    def states(batch: RolloutBatch) -> Tensor:
        hidden, _, mask, _ = response_states(model, batch, include_last=True)
        return hidden[:, 1:][mask]

    def logprobs(batch: RolloutBatch) -> Tensor:
        found = response_logprobs(model, batch, temperature=1.0).logprobs
        return found[batch.response_mask.bool().to(found.device)]

    settle(Passes(model, states, logprobs))


def _states(model: PreTrainedModel, batch: RolloutBatch, *, include_last: bool) -> States:
    """`response_states` by the way that suits `model`."""
    paths = paths_of(model)
    if paths.head is None or "padding" in paths.refused:
        return _whole_states(model, batch, include_last=include_last)
    if model.config._attn_implementation == STREAM:
        stream, window = stream_of(batch, include_last=include_last), widest_window(model)
        if window is None or stream.layout.longest <= window:
            return _stream_states(model, stream)
    if why_no_shared_keys(model) is None:
        return _cached_states(model, batch, include_last=include_last)
    return _whole_states(model, batch, include_last=include_last)


def _stream_states(model: PreTrainedModel, stream: TokenStream) -> States:
    """`response_states` from one forward pass over a stream in which nothing is padded."""
    device = model.device
    out = run_backbone(
        model,
        input_ids=stream.token_ids.to(device)[None],
        position_ids=stream.positions.to(device)[None],
        # Models hand a mask of four axes on as it is; the layout says who attends to whom.
        attention_mask=torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=device),
        use_cache=False,
        stream_layout=prepared(stream.layout.to(device)),
    )
    picks = stream.picks.to(device)
    hidden = out.last_hidden_state[0].index_select(0, picks.flatten()).view(*picks.shape, -1)
    return States(hidden, stream.ids.to(device), stream.mask.to(device), picks)


def _cached_states(model: PreTrainedModel, batch: RolloutBatch, *, include_last: bool) -> States:
    """`response_states` from the prompts' keys and values, expanded to the rows of each group."""
    device = model.device
    first_rows, row_to_prompt = distinct_prompts(batch)
    prompt_ids = batch.prompt_ids[first_rows].to(device)
    prompt_mask = batch.prompt_mask[first_rows].to(device)
    width = int(prompt_mask.sum(dim=1).max())  # left padding common to all prompts is cut off
    prompt_ids, prompt_mask = prompt_ids[:, -width:], prompt_mask[:, -width:]
    row_to_prompt = row_to_prompt.to(device)
    cache = DynamicCache(config=model.config)
    prompt_out = run_backbone(
        model,
        input_ids=prompt_ids,
        attention_mask=prompt_mask,
        position_ids=(prompt_mask.cumsum(dim=1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    )
    last_hidden = prompt_out.last_hidden_state[:, -1]  # left padding: the last column is real
    hidden = last_hidden[row_to_prompt].unsqueeze(1)

    mask = batch.response_mask.to(device).bool()
    length = int(mask.any(dim=0).nonzero().max()) + 1 if mask.any() else 0
    if isinstance(model, FSDPModule):
        # Every rank takes both passes, or one waits for weights that the others do not ask for:
        # where the responses here need none, the second is over a column that does not count.
        length = max(length, 1 if include_last else 2)
    ids, mask = (_columns(part.to(device), length) for part in (batch.response_ids, mask))
    num_inputs = length if include_last else length - 1
    if num_inputs > 0:
        cache.batch_select_indices(row_to_prompt)
        # Tokens between sampled ones (tool output) are attended to: all up to the last sampled one.
        real = mask.long().flip(1).cummax(dim=1).values.flip(1)
        starts = prompt_mask.sum(dim=1)[row_to_prompt]
        out = run_backbone(
            model,
            input_ids=ids[:, :num_inputs],
            attention_mask=torch.cat([prompt_mask[row_to_prompt], real[:, :num_inputs]], dim=1),
            position_ids=starts[:, None] + torch.arange(num_inputs, device=device)[None, :],
            past_key_values=cache,
            use_cache=True,
        )
        hidden = torch.cat([hidden, out.last_hidden_state], dim=1)
    return States(hidden, ids, mask)


def _columns(values: Tensor, count: int) -> Tensor:
    """The first `count` columns of `values` [B, T], with zeros where there are fewer."""
    return functional.pad(values[:, :count], (0, max(0, count - values.shape[1])))


def _whole_states(model: PreTrainedModel, batch: RolloutBatch, *, include_last: bool) -> States:
    """`response_states` from each row by itself.

    Tokens stand at the front of a row: what comes after them is nothing to a causal model.
    """
    device = model.device
    prompts = batch.prompt_mask.sum(dim=1)
    mask = batch.response_mask.bool()
    columns = torch.arange(1, mask.shape[1] + 1)
    lengths = (columns * mask).amax(dim=1) if mask.shape[1] else mask.sum(dim=1)
    length = int(lengths.max())
    ends = prompts + (lengths if include_last else (lengths - 1).clamp(min=0))
    places = torch.arange(int(ends.max())).expand(len(batch), -1)
    # Prompts are padded on the left, responses on the right.
    padded = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    source = places + (batch.prompt_ids.shape[1] - prompts)[:, None]
    ids = padded.gather(1, source.clamp(max=padded.shape[1] - 1)).to(device)
    picks = (prompts - 1)[:, None] + torch.arange(length + include_last)[None, :]
    picks = torch.minimum(picks, (ends - 1)[:, None]).to(device)
    if "padding" in paths_of(model).refused:
        hidden = _states_by_length(model, ids, ends, picks)
    else:
        present = (places < ends[:, None]).long().to(device)
        hidden = _picked(_last_states(model, input_ids=ids, attention_mask=present), picks)
    return States(hidden, batch.response_ids[:, :length].to(device), mask[:, :length].to(device))


def _states_by_length(model: PreTrainedModel, ids: Tensor, ends: Tensor, picks: Tensor) -> Tensor:
    """The states [B, n, H] at `picks` [B, n] of rows `ids` [B, S] that end at `ends` [B].

    Rows of one length are computed together, without padding or a mask.
    """
    if isinstance(model, FSDPModule):
        raise ConfigError(
            f"model type '{model.config.model_type}' computes padded rows wrongly, and rows of one "
            "length at a time cannot be spread over ranks: set ranks to 1"
        )
    order, parts = [], []
    for length in sorted(set(ends.tolist())):
        rows = (ends == length).nonzero().squeeze(1)
        order.append(rows)
        states = _last_states(model, input_ids=ids[rows.to(ids.device), :length])
        parts.append(_picked(states, picks[rows.to(ids.device)]))
    return torch.cat(parts)[torch.cat(order).argsort().to(ids.device)]


def _last_states(model: PreTrainedModel, **inputs: Tensor) -> Tensor:
    """The last states of the layers; the logits where only the model itself can make them."""
    if paths_of(model).head is not None:
        states: Tensor = run_backbone(model, **inputs, use_cache=False).last_hidden_state
        return states
    with casting(model):
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def _picked(states: Tensor, picks: Tensor) -> Tensor:
    return states.gather(1, picks[:, :, None].expand(-1, -1, states.shape[2]))


def project_states(
    model: PreTrainedModel,
    states: States,
    shape: torch.Size,
    *,
    temperature: float,
    cut: Cut = UNCUT,
    found: FoundOutputs | None = None,
) -> ResponseForward:
    """Log-probs and entropy of `shape` [B, T] from what `response_states` gave.

    Equal states are projected once; logits that were `found` are reused.
    """
    mask = states.mask
    rows, columns = mask.nonzero(as_tuple=True)
    first = like = torch.arange(len(rows), device=rows.device)
    logits = None
    if states.places is not None:
        first, like = distinct_states(states.places[rows, columns])
    if found is not None:
        first, like, logits = logits_in_order(found, first, like)
    values, entropies, kept = cut_logprobs(
        states.hidden[rows[first], columns[first]],
        policy_head(model),
        states.ids[rows, columns],
        cut,
        rows=like,
        temperature=temperature,
        known=logits,
        compiled=is_compiled(model),
    )
    return ResponseForward(
        to_rows(values, mask, shape),
        to_rows(entropies, mask, shape),
        to_rows(kept, mask, shape) if cut else None,
        reused=found is not None,
    )


def logits_in_order(
    found: FoundOutputs, first: Tensor, like: Tensor
) -> tuple[Tensor, Tensor, KnownLogits | None]:
    """Recorded logits of states, and what `distinct_states` gave in the order of these."""
    if found.logits is None:
        return first, like, None
    places, order = found.logit_places.to(first.device)[first].sort()
    own = torch.empty_like(order)
    own[order] = torch.arange(len(order), device=order.device)
    spent = found.last and bool((places.diff() > 0).all())
    return first[order], own[like], KnownLogits(found.logits.to(places.device), places, spent)


def policy_head(model: PreTrainedModel) -> OutputHead:
    """What makes logits of hidden states, in the precision of products."""
    return output_head(model, compute_dtype(model))


def to_rows(values: Tensor, mask: Tensor, shape: torch.Size) -> Tensor:
    """`values` [N] at the N true places of `mask` [B, n], in order, in a tensor of `shape` [B, T].

    All else is 0; n is at most T.
    """
    rows, columns = (index.to(values.device) for index in mask.nonzero(as_tuple=True))
    return values.new_zeros(shape).index_put((rows, columns), values)


def after_last(hidden: Tensor, mask: Tensor) -> Tensor:
    """The state [B, H] after each row's last sampled token; after the prompt if it has none.

    `hidden` [B, n + 1, H] and `mask` [B, n] are of `response_states` with `include_last`.
    """
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (columns * mask).amax(dim=1) if mask.shape[1] else mask.sum(dim=1)
    return hidden[torch.arange(len(last), device=hidden.device), last]
