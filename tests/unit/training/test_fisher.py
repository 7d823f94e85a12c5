"""Fisher-vector products against a Fisher matrix that is written out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.exact_kl import kl_to_policy
from posttrain.core.training.natural_gradient import (
    Fisher,
    FlatParameters,
    WeightedTokens,
    sample_tokens,
)
from tests.helpers.rollouts import load_tiny, ragged_batch, sequence

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, layers=1, hidden=8, init_std=0.4)


def train_only(model: PreTrainedModel, *parts: str) -> PreTrainedModel:
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in parts))
    return model


def logits_of(model: PreTrainedModel, batch: RolloutBatch, row: int) -> Tensor:
    """Logits [n, V] at the sampling temperature, the sequence computed alone."""
    prompt, response = sequence(batch, row)
    logits: Tensor = model(torch.cat([prompt, response])[None]).logits[0]
    return logits[len(prompt) - 1 : -1] / TEMPERATURE


def explicit_fisher(model: PreTrainedModel, batch: RolloutBatch, weights: Tensor) -> Tensor:
    """[D, D]: sum over tokens of w J' (diag p - p p') J, one backward pass per logit."""
    params = [p for p in model.parameters() if p.requires_grad]
    total: Tensor | float = 0.0
    for row in range(len(batch)):
        for t, logits in enumerate(logits_of(model, batch, row)):
            if weights[row, t] == 0:
                continue
            rows = torch.autograd.grad(
                logits,
                params,
                torch.eye(len(logits)).to(logits),
                is_grads_batched=True,
                retain_graph=True,
            )
            jacobian = torch.cat([r.reshape(len(logits), -1) for r in rows], dim=1)
            p = torch.softmax(logits.detach(), dim=-1)
            total = (
                total + weights[row, t] * jacobian.T @ (torch.diag(p) - p[:, None] * p) @ jacobian
            )
    assert isinstance(total, Tensor)
    return total


@pytest.mark.parametrize(
    "trained",
    [("norm",), ("q_proj", "k_proj", "norm"), ("lm_head", "embed")],
    ids=["norms", "attention", "tied head"],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_product_is_that_of_the_written_out_matrix(
    model_dir: Path, trained: tuple[str, ...], attention: str
) -> None:
    model = train_only(load_tiny(model_dir), *trained)
    model.set_attn_implementation(attention)
    batch = ragged_batch([4, 2], group_size=2)
    weights = masked_weights(batch)
    matrix = explicit_fisher(model, batch, weights)
    fisher = Fisher(model, halves(batch, weights), temperature=TEMPERATURE)
    for seed in range(3):
        vector = torch.randn(
            matrix.shape[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        product = matrix @ vector
        error = float((fisher(vector) - product).norm() / product.norm())
        assert error < 1e-5


def masked_weights(batch: RolloutBatch) -> Tensor:
    """Weights that differ from token to token; 0 at every third and where there is no loss."""
    number = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    return torch.where(batch.mask.bool() & (number % 3 != 0), 0.1 + 0.01 * number, 0.0).double()


def halves(batch: RolloutBatch, weights: Tensor) -> list[WeightedTokens]:
    rows = torch.arange(len(batch)).chunk(2)
    return [WeightedTokens(batch.select(part), weights[part]) for part in rows]


def test_it_is_the_curvature_of_the_kl(model_dir: Path) -> None:
    """KL(old || theta + h v) = h^2/2 v'F v + O(h^3)."""
    model, batch = load_tiny(model_dir), ragged_batch([4, 2], group_size=2)
    weights = masked_weights(batch)
    flat = FlatParameters([p for p in model.parameters() if p.requires_grad])
    start = flat.read()
    vector = torch.randn(
        start.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    with torch.no_grad():
        before = [logits_of(model, batch, row) for row in range(len(batch))]
    curvature = float(
        vector @ Fisher(model, halves(batch, weights), temperature=TEMPERATURE)(vector)
    )
    found = []
    for h in (1e-3, -1e-3):
        flat.write(start + h * vector)
        with torch.no_grad():
            kls = [
                kl_to_policy(logits_of(model, batch, row), old) for row, old in enumerate(before)
            ]
        found.append(sum(float((weights[row, : len(kl)] * kl).sum()) for row, kl in enumerate(kls)))
    assert sum(found) / 2 == pytest.approx(0.5e-6 * curvature, rel=1e-3)


def test_it_is_symmetric_positive_semi_definite_and_kills_shifts_of_all_logits(
    model_dir: Path,
) -> None:
    model = train_only(load_tiny(model_dir), "lm_head", "embed", "norm", "proj")
    batch = ragged_batch([4, 2], group_size=2)
    fisher = Fisher(model, halves(batch, masked_weights(batch)), temperature=TEMPERATURE)
    size = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, size, generator=generator, dtype=torch.float64)
    assert float(u @ fisher(v)) == pytest.approx(float(v @ fisher(u)), rel=1e-5)
    assert float(u @ fisher(u)) > 0 and float(v @ fisher(v)) > 0


