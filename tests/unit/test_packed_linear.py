"""Weights that an engine keeps packed are the weights that it was given last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from posttrain.core.config.sections import LoraSection
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models import linear as packed_linear
from posttrain.core.models import linear as wide_products
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.linear import can_pack, packed_bytes, why_no_packing
from posttrain.core.models.loading import load_policy
from posttrain.core.models.lora import add_adapter
from posttrain.core.rollout.weight_sync import send_policy
from posttrain.core.types import SamplingParams
from posttrain.plugins.engines.transformers import TransformersEngine, TransformersEngineConfig
from tests.helpers.engines import make_setup

CPU = torch.device("cpu")
SEQUENCES = [[5, 9, 30, 41, 7], [8, 8, 61, 12, 90], [4, 20, 33]]
# Of log-probs near -5, whose sums are made in another order.
NOISE = {torch.bfloat16: 0.06, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=NOISE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    why_not = why_no_packing(found, CPU)
    if why_not is not None:
        pytest.skip(f"no weights are packed: {why_not}")
    return found


@pytest.fixture
def noise(dtype: torch.dtype) -> float:
    return NOISE[dtype]


@pytest.fixture
def packed(folder: Path, dtype: torch.dtype) -> Iterator[TransformersEngine]:
    yield from started(folder, dtype, "auto")


@pytest.fixture
def plain(folder: Path, dtype: torch.dtype) -> Iterator[TransformersEngine]:
    yield from started(folder, dtype, "never")


def started(
    folder: Path, dtype: torch.dtype, packed_weights: packed_linear.When
) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(TransformersEngineConfig(packed_weights=packed_weights))
    engine.start(replace(make_setup(folder), dtype=dtype))
    yield engine
    engine.close()


def runtime_of(engine: TransformersEngine) -> ModelRuntime:
    return ModelRuntime(CPU, engine._started().dtype, "eager")


def train(model: PreTrainedModel) -> None:
    """An optimizer step that moves log-probs by far more than noise."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    ids = torch.randint(4, 90, (4, 20), generator=torch.Generator().manual_seed(1))
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def gap(one: TransformersEngine, other: TransformersEngine) -> float:
    """Largest difference of their log-probs."""
    pairs = zip(one.score(SEQUENCES), other.score(SEQUENCES), strict=True)
    return max(abs(a - b) for rows in pairs for a, b in zip(*rows, strict=True))


def test_packed_layers_answer_as_plain_ones_after_every_sync(
    folder: Path, packed: TransformersEngine, plain: TransformersEngine, noise: float
) -> None:
    model = load_policy(folder, runtime_of(packed))
    assert hasattr(packed._model.lm_head, "packed")
    assert not hasattr(plain._model.lm_head, "packed")
    assert gap(packed, plain) < noise
    for version in (1, 2):
        before = plain.score(SEQUENCES)[0]
        train(model)
        for engine in (packed, plain):
            send_policy(engine, model, version)
        after = plain.score(SEQUENCES)[0]
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 5 * noise
        assert gap(packed, plain) < noise
    drawn = packed.generate([[5, 9], [8]], SamplingParams(max_tokens=6, num_generations=4))
    for prompt, group in zip(([5, 9], [8]), drawn, strict=True):
        for one in group:
            ids = [*prompt, *one.token_ids]
            scored = plain.score([ids])[0][len(prompt) - 1 :]
            assert max(abs(a - b) for a, b in zip(scored, one.logprobs, strict=True)) < noise


def test_a_weight_that_changed_is_never_answered_for_by_its_old_copy(
    folder: Path, packed: TransformersEngine, plain: TransformersEngine, noise: float
) -> None:
    before = plain.score(SEQUENCES)[0]
    with torch.no_grad():
        for engine in (packed, plain):
            for name, weight in engine._model.named_parameters():
                if "mlp" in name:
                    weight.mul_(-1)
    after = plain.score(SEQUENCES)[0]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 5 * noise
    assert gap(packed, plain) < noise


def test_an_adapter_goes_around_packed_layers(
    folder: Path, packed: TransformersEngine, plain: TransformersEngine, noise: float
) -> None:
    model = load_policy(folder, runtime_of(packed))
    add_adapter(model, LoraSection(rank=4), seed=1)
    before = packed.score(SEQUENCES)[0]
    train(model)
    for engine in (packed, plain):
        send_policy(engine, model, 1)
    after = packed.score(SEQUENCES)[0]
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 5 * noise
    assert gap(packed, plain) < noise


def test_auto_stops_at_the_limit(packed: TransformersEngine) -> None:
    model = packed._model
    held = packed_bytes(model)
    copies = [module.packed for module in model.modules() if hasattr(module, "packed")]
    assert held == sum(copy.numel() * copy.itemsize for copy in copies)
    assert can_pack(model, "auto")
    assert not can_pack(model, "never")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_linear, "MOST_BYTES", held - 1)
        assert not can_pack(model, "auto")
        assert can_pack(model, "always")


def test_only_products_of_onednn_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_packing(torch.float32, CPU) is None
    assert "on a CPU" in str(why_no_packing(torch.float64, CPU))
    assert "on a CPU" in str(why_no_packing(torch.bfloat16, torch.device("cuda")))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(wide_products, "CPU_EMULATES", False)
    assert "no bfloat16" in str(why_no_packing(torch.bfloat16, CPU))
    monkeypatch.setattr(wide_products, "CPU_EMULATES", True)
    assert why_no_packing(torch.bfloat16, CPU) is None  # they are float32's
