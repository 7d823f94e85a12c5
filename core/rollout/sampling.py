"""What rollout engines share: request checks, seeds, drawing tokens, stop strings.

Everything here is pure. Axes: N sequences that decode together, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from posttrain.core.errors import ConfigError, DataError, RunError
from posttrain.core.math.nucleus import Cut, nucleus
from posttrain.core.models.device import require_numbers
from posttrain.core.types import SamplingParams

# Tokens without a character of their own (a part of one, a special token) that may stand among
# those of a stop string.
SPARE_TOKENS = 16


class StopStrings:
    """Strings that end a response, looked for at its end only.

    Only the last tokens are decoded, as many as the longest string may take, so a response costs
    the same at every token. A string that began in the prompt is not completed by the response.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self.decode, self.strings = decode, tuple(strings)
        self.window = max(map(len, self.strings)) + SPARE_TOKENS

    def completed_by_last(self, ids: Sequence[int]) -> bool:
        """Whether a string stands in the text of `ids` that did not before the last one."""
        text = self.decode(ids[-self.window :])
        return any(string in text for string in self.strings)


# 8 rows of a 49k vocabulary stay in the cache of a CPU: 9 x as fast as 128 rows at once.
CPU_BLOCK_ROWS = 8
# Weights that a draw sums up at once: their running sums are made of one such run alone.
RUN = 256
# What an engine is asked for where it does not tell whole distributions: vLLM's limit.
ENTROPY_TOKENS = 20


def check_request(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int
) -> None:
    """Raise `ConfigError` for bad settings, `DataError` for prompts that no engine can serve."""
    limits = token_limits(prompts, params)
    wrong = [
        f"{name} is {value}, expected {expected}"
        for name, value, expected, fits in (
            ("num_generations", params.num_generations, "1 or more", params.num_generations >= 1),
            ("max_tokens", params.max_tokens, "1 or more", params.max_tokens >= 1),
            ("max_tokens_each", min(limits, default=1), "1 or more", min(limits, default=1) >= 1),
            ("stop_strings", params.stop_strings, "none empty", all(params.stop_strings)),
            ("temperature", params.temperature, "0 (greedy) or more", params.temperature >= 0),
            ("top_p", params.top_p, "above 0 and at most 1", 0 < params.top_p <= 1),
            ("top_k", params.top_k, "0 (off) or more", params.top_k >= 0),
        )
        if not fits
    ]
    if wrong:
        raise ConfigError(f"sampling: {'; '.join(wrong)}: correct the generation settings")
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if not prompt:
            raise DataError(f"prompt {index} has no tokens, expected 1 or more: check the template")
        if len(prompt) + limit > max_model_len:
            raise DataError(
                f"prompt {index} has {len(prompt)} tokens, which with {limit} response "
                f"tokens exceed the limit of {max_model_len}: shorten the prompt or the response"
            )


def token_limits(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[int]:
    """The most tokens of a response to each of `prompts`."""
    each = params.max_tokens_each or (params.max_tokens,) * len(prompts)
    if len(each) != len(prompts) or max(each, default=0) > params.max_tokens:
        raise RunError(
            f"max_tokens_each has {len(each)} limits, at most {max(each, default=0)}, for "
            f"{len(prompts)} prompts and max_tokens {params.max_tokens}: this is a fault of the "
            "caller, give one limit per prompt"
        )
    return list(each)


def response_seeds(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """A seed in [0, 2^63) for each response: [number of prompts][num_generations].

    It is a hash of `params.seed` (or the prompt's own of `seeds_each`), the prompt's tokens, how
    often the same prompt came before with that seed in `prompts`, and the generation's index:
    neither the order nor the batching of prompts changes it, and equal prompts get different
    responses.
    """
    seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
    seeds = []
    for prompt, seed in zip(
        prompts, params.seeds_each or (params.seed,) * len(prompts), strict=True
    ):
        key = (seed, tuple(prompt))
        text = f"{seed}|{seen[key]}|{','.join(map(str, prompt))}"
        seen[key] += 1
        prefix = hashlib.blake2b(text.encode(), digest_size=8)
        row = []
        for generation in range(params.num_generations):
            digest = prefix.copy()
            digest.update(f"|{generation}".encode())
            row.append(int.from_bytes(digest.digest(), "big") >> 1)
        seeds.append(row)
    return seeds


@dataclass(frozen=True, slots=True)
class Chunk:
    """Responses decoded together: `generations` of each prompt in `prompts` (indices)."""

    prompts: tuple[int, ...]
    generations: range


def plan_chunks(lengths: Sequence[int], num_generations: int, max_batch_size: int) -> list[Chunk]:
    """Split responses into chunks of at most `max_batch_size`, longest prompts first.

    Prompts stay whole, so that each is computed once, unless `num_generations` alone exceeds the
    limit. Neighbours in a chunk have similar lengths, which keeps padding small.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if num_generations > max_batch_size:
        starts = range(0, num_generations, max_batch_size)
        ranges = [range(s, min(s + max_batch_size, num_generations)) for s in starts]
        return [Chunk((index,), part) for index in order for part in ranges]
    per_chunk = max_batch_size // num_generations
    return [
        Chunk(tuple(order[start : start + per_chunk]), range(num_generations))
        for start in range(0, len(order), per_chunk)
    ]


def common_start(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all of `prompts` begin with, each with one or more of its own after them."""
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))  # the least alike
    most = min(map(len, prompts)) - 1
    alike = (left == right for left, right in zip(first[:most], last, strict=False))
    return sum(takewhile(bool, alike))


