"""Do our passes give what the model itself gives? Checked by numbers, once a loaded model.

A few random token rows of different lengths go through every pass that will be used, and are
compared with `model(input_ids).logits`, each row without padding, cache or attention kernel. A
short cut that gives other numbers is not taken, and the reason is logged; the last resort is the
model's own forward pass. Axes: N response tokens of all rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokens import response_batch
from posttrain.core.errors import ResourceError, first_line
from posttrain.core.models.decoding import why_no_shared_keys, widest_window
from posttrain.core.models.device import require_numbers
from posttrain.core.models.layers import backbone_of
from posttrain.core.models.paths import (
    EAGER,
    attend,
    eager_attention,
    find_head,
    paths_of,
    use_plain_attention,
)
from posttrain.core.models.sharded import casting, compute_dtype
from posttrain.core.models.stream_attention import STREAM, use_stream_attention

logger = logging.getLogger(__name__)

# The largest gap of log-probs (nats) that rounding explains.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
LOW_TOLERANCE = 0.5
# Prompt lengths, and which prompt each response follows with how many tokens.
PROMPTS, RESPONSES = (7, 4), ((0, 6), (0, 3), (1, 9))
# A sliding window up to this size is exceeded by a row of its own.
LEAST_WINDOW = 64


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, LOW_TOLERANCE)


@dataclass(frozen=True, slots=True)
class Passes:
    """Our passes over `model`: states [N, H] and log-probs [N] of a batch's response tokens."""

    model: PreTrainedModel
    states: Callable[[RolloutBatch], Tensor]
    logprobs: Callable[[RolloutBatch], Tensor]

    def found(self, batch: RolloutBatch) -> Tensor:
        """What is compared: log-probs, or the states of a model that classifies."""
        return (self.states if _classifies(self.model) else self.logprobs)(batch)


def settle(passes: Passes) -> None:
    """Settle how states and log-probs of a model are computed; nothing if that is settled.

    Raises `ResourceError` in a sentence where even the model's own forward pass cannot be used.
    """
    model = passes.model
    paths = paths_of(model)
    if paths.checked:
        return
    paths.checked = True  # the passes below are of this model
    kind, classifies = model.config.model_type, _classifies(model)
    with torch.no_grad():
        probes = [_probe(model, *lengths) for lengths in _lengths(widest_window(model))]
        try:
            if not classifies:
                reason = settle_head(model, probes[0].prompt_ids[:1].to(model.device))
                if reason is not None:
                    log_slower(model, "the model makes its logits itself", reason)
                    use_plain_attention(model)
            wanted = [_wanted(model, probe) for probe in probes]
        except Exception as error:
            if not raised_in(model, error):
                raise
            raise ResourceError(
                f"model type '{kind}' cannot be used here: its forward pass fails "
                f"({first_line(error)}); choose another model"
            ) from error
        for one in wanted:
            require_numbers(one, "states" if classifies else "log-probs")
        _settle_passes(passes, list(zip(probes, wanted, strict=True)))


def raised_in(model: Any, error: BaseException) -> bool:  # Any: model classes are not typed
    """Whether `error` comes from inside of a pass of `model` or from transformers, as of a cache.

    They may raise anything. What our code around them raises is our fault, and no reason for a
    slower way.
    """
    layers = {id(layer) for layer in model.modules()}
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(
        id(frame.f_locals.get("self")) in layers
        or str(frame.f_globals.get("__name__")).startswith("transformers.")
        for frame in frames
    )


