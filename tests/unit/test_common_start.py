"""What all prompts begin with is read once, and no response is another one for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.core.rollout.sampling import common_start
from posttrain.core.types import SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine
from tests.helpers.sampled import ALIKE, PROMPTS, START, save_family, start_engine
from tests.unit.training.test_stream import FAMILIES

PARAMS = SamplingParams(num_generations=4, max_tokens=10)


@pytest.mark.parametrize(
    ("prompts", "length"),
    [
        (ALIKE, len(START)),
        (ALIKE[:2], len(START) + 1),
        (PROMPTS, 0),
        ([[1, 2, 3]], 2),  # one token is left to be read with the rest
        ([[1, 2, 3], [1, 2], [1, 2, 4]], 1),
        ([[1, 2], [1, 2]], 1),
        ([[1], [1, 2]], 0),
    ],
)
def test_each_prompt_has_a_token_of_its_own(prompts: list[list[int]], length: int) -> None:
    assert common_start(prompts) == length


def tokens_read(engine: TransformersEngine) -> list[int]:
    """Grows with each pass by the tokens that go through the layers."""
    read: list[int] = []

    def note(module: object, given: tuple[Tensor, ...], output: Tensor) -> None:
        read.append(given[0].numel())

    engine._model.get_input_embeddings().register_forward_hook(note)
    return read


@pytest.mark.parametrize("generations", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_responses_are_those_of_prompts_read_by_themselves(
    family: str, generations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(PARAMS, num_generations=generations)
    engine = start_engine(save_family(family, tmp_path))
    read = tokens_read(engine)
    found = engine.generate(ALIKE, params)
    windowed = family in ("mistral", "gemma3")  # of 32 tokens: such prompts are wider
    own = max(map(len, ALIKE)) - len(START)
    first = [3 * (len(START) + own)] if windowed else [len(START), 3 * own]
    assert read[: len(first)] == first
    read.clear()
    monkeypatch.setattr(engine, "_least_spared", 10**6)
    wanted = engine.generate(ALIKE, params)
    assert read[0] == 3 * max(map(len, ALIKE))
    for ours, theirs in zip(sum(found, []), sum(wanted, []), strict=True):
        assert ours.token_ids == theirs.token_ids
        gap = torch.tensor(ours.logprobs) - torch.tensor(theirs.logprobs)
        assert gap.abs().max() < 1e-5
