"""FlexAttention sees what the grids see. Values on a CPU only: there it has no backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM, LlamaConfig

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokens import response_batch
from posttrain.core.models import stream_attention
from posttrain.core.models import stream_attention as flex_stream
from posttrain.core.models.layers import decoder_layers
from posttrain.core.models.stream_attention import StreamLayout, use_stream_attention
from posttrain.core.training import forward
from posttrain.core.training.forward import response_states
from posttrain.core.training.stream import stream_of

# Prompt lengths; then the group and length of each response.
LAYOUTS = {
    "ragged": ([5, 12, 1], [(0, 4), (0, 7), (0, 1), (1, 9), (1, 2), (2, 6), (0, 3)]),
    "one": ([3], [(0, 2)]),
    "mixed order": ([4, 6], [(1, 3), (0, 5), (1, 1), (0, 2)]),
    "longer than a block": ([150, 20], [(0, 140), (1, 3), (0, 30)]),
    "nothing but prompts": ([4, 2], [(0, 1), (1, 1)]),
    "equal prompts": ([6, 6, 6], [(0, 3), (1, 3), (2, 5), (2, 5)]),
}
FIRST_WORDS = {"alike": (10, 10), "unlike": (10, 50)}
"""The first token of the first and of the second prompt; the n-th is as far on again."""
HEADS = {
    "grouped heads": (4, 2, 16, 0.25),
    "plain heads": (2, 2, 16, 0.1),
    "one key": (4, 1, 32, 1),
}


def batch_of(name: str, words: str = "unlike") -> RolloutBatch:
    prompts, rows = LAYOUTS[name]
    first, second = FIRST_WORDS[words]
    starts = [first + group * (second - first) for group, _ in rows]
    return response_batch(
        prompts=[
            list(range(start, start + prompts[group]))
            for start, (group, _) in zip(starts, rows, strict=True)
        ],
        responses=[list(range(4, 4 + length)) for _, length in rows],
        group_ids=[group for group, _ in rows],
        pad_token_id=0,
        problems=(),
    )


def histories(batch: RolloutBatch, *, include_last: bool) -> list[tuple[int, ...]]:
    """What each token of the stream ends: prompts, then responses, each token of a text once."""
    groups = batch.group_id.tolist()
    prompts = [
        tuple(ids[mask.bool()].tolist())
        for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)
    ]
    firsts = [groups.index(group) for group in dict.fromkeys(groups)]
    found = [prompts[row][: i + 1] for row in firsts for i in range(len(prompts[row]))]
    for row, prompt in enumerate(prompts):
        count = int(batch.response_mask[row].sum()) - (not include_last)
        ids = tuple(batch.response_ids[row].tolist())
        found += [prompt + ids[: i + 1] for i in range(count)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("words", FIRST_WORDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_mask_shows_a_token_its_history(name: str, words: str, include_last: bool) -> None:
    batch = batch_of(name, words)
    stream = stream_of(batch, include_last=include_last)
    texts = histories(batch, include_last=include_last)
    assert stream.token_ids.tolist() == [text[-1] for text in texts]
    assert stream.positions.tolist() == [len(text) - 1 for text in texts]
    at = torch.arange(len(texts))
    found = flex_stream.stream_mask(stream.layout)(at[:1], at[:1], at[:, None], at[None, :])
    wanted = torch.tensor([[q[: len(k)] == k for k in texts] for q in texts])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("words", FIRST_WORDS)
@pytest.mark.parametrize("name", [*LAYOUTS, "several parts"])
def test_blocks_are_those_that_torch_finds(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "several parts":  # of queries, worked on one after the other
        name = "longer than a block"
        monkeypatch.setattr(flex_stream, "_ROWS", 128)
    layout = stream_of(batch_of(name, words), include_last=True).layout
    count = len(layout.back)
    found = flex_stream.block_mask(layout)
    sees = flex_stream.stream_mask(layout)
    wanted = create_block_mask(sees, None, None, count, count, device="cpu")
    assert found.shape == wanted.shape and found.mask_mod is not None
    names = ("kv", "full_kv", "q", "full_q")
    for counts, indices in ((f"{n}_num_blocks", f"{n}_indices") for n in names):
        assert torch.equal(getattr(found, counts), getattr(wanted, counts))
        assert torch.equal(getattr(found, indices), getattr(wanted, indices))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("words", FIRST_WORDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_the_grids(name: str, words: str, heads: str) -> None:
    queries, keys, size, scaling = HEADS[heads]
    layout = stream_of(batch_of(name, words), include_last=True).layout
    numbers = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, len(layout.back), size, generator=numbers)
        for count in (queries, keys, keys)
    )
    with torch.no_grad():
        grids = stream_attention._by_grids(query, key, value, scaling, layout)
        flex = flex_stream.flex_stream(query, key, value, layout, scaling)
    torch.testing.assert_close(flex, grids, rtol=1e-4, atol=1e-5)


def test_the_mask_is_made_once_for_all_layers() -> None:
    layout = stream_of(batch_of("ragged"), include_last=True).layout
    assert flex_stream.block_mask(layout) is flex_stream.block_mask(layout)
    assert not stream_of(batch_of("ragged"), include_last=True).layout.made
    assert not layout.to(torch.device("cpu")).made  # a mask lies on the layout's device


class OnCuda:
    """As much of a tensor on CUDA as the check looks at."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> None:
        self.dtype, self.shape = dtype, (1, 4, 100, size)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (torch.zeros(1, 4, 10, 64), "no backward pass on a CPU"),
        (OnCuda(size=8), "no heads of 8"),
        (OnCuda(torch.float64), "in torch.float64"),
    ],
)
def test_what_the_kernel_cannot_take_is_computed_by_grids(query: Tensor, reason: str) -> None:
    assert reason in str(flex_stream.why_no_flex(query))