def _lengths(window: int | None) -> list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Lengths of the rows: such as fit into a sliding window, and such as exceed a small one."""
    longest = max(PROMPTS[prompt] + length for prompt, length in RESPONSES)
    found: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = [(PROMPTS, RESPONSES)]
    if window is not None and 4 <= window < longest:
        found.append(((2, 1), ((0, window - 2), (0, 1), (1, window - 2))))
    elif window is not None and window <= LEAST_WINDOW:
        found.append((PROMPTS, ((0, window), (0, 3), (1, window))))
    return found


def _probe(
    model: PreTrainedModel, prompts: Sequence[int], responses: Sequence[tuple[int, int]]
) -> RolloutBatch:
    """Rows of random tokens."""
    rows = random_rows(model, [*prompts, *(length for _, length in responses)])
    own = rows[len(prompts) :]
    return response_batch(
        prompts=[rows[prompt] for prompt, _ in responses],
        responses=own,
        group_ids=[prompt for prompt, _ in responses],
        pad_token_id=0,
        problems=(),
    )


def random_rows(model: Any, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of token ids that mean nothing special (Any: model classes are not typed)."""
    size = model.get_input_embeddings().num_embeddings
    config = model.config.get_text_config()
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    draw = torch.Generator().manual_seed(0)

    def token() -> int:
        for _ in range(100):
            found = int(torch.randint(size, (1,), generator=draw))
            if found not in special:
                break
        return found

    return [tuple(token() for _ in range(length)) for length in lengths]


def settle_head(model: PreTrainedModel, ids: Tensor) -> str | None:
    """Find how logits follow from states; the reason if only the model itself can make them."""
    paths = paths_of(model)
    try:
        with eager_attention(model), casting(model):
            found = find_head(model, ids)
    except Exception as error:
        if not raised_in(model, error):
            raise
        found = f"its output layer cannot be read ({first_line(error)})"
    if isinstance(found, str):
        paths.head = None
        return found
    paths.head = found
    return None


def log_slower(model: Any, what: str, reason: str) -> None:  # Any: model classes are not typed
    """Log and keep what is computed in a slower way, and why."""
    note = f"model type '{model.config.model_type}': {what}, since {reason}"
    paths_of(model).notes.append(note)
    logger.warning("%s", note)


def _rows(batch: RolloutBatch) -> list[tuple[Tensor, int]]:
    """Each row's tokens and how many of them are its prompt's."""
    found = []
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        response = batch.response_ids[row][batch.response_mask[row].bool()]
        found.append((torch.cat([prompt, response]), len(prompt)))
    return found


