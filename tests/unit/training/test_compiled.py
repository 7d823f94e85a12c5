"""Layers under torch.compile give the gradients of plain ones, and are compiled once."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import ModelSection
from posttrain.core.errors import ResourceError
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.layers import compile_layers
from posttrain.core.training.forward import response_states
from posttrain.core.training.natural_gradient import Fisher, WeightedTokens
from tests.helpers.speed import (
    SPEED_FAMILIES,
    Options,
    assert_equal_gradients,
    gradients,
    plain_gradients,
    speed_batch,
    speed_model,
)

ALONE = Options(compiled=True)
STREAM = Options(stream=True, compiled=True)
ALL = Options(True, True, True, True, 2, compiled=True)
# Compiling takes about a minute a case: `make test` has one.
CASES = [
    pytest.param(
        family,
        replace(options, lora=lora),
        id=f"{family}-{'lora' if lora else 'weights'}-{name}",
        marks=[] if (family, lora, name) == ("llama", False, "stream") else pytest.mark.slow,
    )
    for family in SPEED_FAMILIES
    for lora in (False, True)
    for name, options in (("alone", ALONE), ("stream", STREAM), ("all", ALL))
]


def graphs() -> int:
    """How many were compiled in this process."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_the_gradient_is_the_plain_one(family: str, options: Options) -> None:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]  # of the case before, which may be alike
    wanted = plain_gradients(family, Options(lora=options.lora))
    began = graphs()
    assert_equal_gradients(gradients(family, options), wanted)
    assert graphs() > began, "something was compiled"


def test_other_shapes_are_not_compiled_again() -> None:
    model = speed_model("llama", STREAM)
    batch = speed_batch()

    def take(part: RolloutBatch) -> None:
        hidden, _, _, _ = response_states(model, part, include_last=False)
        hidden.sum().backward()

    take(batch)
    began = graphs()
    assert began > 0
    for rows in ([0, 1, 2, 3], [3, 4, 5], [1, 2, 6], [0, 3, 5, 6]):
        take(batch.select(torch.tensor(rows)))
    assert graphs() == began


def test_a_trust_region_s_products_are_those_of_plain_layers() -> None:
    batch = speed_batch()
    weights = batch.mask / batch.mask.sum()

    def product(compiled: bool) -> torch.Tensor:
        model = speed_model("llama", Options(stream=True))
        if compiled:
            compile_layers(model)
        fisher = Fisher(model, [WeightedTokens(batch, weights)], temperature=0.8)
        count = sum(p.numel() for p in model.parameters())
        draw = torch.Generator().manual_seed(3)
        return fisher(torch.randn(count, generator=draw))

    wanted = product(False)
    assert (product(True) - wanted).norm() <= 1e-5 * wanted.norm()


def test_weights_keep_their_names() -> None:
    model = speed_model("llama", Options())
    names = [name for name, _ in model.named_parameters()]
    compile_layers(model)
    assert [name for name, _ in model.named_parameters()] == names


def test_a_missing_compiler_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    section = ModelSection(compile=True, device="cpu")
    assert ModelRuntime.from_config(section).device.type == "cpu"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ResourceError, match=r"'no-such-compiler' is not on the path: install it"):
        ModelRuntime.from_config(section)
    ModelRuntime.from_config(ModelSection(device="cpu"))  # nobody asked for one
    monkeypatch.setenv("CXX", sys.executable)
    ModelRuntime.from_config(section)


def test_missing_headers_are_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ResourceError, match=r"Python\.h does not exist: install them"):
        ModelRuntime.from_config(ModelSection(compile=True, device="cpu"))
