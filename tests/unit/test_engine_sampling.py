"""The pure parts of rollout engines: requests, seeds, chunks, draws, weight checks, attention."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import eager_attention_forward

from posttrain.core.errors import ConfigError, DataError, ResourceError, RunError
from posttrain.core.math.nucleus import FIRST_NUCLEUS_WIDTH
from posttrain.core.models.decoding import LONG_PROMPT, grouped_attention
from posttrain.core.rollout import sampling
from posttrain.core.types import SamplingParams

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]


def draw(probabilities: list[float], uniform: float, **params: float) -> tuple[object, ...]:
    """Token and probability of one draw from `probabilities`."""
    ids, logprobs = sampling.draw_tokens(
        torch.tensor([probabilities]).log(),
        torch.tensor([uniform], dtype=torch.float64),
        SamplingParams(**params),  # type: ignore[arg-type]
    )
    return int(ids), math.exp(float(logprobs))


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.91, 3)]
)
def test_a_draw_inverts_the_cumulative_distribution(uniform: float, token: int) -> None:
    assert draw(PROBABILITIES, uniform) == (token, pytest.approx(PROBABILITIES[token]))


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize(
    ("probabilities", "possible"),
    [([0.0, 1.0, 0.0], 1), ([1.0, 0.0, 0.0], 0), ([0.0, 0.0, 1.0], 2)],
)
def test_a_token_of_probability_zero_is_never_drawn(
    uniform: float, probabilities: list[float], possible: int
) -> None:
    assert draw(probabilities, uniform)[0] == possible


def test_temperature_reshapes_the_distribution_that_log_probs_report() -> None:
    squared = [p**2 / sum(q**2 for q in PROBABILITIES) for p in PROBABILITIES]
    assert draw(PROBABILITIES, 0.99, temperature=0.5) == (3, pytest.approx(squared[3]))
    assert draw(PROBABILITIES, 0.5, temperature=0.5) == (0, pytest.approx(squared[0]))


def test_greedy_takes_the_likeliest_and_reports_temperature_one_without_any_cut() -> None:
    for cut in ({}, {"top_k": 1}, {"top_p": 0.1}):
        assert draw([0.2, 0.7, 0.1], 0.99, temperature=0, **cut) == (1, pytest.approx(0.7))


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 4}, 4),
        ({"top_k": 9}, 4),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.01}, 1),
        ({"top_k": 3, "top_p": 0.8}, 2),  # 0.75 / 0.9 of the three reach 0.8
        ({"top_k": 2, "top_p": 0.6}, 1),  # 0.5 / 0.75 of the two reach 0.6
    ],
)
def test_top_k_then_top_p_keep_the_fewest_tokens_and_renormalise(
    cut: dict[str, float], kept: int
) -> None:
    mass = sum(PROBABILITIES[:kept])
    assert draw(PROBABILITIES, 1 - 2**-53, **cut) == (
        kept - 1,
        pytest.approx(PROBABILITIES[kept - 1] / mass),
    )
    assert draw(PROBABILITIES, 0.0, **cut) == (0, pytest.approx(PROBABILITIES[0] / mass))


def test_a_nucleus_wider_than_the_first_look_is_found_whole() -> None:
    vocabulary = 8 * FIRST_NUCLEUS_WIDTH
    shuffled = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    logits = (-0.001 * torch.arange(vocabulary))[shuffled][None]
    best_first = logits.softmax(-1).sort(descending=True)
    kept = int((best_first.values.cumsum(-1) < 0.9).sum()) + 1
    assert kept > FIRST_NUCLEUS_WIDTH
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    ids, logprobs = sampling.draw_tokens(logits, last, SamplingParams(top_p=0.9))
    assert int(ids) == int(best_first.indices[0, kept - 1])
    expected = best_first.values[0, kept - 1] / best_first.values[0, :kept].sum()
    assert float(logprobs.exp()) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.8, temperature=0.7)])
def test_rows_are_drawn_independently_of_the_rows_beside_them(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2 * sampling.CPU_BLOCK_ROWS + 3, 50, generator=generator)
    uniforms = torch.rand(len(logits), dtype=torch.float64, generator=generator)
    ids, logprobs = sampling.draw_tokens(logits, uniforms, params)
    for row in range(len(logits)):
        alone = sampling.draw_tokens(logits[row : row + 1], uniforms[row : row + 1], params)
        assert alone[0].item() == ids[row].item()
        assert alone[1].item() == pytest.approx(logprobs[row].item(), abs=1e-6)


def test_log_probs_agree_with_log_softmax_over_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(5, 50_000, generator=generator)
    uniforms = torch.rand(5, dtype=torch.float64, generator=generator)
    for temperature in (0.0, 0.6, 1.0):
        params = SamplingParams(temperature=temperature)
        ids, logprobs = sampling.draw_tokens(logits, uniforms, params)
        exact = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(-1, ids[:, None])
        torch.testing.assert_close(logprobs.double(), exact[:, 0], rtol=0, atol=2e-5)


def test_seeds_follow_the_prompt_and_not_its_place() -> None:
    params = SamplingParams(num_generations=3, seed=5)
    first, second, again = sampling.response_seeds([(1, 2), (3,), (1, 2)], params)
    assert sampling.response_seeds([(3,), (1, 2)], params) == [second, first]
    assert len({*first, *second, *again}) == 9
    assert all(0 <= seed < 2**63 for seed in (*first, *second, *again))
    assert sampling.response_seeds([(1, 2)], SamplingParams(seed=6))[0][0] not in first
    assert sampling.response_seeds([(1,), (12,)], params) != sampling.response_seeds(
        [(11,), (2,)], params
    )


@given(st.lists(st.integers(1, 30), min_size=0, max_size=20), st.integers(1, 9), st.integers(1, 12))
def test_chunks_cover_every_response_once_within_the_limit(
    lengths: list[int], generations: int, limit: int
) -> None:
    chunks = sampling.plan_chunks(lengths, generations, limit)
    covered = [(p, g) for chunk in chunks for p in chunk.prompts for g in chunk.generations]
    assert sorted(covered) == [(p, g) for p in range(len(lengths)) for g in range(generations)]
    assert all(len(chunk.prompts) * len(chunk.generations) <= limit for chunk in chunks)
    longest = [max(lengths[p] for p in chunk.prompts) for chunk in chunks]
    assert longest == sorted(longest, reverse=True)
    if generations <= limit:
        assert all(len(chunk.generations) == generations for chunk in chunks)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(temperature=-1), "temperature is -1"),
        (SamplingParams(top_p=0), "top_p is 0"),
        (SamplingParams(top_p=1.1), "top_p is 1.1"),
        (SamplingParams(top_k=-1), "top_k is -1"),
        (SamplingParams(max_tokens=0), "max_tokens is 0"),
        (SamplingParams(num_generations=0), "num_generations is 0"),
    ],
)
def test_impossible_sampling_settings_are_named(params: SamplingParams, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sampling.check_request([(1,)], params, max_model_len=100)


def test_prompts_that_do_not_fit_are_named() -> None:
    params = SamplingParams(max_tokens=6)
    sampling.check_request([(1,) * 4], params, max_model_len=10)
    with pytest.raises(DataError, match="prompt 1 has 5 tokens"):
        sampling.check_request([(1,), (1,) * 5], params, max_model_len=10)
    with pytest.raises(DataError, match="prompt 0 has no tokens"):
        sampling.check_request([()], params, max_model_len=10)


EXPECTED = {"a": (2, 3), "b": (4,)}


def weights(**changed: Tensor | None) -> list[tuple[str, Tensor]]:
    """The expected weights, some of them replaced or (None) left out."""
    full = {"a": torch.zeros(2, 3), "b": torch.zeros(4), **changed}
    return [(name, tensor) for name, tensor in full.items() if tensor is not None]


def test_a_full_set_of_weights_is_accepted_with_and_without_tied_copies() -> None:
    for given_weights in (weights(), weights(tied=torch.zeros(9))):
        checked = sampling.checked_weights(iter(given_weights), EXPECTED, frozenset({"tied"}))
        assert list(checked) == ["a", "b"]


@pytest.mark.parametrize(
    ("given_weights", "said"),
    [
        (weights(b=None), r"1 missing weight\(s\): b"),
        (weights(c=torch.zeros(1)), r"1 unknown weight\(s\): c"),
        (weights(a=torch.zeros(3, 2)), r"'a' \[3, 2\] instead of \[2, 3\]"),
        (weights() + weights(), "'a' came twice"),
    ],
)
def test_a_set_of_weights_that_does_not_fit_is_refused(
    given_weights: list[tuple[str, Tensor]], said: str
) -> None:
    with pytest.raises(RunError, match=said):
        sampling.checked_weights(given_weights, EXPECTED, frozenset())


class Heads(torch.nn.Module):
    """What transformers' eager attention reads from its module."""

    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize(("steps", "keys"), [(1, 7), (5, 5), (520, 520)])
