"""Decoding over prompts that are kept once gives what whole sequences by themselves give."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from posttrain.core.models import decoding
from posttrain.core.models.decoding import DecodingMemory, use_grouped_attention
from tests.unit.training import test_stream
from tests.unit.training.test_stream import FAMILIES

PROMPTS = [5, 12, 1]
EACH = 3
TOKENS = 6
GAP = 1e-5
# Rows that go on after the token of that number: all groups whole, then unequal, then one prompt
# less, then one row of each of two prompts.
KEPT = {1: [0, 1, 2, 3, 5, 6, 7, 8], 3: [0, 1, 3, 4], 4: [1, 2]}


def make_model(family: str) -> PreTrainedModel:
    """A random model in float32."""
    return test_stream.make_model(family).float()


def whole_states(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Hidden states [L, H] of one sequence by itself."""
    return model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]


def decoded_gap(
    model: PreTrainedModel, plain: PreTrainedModel, prompts: list[int], longest: int
) -> float:
    """Largest difference of the last state between decoding and whole sequences; both are checked
    at each token of each row that goes on."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randint(3, 100, (n,), generator=draw).tolist() for n in prompts]
    width = max(prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in given])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in given])
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model.base_model(
        ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    memory = DecodingMemory.of_prompts(model, cache, mask, longest, several=True)
    memory.keep(torch.arange(len(given)).repeat_interleave(EACH))
    rows = [list(p) for p in given for _ in range(EACH)]
    gap = 0.0
    for step in range(TOKENS):
        for row in rows:
            row.append(int(torch.randint(3, 100, (1,), generator=draw)))
        last = torch.tensor([[row[-1]] for row in rows])
        got = model.base_model(last, use_cache=True, **memory.next_token()).last_hidden_state[:, 0]
        wanted = torch.stack([whole_states(plain, row)[-1] for row in rows])
        assert got.isfinite().all()
        gap = max(gap, float((got - wanted).abs().max()))
        if step in KEPT:
            memory.keep(torch.tensor(KEPT[step]))
            rows = [rows[index] for index in KEPT[step]]
    return gap


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_states_are_those_of_whole_sequences(
    family: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = make_model(family), make_model(family)
    use_grouped_attention(model)
    assert decoding.can_share(model, 20)
    if not shared:
        monkeypatch.setattr(decoding, "can_share", lambda *_: False)
    # The softmax is of float32 in all of them.
    assert decoded_gap(model, plain, PROMPTS, max(PROMPTS) + TOKENS) < GAP


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@torch.no_grad()
def test_a_window_narrower_than_a_sequence_has_prompts_copied(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES[family]()
    config.sliding_window = 8
    monkeypatch.setitem(FAMILIES, family, lambda: config)
    model, plain = make_model(family), make_model(family)
    use_grouped_attention(model)
    assert decoded_gap(model, plain, PROMPTS, max(PROMPTS) + TOKENS) < GAP
    assert decoded_gap(model, plain, [3, 7, 1], 7 + TOKENS) < GAP
    monkeypatch.setattr(decoding, "can_share", lambda *_: True)
    assert decoded_gap(model, plain, [3, 7, 1], 7 + TOKENS) > 1e-3


@torch.no_grad()
def test_one_prompt_with_several_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "KEPT", {2: [0, 2]})
    for family in ("llama", "gemma3"):
        model = make_model(family)
        use_grouped_attention(model)
        assert decoded_gap(model, make_model(family), [7], 7 + TOKENS) < GAP


@torch.no_grad()
def test_equal_prompts_need_no_mask_and_one_sequence_each_no_sharing() -> None:
    model = make_model("llama")
    use_grouped_attention(model)
    assert decoded_gap(model, make_model("llama"), [7, 7, 7], 7 + TOKENS) < GAP
    mask = torch.ones(2, 4, dtype=torch.int64)
    for shared in (False, True):
        cache = DynamicCache(config=model.config)
        model.base_model(mask, past_key_values=cache, use_cache=True)
        memory = DecodingMemory.of_prompts(model, cache, mask, 8, several=shared)
        assert (memory.prompts is not None) == shared
    assert memory.prompts is not None
    assert memory.prompts.hidden is None
    assert memory.prompts.slots is None
    assert memory.prompts.keys[0].shape[0] == 2
