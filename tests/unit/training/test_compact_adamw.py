"""AdamW in less memory: 8-bit moments, and bfloat16 weights that are rounded at random."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from posttrain.core.config.sections import ModelSection, OptimizerSection
from posttrain.core.errors import ConfigError, ResourceError, RunError
from posttrain.core.training import compact_adamw
from posttrain.core.training.checkpoint import LoopState, load_checkpoint, save_checkpoint
from posttrain.core.training.compact_adamw import round_stochastically, why_missing
from posttrain.core.training.optim import MasterOptimizer
from posttrain.pipelines.run.checks import check_training
from tests.helpers.plugins import MANAGER

Rounding = Literal["masters", "stochastic"]
Moments = Literal["float32", "8bit"]
needs_library = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
COMPACT = [
    pytest.param("stochastic", "float32", id="stochastic"),
    pytest.param("masters", "8bit", id="8bit", marks=needs_library),
    pytest.param("stochastic", "8bit", id="both", marks=needs_library),
]


def section(rounding: Rounding, moments: Moments, rate: float = 3e-3) -> OptimizerSection:
    return OptimizerSection(learning_rate=rate, rounding=rounding, moments=moments)


def tiny_model() -> nn.Module:
    """Names the next token. Every matrix is large enough for 8-bit moments; the biases are not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Embedding(64, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        return nn.Sequential(*layers).to(torch.bfloat16)


def learn(module: nn.Module, optimizer: MasterOptimizer, steps: int, start: int = 0) -> list[float]:
    """Loss of each step: two micro-batches of tokens, each followed by one of the next three."""
    losses = []
    for step in range(start, start + steps):
        numbers = torch.Generator().manual_seed(step)
        first = torch.randint(64, (128,), generator=numbers)
        then = (first + torch.randint(1, 4, (128,), generator=numbers)) % 64
        total = 0.0
        for ids, labels in zip(first.split(64), then.split(64), strict=True):
            loss = nn.functional.cross_entropy(module(ids).float(), labels) / 2
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("rounding", "moments"),
    [
        pytest.param("stochastic", "float32", id="stochastic", marks=pytest.mark.slow),
        pytest.param("masters", "8bit", id="8bit", marks=[needs_library, pytest.mark.slow]),
        pytest.param("stochastic", "8bit", id="both", marks=needs_library),
    ],
)
def test_it_learns_what_float32_masters_and_moments_learn(
    rounding: Rounding, moments: Moments
) -> None:
    """The last losses are within 1 % of each other; of 4.2 nats at first, 1.1 cannot be learned."""
    found = []
    for how in (section("masters", "float32", 1e-2), section(rounding, moments, 1e-2)):
        model = tiny_model()
        found.append(learn(model, MasterOptimizer(model, how, 1000, seed=3), 120))
    full, compact = (sum(losses[-20:]) / 20 for losses in found)
    assert compact < 1.3 < 4 < found[1][0]
    assert compact == pytest.approx(full, rel=0.01)


@needs_library
def test_moments_of_8_bits_are_those_of_the_library_s_own_optimizer() -> None:
    import bitsandbytes

    numbers = torch.Generator().manual_seed(0)
    # More than one part of the smaller size below, blocks that are not full, and a small one.
    shapes = [(96, 64), (5001,), (7, 9)]
    ours, theirs = (
        [nn.Parameter(torch.linspace(-1, 1, torch.Size(s).numel()).view(s)) for s in shapes]
        for _ in range(2)
    )
    how = OptimizerSection(learning_rate=0.01, weight_decay=0.1, moments="8bit")
    mine = compact_adamw.CompactAdamW(ours, how, 0)
    other = bitsandbytes.optim.AdamW8bit(theirs, lr=0.01, weight_decay=0.1)  # type: ignore[attr-defined]
    for _ in range(5):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn(left.shape, generator=numbers)
            right.grad = left.grad.clone()
        mine.step()
        other.step()
    for left, right in zip(ours[:2], theirs[:2], strict=True):
        assert mine.state[left]["exp_avg"].dtype == torch.uint8
        assert torch.equal(mine.state[left]["exp_avg"], other.state[right]["state1"])
        assert torch.equal(mine.state[left]["exp_avg_sq_scale"], other.state[right]["absmax2"])
        assert torch.equal(left, right)
    # The small one is in float32 on both sides, by torch's AdamW on ours.
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-5, atol=1e-6)