def test_grouped_attention_equals_eager_attention(steps: int, keys: int) -> None:
    assert (steps * keys > LONG_PROMPT) == (steps == 520)
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, heads, length, 8, generator=generator)
        for heads, length in ((6, steps), (2, keys), (2, keys))
    )
    hidden = torch.ones(steps, keys).triu(keys - steps + 1).bool()
    mask = torch.zeros(2, 1, steps, keys).masked_fill(hidden, torch.finfo(torch.float32).min)
    mask[0, :, :, :2].masked_fill_(~torch.eye(steps, 2).bool(), torch.finfo(torch.float32).min)
    expected, _ = eager_attention_forward(Heads(), query, key, value, mask, scaling=0.3)
    got, _ = grouped_attention(Heads(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("words", [50, 5000])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nothing_is_drawn_from_logits_that_are_not_numbers(
    temperature: float, words: int, wrong: float
) -> None:
    logits = torch.zeros(2, words)
    logits[1, 3] = wrong
    uniforms = torch.full((2,), 0.5, dtype=torch.float64)
    with pytest.raises(ResourceError, match="logits that are not numbers"):
        sampling.draw_tokens(logits, uniforms, SamplingParams(temperature=temperature))
    with pytest.raises(ResourceError, match="logits that are not numbers"):
        sampling.draw_tokens(
            logits, uniforms, SamplingParams(temperature=temperature, top_k=5, top_p=0.9)
        )
