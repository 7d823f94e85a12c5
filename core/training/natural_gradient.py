"""TRPO's step: the natural gradient of a surrogate inside a bound on the KL, with a line search.

It takes the place of an optimizer. Axes: B rows, T response tokens, N tokens that take loss, H
hidden size, V vocabulary, D trainable parameters.
Source: Trust Region Policy Optimization, arXiv:1502.05477, section 6 and appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import TokenLoss
from posttrain.core.errors import ConfigError
from posttrain.core.math.conjugate_gradient import conjugate_gradient
from posttrain.core.training.exact_kl import kl_to_policy, token_kl
from posttrain.core.training.fisher import (
    Fisher,
    FlatParameters,
    WeightedTokens,
    sample_tokens,
)
from posttrain.core.training.forward import (
    ResponseForward,
    head_weight,
    project_states,
    response_states,
)
from posttrain.core.training.objective import MicroLoss, Objective, PreparedMini

Record = Callable[[MicroLoss, ResponseForward, RolloutBatch], None]
"""Told each micro-batch's loss and forward pass at the weights the step starts from."""


class TrustRegion(Protocol):
    """Settings of the step, as the policy loss `trpo` has them in its config.

    `delta` bounds the mean KL(old || new) in nats, averaged as the aggregator averages; `damping`
    is the multiple of the identity that is added to the Fisher matrix, which is taken over
    `fvp_token_fraction` of the tokens. A step is shortened by `backtrack_ratio`, `max_backtracks`
    times at most, until it reaches `accept_ratio` of the first-order improvement (0 = any).
    """

    @property
    def delta(self) -> float: ...
    @property
    def damping(self) -> float: ...
    @property
    def cg_iters(self) -> int: ...
    @property
    def max_backtracks(self) -> int: ...
    @property
    def backtrack_ratio(self) -> float: ...
    @property
    def accept_ratio(self) -> float: ...
    @property
    def fvp_token_fraction(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """A micro-batch: its rows, counts, KL weights [B, T], and old states [N, H] where mask is 1."""

    micro: RolloutBatch
    prepared: PreparedMini
    weights: Tensor
    old_hidden: Tensor


class NaturalGradient:
    """Maximises L = minus the objective's loss subject to the mean KL(old || new) <= delta.

    "Old" is the policy at the start of the step. The step is s x with (F + damping) x = grad L and
    s = sqrt(2 delta / x'(F + damping)x), shortened until the *measured* KL, exact over the
    vocabulary, is within delta and L has improved; else the weights are put back bit for bit. A
    gradient of exactly 0 moves nothing. Memory: six vectors as large as the parameters.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrustRegion,
        temperature: float,
        micro_batch_size: int,
    ) -> None:
        params = [p for p in model.parameters() if p.requires_grad]
        low = {p.dtype for p in params} - {torch.float32, torch.float64}
        if low:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
            raise ConfigError(
                f"policy_loss 'trpo' steps along curvature that {names} weights cannot hold: set "
                "model.dtype to float32"
            )
        self.model, self.config = model, config
        self.temperature, self.micro_batch_size = temperature, micro_batch_size
        self._flat = FlatParameters(params)

    def step(
        self,
        mini: RolloutBatch,
        objective: Objective,
        prepared: PreparedMini,
        generator: torch.Generator,
        check: Callable[[], None] = lambda: None,
        record: Record | None = None,
    ) -> dict[str, float]:
        """One trust-region step on the mini-batch `mini`; needs `advantages`, `old_logprobs`.

        `generator` draws the tokens of the Fisher matrix. `check` runs between passes (it raises to
        stop; the weights are then as before).
        """
        mini.require(["advantages", "old_logprobs"], "the trust region")
        parts, surrogate, gradient = self._differentiate(mini, objective, prepared, check, record)
        metrics = _nothing_taken() | {"grad/norm": float(gradient.norm())}
        if not gradient.any():
            return metrics | {"trpo/skipped": 1.0}
        everything = [WeightedTokens(part.micro, part.weights) for part in parts]
        fisher = Fisher(
            self.model,
            sample_tokens(everything, self.config.fvp_token_fraction, generator),
            temperature=self.temperature,
            check=check,
        )
        found = conjugate_gradient(
            lambda v: fisher(v).add_(v, alpha=self.config.damping),
            gradient,
            max_iterations=self.config.cg_iters,
        )
        metrics["trpo/cg_residual"] = found.residual_norm / metrics["grad/norm"]
        if not found.x.any():
            return metrics | {"trpo/skipped": 1.0}
        curvature = float(torch.dot(found.x, gradient - found.residual))  # x'(F + damping)x
        full = found.x.mul_(math.sqrt(2 * self.config.delta / (max(0.0, curvature) + 1e-8)))
        return metrics | self._search(parts, objective, surrogate, gradient, full, check)

    def _differentiate(
        self,
        mini: RolloutBatch,
        objective: Objective,
        prepared: PreparedMini,
        check: Callable[[], None],
        record: Record | None,
    ) -> tuple[list[_Part], float, Tensor]:
        """The micro-batches that take loss, L and its gradient [D] at the present weights."""
        parts: list[_Part] = []
        surrogate, gradient = 0.0, self._flat.join([None] * len(self._flat.params))
        for rows in torch.split(torch.arange(len(mini)), self.micro_batch_size):
            check()
            micro, found = mini.select(rows), prepared.rows(rows)
            if not micro.mask.any():
                continue
            loss, out, hidden = self._forward(micro, found, objective)
            if record is not None:
                record(loss, out, micro)
            grads = torch.autograd.grad(loss.total, self._flat.params, allow_unused=True)
            gradient -= self._flat.join(grads)
            surrogate -= float(loss.total.detach())
            weights = _token_weights(objective, found, micro)
            parts.append(_Part(micro, found, weights, hidden.detach()))
        return parts, surrogate, gradient

    def _forward(
        self, micro: RolloutBatch, prepared: PreparedMini, objective: Objective
    ) -> tuple[MicroLoss, ResponseForward, Tensor]:
        """The objective's share of `micro`, and the states [N, H] of the tokens that take loss."""
        states = response_states(self.model, micro, include_last=False)
        out = project_states(
            self.model, states, micro.response_ids.shape, temperature=self.temperature
        )
        loss = objective.loss(out.logprobs.cpu(), out.entropy.cpu(), micro, prepared)
        hidden, ids, _, _ = states
        length = ids.shape[1]
        return loss, out, hidden[:, :length][micro.mask[:, :length].bool().to(hidden.device)]

    def _search(
        self,
        parts: Sequence[_Part],
        objective: Objective,
        surrogate: float,
        gradient: Tensor,
        full: Tensor,
        check: Callable[[], None],
    ) -> dict[str, float]:
        """Try ever shorter steps along `full` [D]; keep the first that is good, else none."""
        config, start = self.config, self._flat.read()
        old_head = head_weight(self.model).detach().clone()
        slope, accepted = float(torch.dot(gradient, full)), False
        try:
            for backtracks in range(config.max_backtracks + 1):
                fraction = config.backtrack_ratio**backtracks
                self._flat.write(torch.add(start, full, alpha=fraction))
                new, kl = self._evaluate(parts, objective, old_head, check)
                improvement, expected = new - surrogate, fraction * slope
                enough = improvement > 0 and improvement >= config.accept_ratio * expected
                accepted = kl <= config.delta and enough
                if accepted:
                    return {
                        "trpo/kl": kl,
                        "trpo/improvement": improvement,
                        "trpo/expected": expected,
                        "trpo/step_fraction": fraction,
                        "trpo/backtracks": float(backtracks),
                    }
            return {"trpo/backtracks": float(config.max_backtracks), "trpo/rejected": 1.0}
        finally:
            if not accepted:
                self._flat.write(start)

    @torch.no_grad()
    def _evaluate(
        self,
        parts: Sequence[_Part],
        objective: Objective,
        old_head: Tensor,
        check: Callable[[], None],
    ) -> tuple[float, float]:
        surrogate, mean_kl = 0.0, 0.0
        for part in parts:
            check()
            loss, _, hidden = self._forward(part.micro, part.prepared, objective)
            surrogate -= float(loss.total)
            kl = token_kl(
                hidden,
                head_weight(self.model),
                part.old_hidden,
                old_head,
                kl_to_policy,
                temperature=self.temperature,
            )
            weights = part.weights[part.micro.mask.bool()]
            mean_kl += float((weights * kl.double().cpu()).sum())
        return surrogate, mean_kl


def _token_weights(objective: Objective, prepared: PreparedMini, micro: RolloutBatch) -> Tensor:
    """Weight [B, T], float64, of each token in the aggregator's mean: it is linear in the loss."""
    ones = torch.ones(micro.mask.shape, dtype=torch.float64, requires_grad=True)
    mean = objective.aggregator.aggregate(
        TokenLoss(ones, micro.mask), micro.mask, prepared.counts, micro.group_id
    )
    (weights,) = torch.autograd.grad(mean, ones)
    return weights


def _nothing_taken() -> dict[str, float]:
    return {
        "trpo/kl": 0.0,
        "trpo/improvement": 0.0,
        "trpo/expected": 0.0,
        "trpo/step_fraction": 0.0,
        "trpo/backtracks": 0.0,
        "trpo/rejected": 0.0,
        "trpo/skipped": 0.0,
        "trpo/cg_residual": 0.0,
    }