@needs_library
def test_working_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for part in (compact_adamw.PART, 4 * 256):
        monkeypatch.setattr(compact_adamw, "PART", part)
        param = nn.Parameter(torch.linspace(-1, 1, 5001))
        optimizer = compact_adamw.CompactAdamW([param], section("masters", "8bit"), 0)
        numbers = torch.Generator().manual_seed(0)
        for _ in range(3):
            param.grad = torch.randn(param.shape, generator=numbers)
            optimizer.step()
        ends.append(param.detach().clone())
    assert torch.equal(*ends)


def test_updates_below_a_bfloat16_step_are_not_lost_on_average() -> None:
    """25 updates of 1e-4 on weights of 1: half a step is 2e-3, so rounding to nearest keeps 1."""
    module = nn.Linear(400, 400, bias=False).to(torch.bfloat16)
    nn.init.ones_(module.weight)
    optimizer = MasterOptimizer(module, section("stochastic", "float32", 1e-4), 100, seed=1)
    for _ in range(25):
        module.weight.backward(torch.ones_like(module.weight))  # type: ignore[no-untyped-call]
        optimizer.step()
    moved = module.weight.detach().double() - 1
    # One update's rounding has a variance below 2^-8 x 1e-4; below 1 a step is 2^-8.
    error = (25 * 2.0**-8 * 1e-4 / moved.numel()) ** 0.5
    assert abs(float(moved.mean()) + 25e-4) < 4 * error
    assert error < 2e-5


def test_rounding_is_to_a_neighbour_and_right_on_average() -> None:
    chance = torch.Generator().manual_seed(0)
    value = 1 + 2.0**-7 / 4  # a quarter of the way from 1 to the next bfloat16
    for sign in (1.0, -1.0):
        rounded = round_stochastically(torch.full((100_000,), sign * value), chance)
        assert rounded.dtype == torch.bfloat16
        assert set(rounded.tolist()) == {sign, sign * (1 + 2.0**-7)}
        assert float((rounded != sign).double().mean()) == pytest.approx(0.25, abs=0.006)
    kept = torch.tensor([0.0, 1.5, -2.0, float("inf"), float("-inf")])
    assert torch.equal(round_stochastically(kept, chance).float(), kept)
    odd = torch.tensor([0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(odd, chance).isnan().all()


def trained(seed: int, steps: int = 6) -> list[Tensor]:
    model = tiny_model()
    learn(model, MasterOptimizer(model, section("stochastic", "float32"), 100, seed=seed), steps)
    return [param.detach().clone() for param in model.parameters()]


def test_the_seed_decides_the_noise_and_nothing_else_does() -> None:
    one = trained(5)
    torch.manual_seed(99)  # the process's own generator has no part in it
    assert all(map(torch.equal, one, trained(5)))
    assert not all(map(torch.equal, one, trained(6)))


@pytest.mark.parametrize(("rounding", "moments"), COMPACT)
def test_a_resumed_run_continues_bit_for_bit(
    rounding: Rounding, moments: Moments, tmp_path: Path
) -> None:
    how = section(rounding, moments)
    models = [tiny_model() for _ in range(2)]
    one, two = (MasterOptimizer(model, how, 100, seed=3) for model in models)
    learn(models[0], one, 3)
    save_checkpoint(tmp_path / "step-000003", one, LoopState(3, {}, []))
    learn(models[0], one, 3, start=3)
    load_checkpoint(tmp_path / "step-000003", two)
    learn(models[1], two, 3, start=3)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)
    for left, right in zip(one._masters, two._masters, strict=True):
        assert torch.equal(left, right)
        kept = two.optimizer.state[right]
        for name, value in one.optimizer.state[left].items():
            assert kept[name].dtype == value.dtype and torch.equal(kept[name], value)


def test_a_checkpoint_of_another_precision_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = MasterOptimizer(model, section("stochastic", "float32"), 100)
    save_checkpoint(tmp_path / "step-000000", optimizer, LoopState(0, {}, []))
    other = MasterOptimizer(tiny_model(), section("masters", "float32"), 100)
    with pytest.raises(RunError, match="keeps weights: stochastic.*masters.*--fresh"):
        load_checkpoint(tmp_path / "step-000000", other)


@pytest.mark.parametrize(
    ("dtype", "rounding", "moments", "stated"),
    [
        (torch.float32, "masters", "float32", 16.0),
        (torch.bfloat16, "masters", "float32", 18.0),
        (torch.bfloat16, "stochastic", "float32", 14.0),
        pytest.param(torch.float32, "masters", "8bit", 10.0, marks=needs_library),
        pytest.param(torch.bfloat16, "masters", "8bit", 12.0, marks=needs_library),
        pytest.param(torch.bfloat16, "stochastic", "8bit", 8.0, marks=needs_library),
    ],
)
def test_memory_is_what_the_documentation_states(
    dtype: torch.dtype, rounding: Rounding, moments: Moments, stated: float
) -> None:
    """Bytes for each weight: weights, float32 gradients, masters and moments, before a step ends.

    8-bit moments have two float32 scales for each 256 weights (0.03 bytes) on top.
    """
    module = nn.Linear(256, 256, bias=False).to(dtype)
    optimizer = MasterOptimizer(module, section(rounding, moments), 100)
    for _ in range(2):
        module.weight.backward(torch.ones_like(module.weight))  # type: ignore[no-untyped-call]
        optimizer.step()
    module.weight.backward(torch.ones_like(module.weight))  # type: ignore[no-untyped-call]
    tensors = [module.weight, *optimizer._masters]
    tensors += [t.grad for t in tensors if t.grad is not None]
    for state in optimizer.optimizer.state.values():
        tensors += [value for name, value in state.items() if name != "step"]
    held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    extra = 8 / 256 if moments == "8bit" else 0.0
    assert sum(held.values()) / module.weight.numel() == pytest.approx(stated + extra)
    docs = Path(__file__).parents[3] / "docs" / "performance.md"
    name = str(dtype).removeprefix("torch.")
    kept = rounding if dtype == torch.bfloat16 else "no masters needed"
    assert f"| {name} | {kept} | {moments} | {stated:g} |" in docs.read_text()


def test_gradients_add_up_in_float32_without_masters() -> None:
    module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    optimizer = MasterOptimizer(module, section("stochastic", "float32"), 10)
    for value in (1.0, 2.0**-10):  # in bfloat16 the sum would be 1
        module.weight.backward(torch.full_like(module.weight, value))  # type: ignore[no-untyped-call]
    assert module.weight.grad is not None
    assert torch.equal(module.weight.grad, torch.full((8, 8), 1.0 + 2.0**-10))
    optimizer.zero_grad()
    optimizer.fill_gradients()
    report = optimizer.step()
    assert report.grad_norm == 0.0 and not report.skipped


def test_clipping_is_of_the_float32_gradient() -> None:
    module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    optimizer = MasterOptimizer(module, section("stochastic", "float32"), 10)
    module.weight.backward(torch.full_like(module.weight, 2.0))  # type: ignore[no-untyped-call]
    report = optimizer.step()
    assert report.grad_norm == pytest.approx(16.0) and report.grad_clipped
    moment = optimizer.optimizer.state[optimizer._masters[0]]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((8, 8), 0.1 * 2.0 / 16.0))


