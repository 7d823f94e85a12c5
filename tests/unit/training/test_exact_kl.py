"""The exact KL over the vocabulary: equal to all logits at once, in value and gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.models.paths import OutputHead
from posttrain.core.training.exact_kl import kl_to_policy, response_exact_kl, token_kl
from posttrain.core.training.forward import project_states, response_states
from tests.helpers.rollouts import (
    assert_same_gradient,
    gradient_of,
    load_tiny,
    ragged_batch,
    sequence,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "a", seed=0), make_tiny_model(folder / "b", seed=1)


def reverse_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL(policy || other) [n]."""
    mine = torch.log_softmax(logits, dim=-1)
    return (mine.exp() * (mine - torch.log_softmax(other, dim=-1))).sum(dim=-1)


def plain_logits(model: PreTrainedModel, batch: RolloutBatch, row: int) -> Tensor:
    """Logits [n, V] that predict the response of one row, which is computed alone."""
    prompt, response = sequence(batch, row)
    logits: Tensor = model(torch.cat([prompt, response])[None]).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_the_kl_of_all_logits_and_its_gradient(
    models: tuple[Path, Path], temperature: float
) -> None:
    policy, reference = (load_tiny(path) for path in models)
    batch = ragged_batch([5, 9, 3], group_size=2)
    weights = torch.randn(batch.response_ids.shape, dtype=torch.float64)
    plain = torch.zeros(batch.response_ids.shape, dtype=torch.float64)
    for row in range(len(batch)):
        mine, other = (plain_logits(m, batch, row) / temperature for m in (policy, reference))
        plain[row, : mine.shape[0]] = reverse_kl(mine, other.detach())
    chunked = response_exact_kl(policy, reference, batch, temperature, reverse_kl)
    torch.testing.assert_close(chunked, plain, rtol=0, atol=1e-5)
    assert float(chunked.detach().max()) > 0.1
    gradients = []
    for kl in (chunked, plain):
        policy.zero_grad()
        (kl * weights).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append(gradient_of(policy))
    assert_same_gradient(gradients[0], gradients[1])
    assert all(p.grad is None for p in reference.parameters())


def test_a_forward_pass_that_was_made_serves_log_probs_and_kl(models: tuple[Path, Path]) -> None:
    policy, reference = (load_tiny(path, torch.float32) for path in models)
    batch = ragged_batch([4, 6], group_size=2)
    states = response_states(policy, batch, include_last=False)
    shape = batch.response_ids.shape
    project_states(policy, states, shape, temperature=1.0)
    shared = response_exact_kl(policy, reference, batch, 1.0, reverse_kl, states=states)
    assert torch.equal(shared, response_exact_kl(policy, reference, batch, 1.0, reverse_kl))
    assert not shared[~batch.response_mask.bool()].any()
    same = response_exact_kl(policy, policy, batch, 1.0, reverse_kl)
    assert not same.any()


@pytest.mark.parametrize("kl", [reverse_kl, kl_to_policy])
def test_chunks_change_neither_value_nor_gradient(kl: object) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    other = torch.randn(7, 5, dtype=torch.float64), OutputHead(torch.randn(11, 5).double())

    def chunked(h: Tensor, w: Tensor, chunk: int = 3) -> Tensor:
        return token_kl(h, OutputHead(w), *other, kl, temperature=0.7, chunk=chunk)  # type: ignore[arg-type]

    torch.testing.assert_close(chunked(hidden, weight), chunked(hidden, weight, chunk=7))
    assert torch.autograd.gradcheck(chunked, (hidden, weight))


def test_bfloat16_gradients_of_many_chunks_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(256, 4).to(torch.bfloat16)
    weight = torch.randn(6, 4).to(torch.bfloat16)
    other_head = OutputHead(torch.randn(6, 4).to(torch.bfloat16))
    other = torch.randn(256, 4).to(torch.bfloat16), other_head
    found = []
    for chunk in (256, 1):
        w = weight.clone().requires_grad_()
        kl = token_kl(hidden, OutputHead(w), *other, reverse_kl, temperature=1.0, chunk=chunk)
        kl.sum().backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        found.append(w.grad.float())
    scale = float(found[0].abs().max())
    # One rounding at the end costs 2^-9; 256 roundings on the way would cost several times that.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=scale * 2**-7)


def test_kl_to_the_policy_is_the_old_policys_expectation() -> None:
    old, new = torch.tensor([[0.0, 1.0, -1.0]]), torch.tensor([[0.5, 0.0, 0.3]])
    p, q = torch.softmax(old, dim=-1), torch.softmax(new, dim=-1)
    torch.testing.assert_close(kl_to_policy(new, old), (p * (p / q).log()).sum(dim=-1))
    impossible = torch.tensor([[0.0, 0.0, -torch.inf]])
    torch.testing.assert_close(
        kl_to_policy(torch.zeros(1, 3), impossible), torch.tensor([1.5]).log()
    )
