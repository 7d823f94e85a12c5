"""Responses that have said the same take one row, and each is what it would be by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.core.models import decoding
from posttrain.core.models.prefixes import NextRows, next_rows
from posttrain.core.rollout.sampling import of_rows
from posttrain.core.types import Completion, SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine
from tests.helpers.sampled import ALIKE, PROMPTS, save_family, start_engine
from tests.unit.test_common_start import tokens_read

FAMILIES = ("llama", "gemma3", "gpt2")


def rows_of(rows: list[int], ids: list[int], num_rows: int) -> tuple[object, ...]:
    found = next_rows(torch.tensor(rows), torch.tensor(ids), num_rows)
    return tuple(None if x is None else x.tolist() for x in (found.ids, found.rows, found.of))


def test_a_row_splits_by_what_its_responses_drew() -> None:
    assert rows_of([0, 0, 1, 1], [7, 7, 9, 8], 2) == ([7, 8, 9], [0, 0, 2, 1], [0, 1, 1])


def test_rows_that_go_on_as_they_are_are_not_copied() -> None:
    assert rows_of([0, 1, 1, 2, 3], [5, 6, 6, 5, 9], 4) == ([5, 6, 5, 9], [0, 1, 1, 2, 3], None)


def test_ended_rows_stay_until_they_are_a_quarter() -> None:
    assert rows_of([0, 1, 2, 4], [5, 6, 7, 8], 5) == ([5, 6, 7, 0, 8], [0, 1, 2, 4], None)
    assert rows_of([0, 1, 4], [5, 6, 8], 5) == ([5, 6, 8], [0, 1, 2], [0, 1, 4])
    assert rows_of([3, 4, 4], [5, 6, 7], 5)[2] == [3, 4, 4], "a split drops them at once"


def test_logits_in_order_are_not_copied() -> None:
    logits = torch.rand(3, 4)
    assert of_rows(logits, torch.arange(3)) is logits
    assert torch.equal(of_rows(logits, torch.tensor([0, 0, 2])), logits[[0, 0, 2]])
    assert torch.equal(of_rows(logits, torch.tensor([0, 1])), logits[:2])


def by_themselves(rows: Tensor, ids: Tensor, num_rows: int) -> NextRows:
    """Every response in a row of its own."""
    return NextRows(ids, torch.arange(len(ids)), rows)


def responses(engine: TransformersEngine, params: SamplingParams) -> list[Completion]:
    return [c for prompts in (ALIKE, PROMPTS) for g in engine.generate(prompts, params) for c in g]


@pytest.mark.parametrize("temperature", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_responses_are_those_of_rows_of_their_own(
    family: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(
        num_generations=6, max_tokens=10, temperature=temperature, entropy=True, seed=3
    )
    engine = start_engine(save_family(family, tmp_path))
    read = tokens_read(engine)
    found = responses(engine, params)
    merged = sum(read)
    read.clear()
    monkeypatch.setattr(decoding, "next_rows", by_themselves)
    wanted = responses(engine, params)
    assert len({c.token_ids for c in wanted}) > 6 or temperature < 1
    if temperature < 1:  # else hardly any two draw the same
        assert merged < sum(read)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        for name in ("logprobs", "entropies"):
            pair = (torch.tensor(getattr(c, name)) for c in (ours, theirs))
            torch.testing.assert_close(*pair, rtol=0, atol=1e-5)