def draw_tokens(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token for each row: ids [N] (int64) and log-probs [N] (float32 nats).

    `logits` [N, V] of any float type; `uniforms` [N] (float64, in [0, 1)) decide the draw by the
    inverse of the cumulative distribution. Log-probs are of the distribution that was drawn from:
    log-softmax of logits / temperature, renormalised over what top-k, then top-p, left. At
    temperature 0 the likeliest token is taken, top-k and top-p are without effect, and the log-prob
    is that of temperature 1.
    """
    blocks = zip(_blocks(logits), _blocks(uniforms), strict=True)
    parts = [_draw_block(rows, targets, params) for rows, targets in blocks]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def of_rows(logits: Tensor, rows: Tensor) -> Tensor:
    """`logits` [R, V] of the row of each response, [n, V]; as they are where that is in order."""
    in_order = torch.arange(len(logits), device=logits.device)
    return logits if torch.equal(rows, in_order) else logits[rows]


def row_entropies(logits: Tensor) -> Tensor:
    """Entropy [N] (float32 nats) of softmax(logits [N, V]), in blocks as `draw_tokens`."""
    parts = []
    for rows in _blocks(logits):
        logprobs = rows.float().log_softmax(dim=-1)
        # A logit of minus infinity has probability 0 and adds nothing, not NaN.
        parts.append(-(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(dim=-1))
    return torch.cat(parts)


def top_entropy(logprobs: Sequence[float], temperature: float) -> float:
    """Entropy (nats) at temperature 1 over a draw's likeliest `ENTROPY_TOKENS`, renormalised.

    `logprobs` are those of some tokens under the distribution that was drawn from: softmax(logits /
    temperature), of temperature 1 where that is 0. Times the temperature they are logits again.
    """
    best = np.sort(np.asarray(logprobs, dtype=np.float64))[::-1][:ENTROPY_TOKENS]
    scores = best[np.isfinite(best)] * (temperature or 1.0)
    weights = np.exp(scores - scores.max())
    shares = weights / weights.sum()
    return float(-(shares * np.log(np.maximum(shares, 1e-300))).sum())


def _blocks(rows: Tensor) -> tuple[Tensor, ...]:
    block = CPU_BLOCK_ROWS if rows.device.type == "cpu" else max(1, rows.shape[0])
    return torch.split(rows, block)


def _draw_block(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    if params.temperature == 0:
        best, ids = logits.float().max(dim=-1)
        logprobs = best - logits.float().logsumexp(dim=-1)
        require_numbers(logprobs, "logits")
        return ids, logprobs
    scores, kept = logits, None
    if params.temperature != 1:
        scores = scores.float() / params.temperature
    if params.top_p < 1 or 0 < params.top_k < scores.shape[-1]:
        scores, kept = nucleus(scores.float(), Cut(params.top_k, params.top_p))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    choice, total = _invert(weights, uniforms)
    ids = choice if kept is None else kept.gather(-1, choice)
    # A sum of float32 weights is not quite 1.
    chance = weights.gather(-1, choice).squeeze(-1) / total
    return ids.squeeze(-1), chance.log().float()


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of `weights` [N, V] exceeds `uniforms` [N] times their sum.

    Returns the places [N, 1] and the sums [N]: first the run of `RUN` weights is found, then the
    place within it. Sums are float64: in float32 that over a large vocabulary would swallow the
    tail's probabilities.
    """
    rows, words = weights.shape
    if words % RUN:
        weights = functional.pad(weights, (0, -words % RUN))
    runs = weights.view(rows, -1, RUN)
    sums = runs.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = sums[:, -1]
    require_numbers(total, "logits")
    targets = (uniforms * total)[:, None]
    # right=True: the first entry *above* the target, so a token of probability 0 is never drawn.
    run = torch.searchsorted(sums, targets, right=True)
    before = functional.pad(sums, (1, 0)).gather(-1, run)
    inner = runs.gather(1, run[:, :, None].expand(rows, 1, RUN)).squeeze(1)
    cumulative = inner.cumsum(dim=-1, dtype=torch.float64)
    # A target that rounding put at the run's very end is of the last weight above 0.
    last = torch.nextafter(cumulative[:, -1:], torch.zeros_like(before))
    place = torch.searchsorted(cumulative, torch.minimum(targets - before, last), right=True)
    return run * RUN + place, total


def checked_weights(
    weights: Iterable[tuple[str, Tensor]],
    expected: Mapping[str, Sequence[int]],
    tied: frozenset[str],
) -> dict[str, Tensor]:
    """The weights by name, without the `tied` ones, which are copies of another weight.

    Raises `RunError` unless each `expected` name comes once, with its shape, and nothing else does.
    """
    given: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in given:
            raise RunError(f"weight sync: '{name}' came twice; the engine keeps its old weights")
        given[name] = tensor
    check_shapes({name: tensor.shape for name, tensor in given.items()}, expected, tied)
    return {name: given[name] for name in expected}


def check_shapes(
    given: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    tied: frozenset[str],
) -> None:
    """As `checked_weights`, of the weights' shapes."""
    missing = sorted(set(expected) - set(given))
    unknown = sorted(set(given) - set(expected) - tied)
    misshaped = [
        f"'{name}' {list(given[name])} instead of {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in given and list(given[name]) != list(shape)
    ]
    for what, names in (("missing", missing), ("unknown", unknown), ("misshaped", misshaped)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RunError(
                f"weight sync: {len(names)} {what} weight(s): {', '.join(names[:3])}{more}, "
                f"expected the {len(expected)} of the engine's model: sync the whole state dict of "
                "a model of the same architecture (the engine keeps its old weights)"
            )
