"""Models that cannot share prompts, or keep no states of theirs, give what whole sequences give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from posttrain.core.errors import ConfigError
from posttrain.core.models.decoding import why_no_shared_keys, why_no_stream
from posttrain.core.models.layers import is_checkpointed, use_checkpointing
from posttrain.core.models.stream_attention import use_stream_attention
from tests.unit.training.test_stream import (
    SIZES,
    make_batch,
    make_model,
    shared_states,
    whole_states,
    with_gradients,
)

OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba": lambda: MambaConfig(vocab_size=100, hidden_size=32, state_size=4, num_hidden_layers=2),
    "lfm2": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}
REASONS = {
    "mamba": "model type 'mamba' has layers of type linear_attention",
    "lfm2": "model type 'lfm2' has layers of type conv",
}


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("family", OTHERS)
def test_a_model_with_another_memory_computes_whole_sequences(
    family: str, include_last: bool
) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        OTHERS[family](), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    assert why_no_stream(model) == why_no_shared_keys(model) == REASONS[family]
    batch = make_batch()
    wanted = with_gradients(model, whole_states(model, batch, include_last=include_last))
    states, gradients = with_gradients(
        model, shared_states(model, batch, include_last=include_last)
    )
    torch.testing.assert_close(states, wanted[0], rtol=0, atol=5e-6)
    for name, value in wanted[1].items():
        gap = (gradients[name] - value).abs().max()
        assert gap <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_layers_that_are_computed_twice_give_the_same_gradients(family: str, stream: bool) -> None:
    model, batch = make_model(family), make_batch()
    wanted = with_gradients(model, whole_states(model, batch, include_last=False))
    if stream:
        use_stream_attention(model)
    use_checkpointing(model)
    assert is_checkpointed(model)
    calls = []
    layers = model.base_model.h if family == "gpt2" else model.base_model.layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    states, gradients = with_gradients(model, shared_states(model, batch, include_last=False))
    torch.testing.assert_close(states, wanted[0], rtol=0, atol=5e-6)
    for name, value in wanted[1].items():
        gap = (gradients[name] - value).abs().max()
        assert gap <= 1e-5 * value.abs().max(), name
    assert len(calls) == 2 * len(layers), "once forward, once in the backward pass"


def test_a_model_without_such_layers_is_named() -> None:
    with pytest.raises(ConfigError, match="'Linear' has no layers that transformers can"):
        use_checkpointing(torch.nn.Linear(2, 2))
