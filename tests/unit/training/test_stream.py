"""One stream of prompts and responses gives what whole sequences by themselves give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokens import response_batch
from posttrain.core.models import stream_attention
from posttrain.core.models.decoding import why_no_stream
from posttrain.core.models.stream_attention import use_stream_attention
from posttrain.core.training import forward
from posttrain.core.training.forward import response_states

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=32),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=32),
    "gpt2": lambda: GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=2
    ),
}
PROMPTS = [5, 12, 1]
# Group and length of each response, and what was sampled where there is tool output as well.
ROWS = [(0, 4), (0, 7), (0, 1), (1, 9), (1, 2), (2, 6), (0, 3)]
OWN = {1: [True] * 5 + [False] * 2, 3: [True] * 3 + [False] * 3 + [True] * 3}


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        FAMILIES[family](), dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval()


def make_batch(words: int = 95) -> RolloutBatch:
    """With few `words` many rows begin alike."""
    numbers = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 4 + words, (count,), generator=numbers).tolist())

    prompts = [tokens(length) for length in PROMPTS]
    return response_batch(
        prompts=[prompts[group] for group, _ in ROWS],
        responses=[tokens(length) for _, length in ROWS],
        group_ids=[group for group, _ in ROWS],
        pad_token_id=0,
        problems=(),
        sampled=[OWN.get(row, [True] * length) for row, (_, length) in enumerate(ROWS)],
    )


def whole_states(model: PreTrainedModel, batch: RolloutBatch, *, include_last: bool) -> Tensor:
    """States [N, H] that predict the sampled tokens, each sequence by itself, row after row."""
    found = []
    for row, (_, length) in enumerate(ROWS):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        ids = torch.cat([prompt, batch.response_ids[row, :length]])
        states = model.base_model(input_ids=ids[None]).last_hidden_state[0, len(prompt) - 1 :]
        sampled = batch.response_mask[row, :length].bool()
        found.append(states[:-1][sampled])
        if include_last:
            found.append(states[int(sampled.nonzero().max()) + 1][None])
    return torch.cat(found)


def shared_states(model: PreTrainedModel, batch: RolloutBatch, *, include_last: bool) -> Tensor:
    """The same from `response_states`."""
    hidden, _, mask, _ = response_states(model, batch, include_last=include_last)
    found = []
    for row in range(len(batch)):
        found.append(hidden[row, : mask.shape[1]][mask[row]])
        if include_last:
            found.append(hidden[row, int(mask[row].nonzero().max()) + 1][None])
    return torch.cat(found)


def with_gradients(model: PreTrainedModel, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The states, and the gradients of their sum with fixed random weights."""
    model.zero_grad()
    weights = torch.Generator().manual_seed(1)
    (states * torch.randn(states.shape, generator=weights, dtype=states.dtype)).sum().backward()
    return states.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("words", [95, 2])
@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("kernel", ["products", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_whole_sequences(
    family: str, kernel: str, include_last: bool, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "sdpa":
        monkeypatch.setattr(stream_attention, "LONG_PROMPT", 0)
        monkeypatch.setattr(stream_attention, "LONG_RESPONSE", 0)
    model, batch = make_model(family), make_batch(words)
    wanted = with_gradients(model, whole_states(model, batch, include_last=include_last))
    assert why_no_stream(model) is None
    use_stream_attention(model)
    monkeypatch.setattr(forward, "_cached_states", None)  # the padded path is not to be taken
    states, gradients = with_gradients(
        model, shared_states(model, batch, include_last=include_last)
    )
    torch.testing.assert_close(states, wanted[0], rtol=0, atol=5e-6)
    assert gradients.keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        gap = (gradients[name] - value).abs().max()
        assert gap <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize("stream", [True, False])
def test_rows_of_a_group_with_prompts_of_their_own_follow_these(stream: bool) -> None:
    """Episodes of a problem begin with what an environment shows, branches with what was sampled
    elsewhere: the log-probs of the group's other rows would be those after another prompt."""
    model, batch = make_model("llama").float(), make_batch(words=2)
    together = replace(batch, group_id=torch.zeros_like(batch.group_id))
    wanted = with_gradients(model, whole_states(model, batch, include_last=True))
    if stream:
        use_stream_attention(model)
    found = with_gradients(model, shared_states(model, together, include_last=True))
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=2e-5)
    for name, value in wanted[1].items():
        assert (found[1][name] - value).abs().max() <= 1e-4 * value.abs().max(), name


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_sequence_longer_than_a_sliding_window_is_not_put_in_a_stream(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window hides the start of the prompt, which the stream would show: 12 + 9 > 8."""
    config = FAMILIES[family]()
    config.sliding_window = 8
    monkeypatch.setitem(FAMILIES, family, lambda: config)
    model, batch = make_model(family).float(), make_batch()
    wanted = whole_states(model, batch, include_last=False)
    use_stream_attention(model)
    states = shared_states(model, batch, include_last=False)
    torch.testing.assert_close(states, wanted, rtol=0, atol=2e-5)
    monkeypatch.setattr(forward, "widest_window", lambda _: None)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(
            shared_states(model, batch, include_last=False), wanted, rtol=0, atol=1e-3
        )


def test_responses_of_one_token_need_no_responses_in_the_stream() -> None:
    """The prompt's last state predicts them; a batch without any sampled token has no states."""
    model, batch = make_model("llama"), make_batch()
    use_stream_attention(model)
    one = replace(batch, response_mask=batch.response_mask * 0).with_columns(
        response_mask=torch.eye(1, batch.response_ids.shape[1]).long().expand(len(batch), -1)
    )
    hidden, ids, mask, _ = response_states(model, one, include_last=False)
    assert hidden.shape[:2] == ids.shape == mask.shape == (len(batch), 1)
    none = batch.with_columns(response_mask=batch.response_mask * 0)
    hidden, ids, _, _ = response_states(model, none, include_last=False)
    assert hidden.shape[:2] == (len(batch), 1)
    assert ids.shape == (len(batch), 0)


def test_why_a_model_cannot_take_a_stream_is_said() -> None:
    config = FAMILIES["qwen3"]()
    model = make_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert why_no_stream(model) == "model type 'qwen3' has layers of type linear_attention"
    assert config.model_type == "qwen3"