def test_a_frozen_backbone_leaves_the_softmax_regression_of_the_head(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, layers=1, hidden=8, tied=False, init_std=0.4)
    model = train_only(load_tiny(folder), "lm_head")
    batch = ragged_batch([3], group_size=1)
    weights = batch.mask.double()
    matrix = explicit_fisher(model, batch, weights)
    head = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    shift = torch.ones_like(head).flatten().double()  # the same for all logits: no other policy
    fisher = Fisher(model, [WeightedTokens(batch, weights)], temperature=TEMPERATURE)
    torch.testing.assert_close(fisher(shift), torch.zeros_like(shift), rtol=0, atol=1e-9)
    vector = torch.randn(
        shift.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    torch.testing.assert_close(fisher(vector), matrix @ vector, rtol=1e-5, atol=1e-7)


def test_flat_parameters_are_restored_bit_for_bit(model_dir: Path) -> None:
    model = load_tiny(model_dir, torch.float32)
    flat = FlatParameters(list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    vector = flat.read()
    flat.write(vector + 1)
    assert not torch.equal(before[0], next(iter(model.parameters())))
    flat.write(vector)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
    parts = flat.join([None, *flat.split(vector)[1:]])
    assert not parts[: before[0].numel()].any()
    assert torch.equal(parts[before[0].numel() :], vector[before[0].numel() :])


def test_a_sample_of_tokens_keeps_their_share_and_the_sum_of_all() -> None:
    batch = ragged_batch([4, 2, 3], group_size=3)
    weights = masked_weights(batch)
    tokens = halves(batch, weights)
    count, total = int((weights > 0).sum()), float(weights.sum())

    def draw(fraction: float, seed: int) -> list[WeightedTokens]:
        return sample_tokens(tokens, fraction, torch.Generator().manual_seed(seed))

    for fraction, kept in ((1.0, count), (0.3, math.ceil(0.3 * count)), (1e-9, 1)):
        sample = draw(fraction, 0)
        assert sum(int((part.weights > 0).sum()) for part in sample) == kept
        assert sum(float(part.weights.sum()) for part in sample) == pytest.approx(total)
        assert all((part.weights > 0).any(dim=1).all() for part in sample)
    everything = torch.cat([part.weights for part in draw(1.0, 0)])
    torch.testing.assert_close(everything, weights[(weights > 0).any(dim=1)])
    # Every token is drawn about as often as any other, at its own weight.
    times = torch.zeros_like(weights)
    for seed in range(300):
        for part in draw(0.5, seed):
            rows = part.batch.seq_id
            assert torch.equal(part.weights > 0, (part.weights > 0) & (weights[rows] > 0))
            times[rows] += part.weights > 0
    shares = times[weights > 0] / 300
    assert float(shares.min()) > 0.35 and float(shares.max()) < 0.65
