"""States that are the same are projected once: same values, same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.stream_attention import use_stream_attention
from posttrain.core.training import forward
from posttrain.core.training.forward import ResponseForward, States, response_pass
from tests.unit.training.test_stream import make_batch, make_model

CUT = Cut(20, 0.8)


def made(
    model: PreTrainedModel, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch
) -> tuple[ResponseForward, dict[str, Tensor], list[int]]:
    """What a pass gives, gradients of a random sum of it, and how many states were projected."""
    projected: list[int] = []
    whole = forward.cut_logprobs  # type: ignore[attr-defined]

    def counted(hidden: Tensor, *given: object, **options: object) -> object:
        projected.append(len(hidden))
        return whole(hidden, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "cut_logprobs", counted)
    _, out = response_pass(model, batch, temperature=0.7, cut=CUT)
    monkeypatch.setattr(forward, "cut_logprobs", whole)
    draw = torch.Generator().manual_seed(1)
    model.zero_grad()
    sums = [
        (x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum()
        for x in (out.logprobs, out.entropy)
    ]
    torch.stack(sums).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out, gradients, projected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_they_are_projected_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model(family), make_batch(words=2)
    use_stream_attention(model)
    found, gradients, projected = made(model, batch, monkeypatch)
    whole = forward._stream_states

    def unknown(*given: object) -> States:
        return whole(*given)._replace(places=None)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "_stream_states", unknown)
    wanted, plain, all_of_them = made(model, batch, monkeypatch)
    prompts = [
        ids[m.bool()].tolist() for ids, m in zip(batch.prompt_ids, batch.prompt_mask, strict=True)
    ]
    texts = {
        (*prompts[row], *batch.response_ids[row, : int(column)].tolist())
        for row, column in batch.response_mask.nonzero().tolist()
    }
    assert all_of_them == [int(batch.response_mask.sum())]
    assert projected == [len(texts)] and projected < all_of_them
    for name in ("logprobs", "entropy", "log_kept"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    assert gradients.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-6, atol=1e-9)