def test_a_closed_optimizer_leaves_the_module_as_it_was() -> None:
    module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    MasterOptimizer(module, section("stochastic", "float32"), 10).close()
    module.weight.backward(torch.ones_like(module.weight))  # type: ignore[no-untyped-call]
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.bfloat16


def test_float32_weights_are_not_rounded_at_random() -> None:
    with pytest.raises(ConfigError, match=r"trained weights are float32.*model.dtype: bfloat16"):
        MasterOptimizer(nn.Linear(2, 2), section("stochastic", "float32"), 10)


def test_without_the_package_8_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"bitsandbytes: pip install 'posttrain\[low-memory\]'"):
        MasterOptimizer(nn.Linear(2, 2), section("masters", "8bit"), 10)


@pytest.mark.parametrize("place", ["optimizer", "critic"])
def test_a_missing_package_stops_a_run_before_it_starts(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wanted, plain = section("masters", "8bit"), section("masters", "float32")
    stages = {
        "evaluate": SimpleNamespace(),
        "rl": SimpleNamespace(
            optimizer=wanted if place == "optimizer" else plain,
            critic=SimpleNamespace(optimizer=wanted) if place == "critic" else None,
        ),
    }
    resolved: Any = SimpleNamespace(
        config=SimpleNamespace(stages=stages, model=ModelSection(source="m"))
    )
    where = "rl" if place == "optimizer" else "rl.critic"
    with pytest.raises(ResourceError, match=rf"stages\.{where}: optimizer.moments.*pip install"):
        check_training(resolved, MANAGER)
