"""bfloat16 products that are made in float32 are bfloat16's, and nothing stays in float32."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from posttrain.core.config.sections import LoraSection, ModelSection
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models import linear as wide_products
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.layers import compile_layers, use_checkpointing
from posttrain.core.models.linear import (
    WideLinear,
    linear,
    packed_bytes,
    product,
    product_type,
    widen,
)
from posttrain.core.models.loading import load_policy, load_reward_model
from posttrain.core.models.lora import add_adapter
from posttrain.core.models.sampled_outputs import outputs_reused
from posttrain.core.training.forward import response_logprobs
from posttrain.core.types import SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from tests.helpers.engines import make_setup
from tests.helpers.speed import speed_batch

CPU = torch.device("cpu")
LOW = ModelRuntime(CPU, torch.bfloat16, "stream")
HALF_STEP = 2.0**-8  # the largest relative error of rounding to bfloat16
SHAPES = [((7, 33), (33, 5)), ((2, 3, 4, 40), (2, 3, 40, 6))]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without the instructions, wherever the test runs."""
    monkeypatch.setattr(wide_products, "CPU_EMULATES", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def saved() -> Iterator[list[Tensor]]:
    """What autograd keeps for a backward pass."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def assert_rounded_once(found: Tensor, wanted: Tensor, terms: Tensor) -> None:
    """`found` is `wanted` (float64) but for one rounding and a float32 sum of such `terms`."""
    assert found.dtype == torch.bfloat16
    assert ((found.double() - wanted).abs() <= HALF_STEP * wanted.abs() + 1e-5 * terms).all()


@pytest.mark.parametrize("shapes", SHAPES, ids=["matrices", "batches"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_and_its_gradients_are_rounded_once(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], turned: bool, saved: list[Tensor]
) -> None:
    torch.manual_seed(0)
    one, other = (drawn(*shape) for shape in shapes)
    given = other.detach().mT.contiguous().mT.requires_grad_() if turned else other
    found = product(one, given)
    grad = torch.randn(found.shape).bfloat16()
    found.backward(grad)
    a, b, g = one.detach().double(), other.detach().double(), grad.double()
    assert_rounded_once(found.detach(), a @ b, a.abs() @ b.abs())
    assert_rounded_once(one.grad, g @ b.mT, g.abs() @ b.abs().mT)
    assert_rounded_once(given.grad, a.mT @ g, a.abs().mT @ g.abs())
    assert {tensor.dtype for tensor in saved} == {torch.bfloat16}


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_as_good_as_exact_products(bias: bool, saved: list[Tensor]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 10, bias=bias, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    widen(layer)
    assert type(layer) is WideLinear
    x, grad = drawn(3, 5, 24), torch.randn(3, 5, 10).bfloat16()
    wide_x = x.detach().double().requires_grad_()
    found = layer(x)
    assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
    wanted = exact(wide_x)
    found.backward(grad)
    wanted.backward(grad.double())
    assert_rounded_once(found.detach(), wanted.detach(), torch.tensor(1.0))
    assert_rounded_once(x.grad, wide_x.grad, torch.tensor(1.0))
    for own, other in zip(layer.parameters(), exact.parameters(), strict=True):
        assert_rounded_once(own.grad, other.grad, torch.tensor(10.0))


def test_a_frozen_layer_makes_no_gradient_of_its_weight() -> None:
    layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)
    widen(layer)
    x = drawn(2, 8)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None and layer.bias.grad is None


@pytest.mark.parametrize(
    "changed",
    [
        lambda layer: layer.float(),
        lambda layer: layer.to("meta"),
    ],
    ids=["float32", "another device"],
)
def test_only_bfloat16_on_a_cpu_is_widened(
    changed: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    layer = changed(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    widen(layer)
    assert type(layer) is torch.nn.Linear


def test_with_instructions_all_is_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "CPU_EMULATES", False)
    layer = torch.nn.Linear(6, 4, dtype=torch.bfloat16)
    widen(layer)
    assert type(layer) is torch.nn.Linear
    x = drawn(5, 6)
    assert torch.equal(product(x, layer.weight.mT), torch.matmul(x, layer.weight.mT))
    wanted = functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(linear(x, layer.weight, layer.bias), wanted)
    assert product_type(torch.bfloat16, CPU) == torch.bfloat16
    assert ModelRuntime(CPU, torch.bfloat16, "stream").plain_attention == "eager"


def gradient(model: PreTrainedModel) -> Tensor:
    """Of the mean log-prob, in one vector."""
    response_logprobs(model, speed_batch(), temperature=0.7).logprobs.mean().backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def with_lora(model: PreTrainedModel) -> None:
    add_adapter(model, LoraSection(rank=4), seed=0)


@pytest.mark.parametrize(
    ("attention", "change"),
    [
        ("stream", None),
        ("eager", None),
        ("sdpa", None),
        ("stream", use_checkpointing),
        pytest.param("stream", compile_layers, marks=pytest.mark.slow),  # over a minute
        ("stream", with_lora),
    ],
    ids=["stream", "eager", "sdpa", "checkpointing", "compiled", "lora"],
)
def test_a_policy_s_gradient_is_near_that_of_float32(
    folder: Path, attention: str, change: Callable[[PreTrainedModel], None] | None
) -> None:
    if change is compile_layers:
        torch.compiler.reset()
    runtime = replace(LOW, attention=attention)
    model = load_policy(folder, runtime)
    exact = load_policy(folder, replace(runtime, dtype=torch.float32))
    wide = [type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert set(wide) == {WideLinear}
    for one in (model, exact):
        if change is not None and (one is model or change is with_lora):
            change(one)
    found, wanted = gradient(model), gradient(exact)
    gap = float((found - wanted).norm() / wanted.norm())
    assert 1e-4 < gap < 0.03  # a bfloat16 has 8 bits: 0.004 of each number


def test_layers_are_told_what_they_give(folder: Path) -> None:
    """And are themselves again afterwards."""
    model = load_policy(folder, LOW)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    x = drawn(3, layer.in_features)  # type: ignore[arg-type]
    wanted = layer(x)
    wanted.sum().backward()
    grads = (x.grad.clone(), layer.weight.grad.clone())  # type: ignore[union-attr]
    x.grad = layer.weight.grad = None
    known = {"model.layers.0.mlp.up_proj": wanted.detach().flip(0)}
    with outputs_reused(model, known, torch.tensor([2, 1, 0])):
        found = layer(x)
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert torch.equal(x.grad, grads[0]) and torch.equal(layer.weight.grad, grads[1])  # type: ignore[arg-type]
    assert type(layer) is WideLinear


def test_reward_models_are_widened_and_saved_as_ever(folder: Path, tmp_path: Path) -> None:
    model = load_reward_model(folder, LOW, new_head=True)
    assert type(model.get_submodule("score")) is WideLinear
    model.save_pretrained(tmp_path)
    again = load_reward_model(tmp_path, LOW, new_head=False)
    own, other = model.state_dict(), again.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("packed", ["always", "never"])
def test_an_engine_answers_as_one_in_float32(folder: Path, packed: str) -> None:
    prompts = [[5, 9, 30], [8, 8]]
    params = SamplingParams(max_tokens=8, num_generations=4)

    def start(dtype: torch.dtype) -> TransformersEngine:
        config = TransformersEngineConfig(packed_weights=packed)  # type: ignore[arg-type]
        engine = TransformersEngine(config)
        engine.start(replace(make_setup(folder), dtype=dtype))
        return engine

    wide, exact = start(torch.bfloat16), start(torch.float32)
    kinds = {type(m).__name__ for m in wide._model.modules() if isinstance(m, torch.nn.Linear)}
    assert kinds == {"_PackedLinear" if packed == "always" else "WideLinear"}
    for prompt, group in zip(prompts, wide.generate(prompts, params), strict=True):
        for one in group:
            scored = exact.score([[*prompt, *one.token_ids]])[0][len(prompt) - 1 :]
            assert max(abs(a - b) for a, b in zip(scored, one.logprobs, strict=True)) < 0.06
    if packed == "always":
        assert packed_bytes(wide._model) == packed_bytes(exact._model)  # float32, both of them
        assert wide._model.lm_head.packed.dtype == torch.float32
    wide.close()
    exact.close()


def test_attention_of_padded_rows_is_not_by_emulated_products() -> None:
    section = ModelSection(dtype="bfloat16", device="cpu")
    assert ModelRuntime.from_config(section).plain_attention == "sdpa"
    assert (
        ModelRuntime.from_config(ModelSection(dtype="float32", device="cpu")).plain_attention
        == "eager"
    )


@pytest.mark.skipif(not wide_products._cpu_emulates(), reason="bfloat16 has instructions here")
def test_they_are_faster_than_torch_s() -> None:
    """Several times, so that a busy machine does not hide it."""
    torch.manual_seed(0)
    one, other = (drawn(512, 512).detach() for _ in range(2))

    def best(work: Callable[[Tensor, Tensor], Tensor]) -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            work(one, other)
            times.append(time.perf_counter() - began)
        return min(times)

    assert best(product) < best(torch.matmul)


@pytest.mark.parametrize(
    ("machine", "instructions", "onednn", "emulates"),
    [
        ("x86_64", True, True, False),
        ("x86_64", False, True, True),  # AVX-512 alone
        ("x86_64", False, False, True),
        ("aarch64", False, True, False),
        ("aarch64", False, False, True),
    ],
)
def test_who_emulates(
    machine: str,
    instructions: bool,
    onednn: bool,
    emulates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wide_products.platform, "machine", lambda: machine)  # type: ignore[attr-defined]
    monkeypatch.setattr(wide_products, "has_bfloat16_instructions", lambda: instructions)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert wide_products._cpu_emulates() == emulates
