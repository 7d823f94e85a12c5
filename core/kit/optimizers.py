"""What optimizers promise, on a small least-squares problem."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from posttrain.core.config.sections import OtherOptimizer
from posttrain.core.kit.batches import expect_same
from posttrain.core.kit.checks import Skipped, Subject, check, expect, expect_equal
from posttrain.core.training.optim import MasterOptimizer

SHAPES = ((64, 64), (64,), (1,))
RATE, STEPS = 1e-2, 8


class _Problem:
    """Weights, and their gradients at a step: half the squared distance to a random target."""

    def __init__(self) -> None:
        noise = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(s, generator=noise).requires_grad_() for s in SHAPES]
        self.targets = [torch.randn(s, generator=noise) for s in SHAPES]

    def loss(self) -> float:
        pairs = zip(self.weights, self.targets, strict=True)
        return sum(float((w.detach() - t).square().sum()) / 2 for w, t in pairs)

    def take(self, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
        """Steps at a rate that is set before each, as the trainer does."""
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 + step % 2)
            for weight, target in zip(self.weights, self.targets, strict=True):
                weight.grad = weight.detach() - target
            optimizer.step()


def _built(subject: Subject, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    plugin = subject.build()
    if missing := plugin.missing():
        raise Skipped(missing)
    made = plugin.build(weights, RATE, 7)
    expect(isinstance(made, torch.optim.Optimizer), f"`build` gives {type(made).__name__}")
    found: torch.optim.Optimizer = made
    return found


@check("steps lower the loss, and no weight stops being finite", "optimizer")
def _lowers(subject: Subject) -> None:
    problem = _Problem()
    optimizer, before = _built(subject, problem.weights), problem.loss()
    problem.take(optimizer, range(50))
    expect(all(w.isfinite().all() for w in problem.weights), "a weight is not finite")
    after = problem.loss()
    expect(after < before, f"after 50 steps on least squares the loss is {after}, it was {before}")


@check("equal seeds and gradients give equal weights, bit for bit", "optimizer")
def _determinism(subject: Subject) -> None:
    problems = [_Problem(), _Problem()]
    for problem in problems:
        problem.take(_built(subject, problem.weights), range(STEPS))
    for found, wanted in zip(problems[1].weights, problems[0].weights, strict=True):
        expect_same(found, wanted, "the weights of a second optimizer")


@check("it continues from a checkpoint, bit for bit", "optimizer")
def _resumes(subject: Subject) -> None:
    whole, first, second = (_trained(subject) for _ in range(3))
    _train(whole, range(STEPS))
    _train(first, range(STEPS // 2))
    with tempfile.TemporaryDirectory() as folder:
        first.write(Path(folder))
        second.read(Path(folder), first.step_count)
    _train(second, range(STEPS // 2, STEPS))
    wanted = whole.weights()
    for name, found in second.weights().items():
        expect_same(found, wanted[name], "the weights after a resume in the middle")


def _trained(subject: Subject) -> MasterOptimizer:
    """The problem's weights with the optimizer, as a stage has them: its checkpoints are real."""
    plugin = subject.build()
    if missing := plugin.missing():
        raise Skipped(missing)
    dtype = torch.float32 if plugin.keeps_masters() else torch.bfloat16
    module = torch.nn.ParameterList([w.detach().to(dtype) for w in _Problem().weights])
    section = OtherOptimizer(name=subject.entry.name, learning_rate=RATE, max_grad_norm=None)
    return MasterOptimizer(module, section, STEPS, seed=7, algorithm=plugin)


def _train(optimizer: MasterOptimizer, steps: Sequence[int]) -> None:
    for step in steps:
        for weight, target in zip(optimizer.weights().values(), _Problem().targets, strict=True):
            weight.grad = weight.detach().float() - target
        optimizer.step(1 + step % 2)


@check("a weight without a gradient stays as it is", "optimizer")
def _no_gradient(subject: Subject) -> None:
    problem = _Problem()
    optimizer = _built(subject, problem.weights)
    before = problem.weights[0].detach().clone()
    problem.weights[1].grad = torch.ones(SHAPES[1])
    optimizer.step()
    expect_same(problem.weights[0], before, "the weight")


@check("the learning rate is the one that is set before a step", "optimizer")
def _rate(subject: Subject) -> None:
    problem = _Problem()
    optimizer = _built(subject, problem.weights)
    before = [weight.detach().clone() for weight in problem.weights]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for weight in problem.weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for found, wanted in zip(problem.weights, before, strict=True):
        expect_same(found, wanted, "the weights after a step of rate 0")


@check("its state is as large as it says", "optimizer")
def _state_bytes(subject: Subject) -> None:
    problem = _Problem()
    optimizer = _built(subject, problem.weights)
    problem.take(optimizer, range(2))
    state = optimizer.state[problem.weights[0]]
    tensors = (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
    found = sum(t.numel() * t.element_size() for t in tensors) / problem.weights[0].numel()
    said = subject.build().state_bytes()
    expect(
        abs(found - said) <= 0.1 * max(1.0, said),
        f"`state_bytes` says {said:g} bytes for each weight, and it holds {found:g}",
    )


@check("it says whether it moves float32 copies", "optimizer")
def _masters(subject: Subject) -> None:
    expect_equal(type(subject.build().keeps_masters()), bool, "the type of `keeps_masters()`")
