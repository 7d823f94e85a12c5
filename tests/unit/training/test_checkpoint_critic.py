"""Checkpoints of a loop with a critic: both optimizers, or none, in one rename."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from posttrain.core.config.sections import OptimizerSection
from posttrain.core.errors import RunError
from posttrain.core.training.checkpoint import (
    LoopState,
    complete_checkpoints,
    load_checkpoint,
    read_step,
    save_checkpoint,
)
from posttrain.core.training.optim import MasterOptimizer

STATE = LoopState(
    step=3,
    parts={
        "controller": {"coef": 0.5},
        "estimator": {"mean": 0.25},
        "policy_loss/ppo_penalty": {"beta": 2.0},
        "critic": {"left": 1.0},
    },
    history=[{"step": 1.0}],
)


def make_optimizer(seed: int, width: int = 3) -> MasterOptimizer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Linear(width, 2).to(torch.bfloat16)
    return MasterOptimizer(module, OptimizerSection(learning_rate=0.1), 10)


def train(optimizer: MasterOptimizer, steps: int) -> None:
    for step in range(steps):
        for param in optimizer._params:
            param.backward(torch.full_like(param, 1.0 + step))  # type: ignore[no-untyped-call]
        optimizer.step()


def assert_equal(left: MasterOptimizer, right: MasterOptimizer) -> None:
    assert left.step_count == right.step_count
    for one, other in zip(left._masters, right._masters, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(left._params, right._params, strict=True):
        assert torch.equal(one, other)


def test_policy_and_critic_continue_bit_for_bit(tmp_path: Path) -> None:
    policy, critic = make_optimizer(0), make_optimizer(1, width=5)
    train(policy, 3)
    train(critic, 7)  # more updates than the policy: value pre-training
    folder = tmp_path / "step-000003"
    save_checkpoint(folder, policy, STATE, {"critic": critic})
    other_policy, other_critic = make_optimizer(2), make_optimizer(3, width=5)
    assert load_checkpoint(folder, other_policy, {"critic": other_critic}) == STATE
    assert read_step(folder) == 3 and complete_checkpoints(tmp_path) == [folder]
    for one, other in ((policy, other_policy), (critic, other_critic)):
        assert_equal(one, other)
        train(one, 2)
        train(other, 2)
        assert_equal(one, other)


def test_a_critic_before_its_first_update_is_kept_as_well(tmp_path: Path) -> None:
    policy, critic = make_optimizer(0), make_optimizer(1)
    save_checkpoint(tmp_path / "step-000000", policy, STATE, {"critic": critic})
    other = make_optimizer(2)
    load_checkpoint(tmp_path / "step-000000", make_optimizer(3), {"critic": other})
    assert_equal(critic, other)


def test_a_damaged_critic_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    policy, critic = make_optimizer(0), make_optimizer(1)
    train(critic, 1)
    folder = tmp_path / "step-000001"
    save_checkpoint(folder, policy, STATE, {"critic": critic})
    path = folder / "critic" / "optimizer" / "exp_avg" / "whole.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    other, untouched = make_optimizer(2), make_optimizer(2)
    with pytest.raises(RunError, match="damaged.*--fresh"):
        load_checkpoint(folder, other, {"critic": make_optimizer(3)})
    assert_equal(other, untouched)
    path.unlink()
    with pytest.raises(RunError, match="damaged.*--fresh"):
        load_checkpoint(folder, other, {"critic": make_optimizer(3)})


def test_a_critic_must_be_on_both_sides(tmp_path: Path) -> None:
    policy, critic = make_optimizer(0), make_optimizer(1)
    save_checkpoint(tmp_path / "with", policy, STATE, {"critic": critic})
    save_checkpoint(tmp_path / "without", policy, STATE)
    with pytest.raises(RunError, match="has a critic, but the stage has no critic.*--fresh"):
        load_checkpoint(tmp_path / "with", policy)
    with pytest.raises(RunError, match="has no critic, but the stage has a critic.*--fresh"):
        load_checkpoint(tmp_path / "without", policy, {"critic": critic})


def test_a_checkpoint_of_the_first_schema_is_named_not_misread(tmp_path: Path) -> None:
    """It was written before there were critics: its step is readable, its state is refused."""
    folder = tmp_path / "step-000002"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"version": 1, "step": 2, "sha256": {}}))
    assert read_step(folder) == 2
    with pytest.raises(RunError, match="schema version 1.*--fresh"):
        load_checkpoint(folder, make_optimizer(0))