def test_forward_mode_derivatives_are_by_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_stream.forward_ad, "unpack_dual", lambda query: query)  # type: ignore[attr-defined]
    query = OnCuda()
    query.tangent = None  # type: ignore[attr-defined]
    assert flex_stream.why_no_flex(query) is None  # type: ignore[arg-type]
    query.tangent = query  # type: ignore[attr-defined]
    assert "forward-mode" in str(flex_stream.why_no_flex(query))  # type: ignore[arg-type]


def test_a_compiled_layer_does_not_ask_for_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    query = OnCuda()  # asked for its tangent it would fail
    assert flex_stream.why_no_flex(query) is None  # type: ignore[arg-type]
    assert "no heads of 8" in str(flex_stream.why_no_flex(OnCuda(size=8)))  # type: ignore[arg-type]


def with_mask(layout: StreamLayout) -> StreamLayout:
    """What a GPU gets before its layers."""
    flex_stream.block_mask(layout)
    return layout


def test_a_compiled_layer_holds_the_kernel_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs outside (`fullgraph`), and other shapes compile little again."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).eval()
    use_stream_attention(model)
    batches = [batch_of(name) for name in LAYOUTS]
    with torch.no_grad():
        grids = [response_states(model, batch, include_last=True).hidden for batch in batches]
        monkeypatch.setattr(stream_attention, "why_no_flex", lambda query: None)
        monkeypatch.setattr(forward, "prepared", with_mask)
        torch.compiler.reset()  # the limit counts what other tests compiled of these layers too
        for layer in decoder_layers(model):
            layer.compile(dynamic=True, backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
            for batch, wanted in zip(batches, grids, strict=True):
                found = response_states(model, batch, include_last=True).hidden
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_keys_are_copied_to_the_heads_that_share_them_for_a_backward_pass(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **settings: object) -> Tensor:
        seen.extend((key, value))
        assert settings["enable_gqa"] is not training
        return query

    monkeypatch.setattr(flex_stream, "flex_attention", attend)
    layout = stream_of(batch_of("one"), include_last=True).layout
    query, key, value = (torch.randn(1, heads, len(layout.back), 16) for heads in (4, 2, 2))
    with torch.set_grad_enabled(training):
        key.requires_grad_()
        flex_stream.flex_stream(query, key, value, layout, 0.5)
    for given, own in zip(seen, (key, value), strict=True):
        assert torch.equal(given, own[:, [0, 0, 1, 1]] if training else own)


def test_attention_takes_the_kernel_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_attention, "why_no_flex", lambda query: None)
    monkeypatch.setattr(stream_attention, "flex_stream", lambda *given: given)
    layout = stream_of(batch_of("one"), include_last=True).layout
    query, key, value = (torch.zeros(1, 2, len(layout.back), 16) for _ in range(3))
    out, _ = stream_attention.stream_attention(
        torch.nn.Module(), query, key, value, None, 0.5, stream_layout=layout
    )
    assert out == (query, key, value, layout, 0.5)  # type: ignore[comparison-overlap]