def _wanted(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """What the model says of each row by itself: log-probs [N], or a classifier's states [N, H]."""
    rows = _rows(batch)
    ids = same_length([ids.tolist() for ids, _ in rows], model.device)
    with eager_attention(model), casting(model):
        if _classifies(model):
            found: Tensor = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        else:
            found = own_logprobs(model, ids)
    before = 0 if _classifies(model) else 1
    parts = [
        found[row, start - before : len(own) - before] for row, (own, start) in enumerate(rows)
    ]
    return torch.cat(parts)


def same_length(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows made equally long by tokens after their end, which a causal model does not read."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *([row[0]] * (longest - len(row)))] for row in rows], device=device)


def _classifies(model: PreTrainedModel) -> bool:
    """Whether states are read, and not logits over a vocabulary."""
    return isinstance(getattr(model, "score", None), torch.nn.Module)


def own_logprobs(model: Any, rows: Tensor) -> Tensor:  # Any: model classes are not typed
    """Log-probs [B, S - 1] of the tokens but the first of `rows` [B, S], as the model has them."""
    logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs: Tensor = logits.to(wide).log_softmax(dim=-1)
    return logprobs.gather(-1, rows[:, 1:, None]).squeeze(-1)


def _settle_passes(passes: Passes, probes: list[tuple[RolloutBatch, Tensor]]) -> None:
    """Give up short cuts until log-probs agree."""
    model = passes.model
    paths = paths_of(model)
    while (problem := _problem(passes, probes)) is not None:
        if paths.head is not None and model.config._attn_implementation == STREAM:
            use_plain_attention(model)
            log_slower(model, "prompts are not shared in one stream", problem)
        elif paths.head is not None and why_no_shared_keys(model) is None:
            paths.refused["keys"] = problem
            log_slower(model, "each response is computed with its whole prompt", problem)
        elif "padding" not in paths.refused and model.config._attn_implementation != EAGER:
            paths.plain = EAGER
            paths.refused.clear()
            attend(model, EAGER)
            log_slower(model, "the model attends without a kernel (eager)", problem)
        elif "padding" not in paths.refused:
            paths.refused["padding"] = problem
            log_slower(model, "rows of one length are computed together, without padding", problem)
        elif paths.head is not None and not _classifies(model):
            paths.head = None
            paths.refused.clear()
            log_slower(model, "the model makes its logits itself", problem)
        else:
            raise ResourceError(
                f"model type '{model.config.model_type}' cannot be used here: {problem}; choose "
                "another model"
            )
    if model.config._attn_implementation == STREAM and widest_window(model) is not None:
        # Rows wider than a sliding window leave the stream: what they use then is checked too.
        use_plain_attention(model)
        problem = _problem(passes, probes)
        if problem is None:
            use_stream_attention(model)
        else:
            log_slower(model, "prompts are not shared in one stream", problem)
            _settle_passes(passes, probes)


def _problem(passes: Passes, probes: list[tuple[RolloutBatch, Tensor]]) -> str | None:
    for batch, wanted in probes:
        try:
            found = passes.found(batch)
        except Exception as error:
            if not raised_in(passes.model, error):
                raise
            return f"the pass fails ({first_line(error)})"
        problem = gap(found, wanted, compute_dtype(passes.model))
        if problem is not None:
            return problem
    return None


def gap(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> str | None:
    """How far log-probs [N] or states [N, H] are from those of the model, if that is too far."""
    if found.shape != wanted.shape:
        return "the pass gives another number of tokens"
    scale = float(wanted.abs().max()) if wanted.dim() > 1 else 1.0
    # Tokens that a model excludes are -inf on both sides.
    differ = (found.cpu().double() - wanted.cpu().double()).masked_fill(
        found.cpu() == wanted.cpu(), 0
    )
    largest = float(differ.abs().max()) / max(scale, 1.0)
    if largest <= tolerance(dtype):
        return None
    what = "log-probs" if wanted.dim() == 1 else "states"
    return f"{what} are up to {largest:.2g} off those of the model's own forward pass"


Sampled = tuple[int, Sequence[int], Sequence[float]]
"""A sampled response: the number of its prompt, its token ids and their log-probs."""
Generate = Callable[[Sequence[Sequence[int]]], Sequence[Sampled]]
Score = Callable[[Sequence[Sequence[int]]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """Compares what an engine samples and scores with its model's own forward pass."""

    model: Any  # Any: transformers' model classes are not typed
    dtype: torch.dtype

    def settle_head(self) -> str | None:
        """Find how logits follow from states; the reason if only the model itself can make them."""
        ids = torch.tensor(random_rows(self.model, [3]), device=self.model.device)
        return settle_head(self.model, ids)

    def problem(self, generate: Generate, score: Score) -> str | None:
        """Why the engine cannot be used as it is; None if it can."""
        start, *ends = random_rows(self.model, (3, 4, 1))
        prompts = [start + end for end in ends]
        try:
            sampled = generate(prompts)
            rows = [[*prompts[prompt], *ids] for prompt, ids, _ in sampled]
            scored = score(rows[:1])[0]
        except Exception as error:
            if not raised_in(self.model, error):
                raise
            return f"the pass fails ({first_line(error)})"
        with torch.no_grad(), eager_attention(self.model):
            wanted = own_logprobs(self.model, same_length(rows, self.model.device))
        pairs = [(scored, wanted[0, : len(rows[0]) - 1])]
        for row, (_, ids, logprobs) in enumerate(sampled):
            end = len(rows[row]) - 1
            pairs.append((list(logprobs), wanted[row, end - len(ids) : end]))
        problems = (gap(torch.tensor(found), right, self.dtype) for found, right in pairs)
        return next((problem for problem in problems if problem is not None), None)
