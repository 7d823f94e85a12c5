"""Float32 weights whose products are made in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.config.sections import ModelSection
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.loading import load_policy
from posttrain.core.models.sharded import compute_dtype, use_autocast
from posttrain.core.training.forward import forward_only, response_logprobs
from tests.helpers.speed import SPEED_FAMILIES, Options, speed_batch, speed_learner, speed_model

OPTIONS = [
    Options(),
    Options(stream=True),
    Options(stream=True, packed=True, skip_idle=True, checkpointing=True, micro_batch_size=2),
    Options(stream=True, lora=True),
]


def cast_model(family: str, options: Options) -> PreTrainedModel:
    model = speed_model(family, options)
    use_autocast(model, torch.bfloat16)
    return model


def gradient(model: PreTrainedModel) -> Tensor:
    """Of the mean log-prob, all parameters in one vector."""
    batch = speed_batch()
    response_logprobs(model, batch, temperature=0.7).logprobs.mean().backward()  # type: ignore[no-untyped-call]
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    assert {g.dtype for g in found} == {torch.float32}
    return torch.cat(found)


@pytest.mark.parametrize("options", OPTIONS, ids=["padded", "stream", "all", "lora"])
@pytest.mark.parametrize("family", SPEED_FAMILIES)
def test_gradients_are_of_bfloat16_products_and_near_those_of_float32(
    family: str, options: Options
) -> None:
    wanted, found = gradient(speed_model(family, options)), gradient(cast_model(family, options))
    gap = float((found - wanted).norm() / wanted.norm())
    assert 1e-4 < gap < 0.03  # a bfloat16 has 8 bits: 0.004 of each number


@pytest.mark.parametrize("family", SPEED_FAMILIES)
def test_an_update_moves_float32_weights_without_a_copy(family: str) -> None:
    options = Options(stream=True)
    model = cast_model(family, options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = speed_learner(model, options, rate=1e-5)  # below one bfloat16 step of most weights
    learner.update(speed_batch(), 1, 0.0)
    moved = [float((p != before[name]).float().mean()) for name, p in model.named_parameters()]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(share > 0.5 for share in moved) > len(moved) / 2
    masters = learner.optimizer.optimizer.param_groups[0]["params"]
    assert {m.data_ptr() for m in masters} == {p.data_ptr() for p in model.parameters()}


def test_a_loaded_model_computes_as_its_runtime_says(tmp_path: Path) -> None:
    """Loaded twice, as a policy and its reference are, and saved: float32 all the way."""
    folder = make_tiny_model(tmp_path / "model")
    runtime = ModelRuntime.from_config(ModelSection(dtype="autocast", device="cpu"))
    assert runtime.dtype == torch.bfloat16 and runtime.autocast  # engines and rewards: bfloat16
    policy, reference = load_policy(folder, runtime), load_policy(folder, runtime)
    batch = speed_batch()
    first, second = (forward_only(m, batch, 4, 1.0).logprobs for m in (policy, reference))
    whole = load_policy(folder, replace(runtime, dtype=torch.float32, autocast=False))
    exact = forward_only(whole, batch, 4, 1.0).logprobs
    assert policy.dtype == torch.float32 and compute_dtype(policy) == torch.bfloat16
    assert compute_dtype(whole) == torch.float32
    assert torch.equal(first, second)
    assert 1e-5 < float((first - exact).abs().max()) < 0.1
