"""Which errors let a slower way be taken: those of a model's own code, and none of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from posttrain.core.batch import RolloutBatch
from posttrain.core.errors import ResourceError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.paths import Paths
from posttrain.core.training.agreement import EngineCheck, Passes, raised_in, settle


@pytest.fixture
def model(tmp_path: Path) -> Any:  # Any: transformers' model classes are not typed
    found = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "m"))
    found.posttrain_paths = Paths(checked=False, plain=found.config._attn_implementation)
    return found


def ours(batch: RolloutBatch) -> Tensor:
    return torch.zeros(2)[{"rows": 0}["row"]]  # a fault of ours: KeyError


def test_a_fault_of_our_own_is_raised_as_it_is(model: Any) -> None:
    with pytest.raises(KeyError, match="row"):
        settle(Passes(model, ours, ours))
    assert not model.posttrain_paths.notes


def test_a_pass_that_fails_in_the_model_is_not_taken(model: Any) -> None:
    def within(batch: RolloutBatch) -> Tensor:
        found: Tensor = model(input_ids=None).logits
        return found

    with pytest.raises(ResourceError, match="cannot be used here: the pass fails \\("):
        settle(Passes(model, within, within))
    assert model.posttrain_paths.notes


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_model_whose_own_pass_gives_nan_is_refused_in_a_sentence(
    model: Any, weight: float
) -> None:
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(weight)
        model.get_output_embeddings().weight.fill_(weight)
    with pytest.raises(ResourceError, match="log-probs that are not numbers .NaN.: its weights"):
        settle(Passes(model, ours, ours))


class Broken(nn.Module):
    """A layer that fails."""

    def forward(self, *inputs: object, **more: object) -> Tensor:
        raise IndexError("of the model's own")


def test_a_model_whose_own_pass_fails_is_refused_in_a_sentence(model: Any) -> None:
    model.get_decoder().layers[0] = Broken()
    with pytest.raises(ResourceError, match="its forward pass fails .IndexError: of the model's"):
        settle(Passes(model, ours, ours))


def test_an_engine_s_faults_are_told_from_its_model_s(model: Any) -> None:
    check = EngineCheck(model, torch.float32)

    def of(pass_: Callable[[], object]) -> str | None:
        def generate(prompts: object) -> Any:
            return pass_()

        return check.problem(generate, lambda rows: [[]])

    with pytest.raises(ZeroDivisionError):
        of(lambda: 1 // 0)
    assert (of(lambda: model(input_ids=None)) or "").startswith("the pass fails (")


def test_where_an_error_was_raised() -> None:
    layer, other = nn.Sequential(Broken()), nn.Sequential(Broken())
    with pytest.raises(IndexError) as found:
        layer(1)
    assert raised_in(layer, found.value) and not raised_in(other, found.value)
