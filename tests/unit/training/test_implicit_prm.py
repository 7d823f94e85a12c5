"""The implicit process reward model: its rewards, its update however that is split, and that it
learns to tell right answers from wrong ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.sections import OptimizerSection
from posttrain.core.errors import RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.training.checkpoint import LoopState, load_checkpoint, save_checkpoint
from posttrain.core.training.implicit_prm import ImplicitPrm, PrmSettings
from posttrain.core.training.optim import MasterOptimizer
from tests.helpers.rollouts import assert_same_gradient, load_tiny, ragged_batch, sequence

BETA, TAU = 0.3, 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.2)


def make_prm(folder: Path, micro: int = 4, rate: float = 1e-3, minis: int = 1) -> ImplicitPrm:
    model = load_tiny(folder)
    section = OptimizerSection(learning_rate=rate, max_grad_norm=None)
    settings = PrmSettings(
        beta=BETA,
        epochs=1,
        num_mini_batches=minis,
        micro_batch_size=micro,
        temperature=TAU,
        seed=0,
    )
    return ImplicitPrm(model, MasterOptimizer(model, section, 100), settings)


def judged(prm: ImplicitPrm, acc: list[float]) -> RolloutBatch:
    """Responses with the log-probs of the model before it learns, and with verdicts."""
    batch = ragged_batch([5, 9, 3], group_size=2)
    zero = batch.with_columns(ref_logprobs=torch.zeros_like(batch.rollout_logprobs))
    reference = prm.rewards(zero) / BETA
    return batch.with_columns(ref_logprobs=reference, acc=torch.tensor(acc))


ACC = [1.0, 0.0, torch.nan, 1.0, 0.25, 0.0]


def gradient(prm: ImplicitPrm, batch: RolloutBatch) -> list[Tensor]:
    prm.optimizer.close()
    of_rows = batch.response_mask.bool().any(dim=1) & ~batch.column("acc").isnan()
    prm._accumulate(batch, of_rows)
    held = [p.grad.clone() for p in prm.model.parameters() if p.grad is not None]
    prm.model.zero_grad()
    return held


@pytest.mark.parametrize("micro", [1, 4, 6])
def test_the_gradient_is_that_of_one_sequence_at_a_time(folder: Path, micro: int) -> None:
    prm = make_prm(folder, micro)
    batch = judged(prm, ACC)
    with torch.no_grad():  # away from the reference, where all logits are 0
        for p in prm.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    got = gradient(prm, batch)
    rewards = prm.rewards(batch)
    for row, verdict in enumerate(ACC):
        prompt, response = sequence(batch, row)
        logits = prm.model(torch.cat([prompt, response])[None]).logits[0] / TAU
        said = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, response[:, None])
        own = BETA * (said[:, 0] - batch.column("ref_logprobs")[row, : len(response)])
        held = rewards[row, : len(response)].to(own)
        torch.testing.assert_close(held, own.detach(), rtol=0, atol=1e-5)
        assert not rewards[row, len(response) :].any()
        if verdict == verdict:  # a number
            chance = torch.sigmoid(own.sum())
            loss = -(verdict * chance.log() + (1 - verdict) * (1 - chance).log())
            (loss / 5).backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad.clone() for p in prm.model.parameters() if p.grad is not None]
    assert_same_gradient(got, wanted)
    assert max(float(grad.abs().max()) for grad in got) > 1e-3


def test_it_learns_verdicts_and_the_first_rewards_are_0(folder: Path) -> None:
    prm = make_prm(folder, rate=3e-3, minis=3)
    batch = judged(prm, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    assert prm.rewards(batch).abs().max() < 1e-6
    metrics = [prm.update(batch, step) for step in range(1, 31)]
    assert metrics[0]["loss/prm"] == pytest.approx(0.6931, abs=0.1)
    assert metrics[-1]["loss/prm"] < 0.3 and metrics[-1]["prm/accuracy"] == 1.0
    rewards = prm.rewards(batch).sum(dim=1)
    assert torch.equal(rewards > 0, batch.column("acc") > 0.5)


def test_without_a_verdict_there_is_no_step(folder: Path) -> None:
    prm = make_prm(folder)
    batch = judged(prm, [torch.nan] * 6)
    before = [p.clone() for p in prm.model.parameters()]
    assert prm.update(batch, 1) == {}
    assert all(torch.equal(a, b) for a, b in zip(before, prm.model.parameters(), strict=True))
    assert prm.optimizer.step_count == 0


def test_it_continues_from_a_checkpoint_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    policy, prm, other = (make_prm(folder) for _ in range(3))
    batch = judged(prm, [1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    prm.update(batch, 1)
    state, place = LoopState(1, {}, []), tmp_path / "step-000001"
    save_checkpoint(place, policy.stored, state, {"implicit_prm": prm.stored})
    load_checkpoint(place, policy.stored, {"implicit_prm": other.stored})
    for each in (prm, other):
        each.update(batch, 2)
    assert torch.equal(prm.rewards(batch), other.rewards(batch))
    load_checkpoint(place, policy.stored)  # of the policy alone, by who compares steps
    save_checkpoint(tmp_path / "step-000002", policy.stored, state)
    with pytest.raises(RunError, match="has no process reward model, but the stage has one"):
        load_checkpoint(tmp_path / "step-000002", policy.stored, {"implicit_prm": other.stored})
