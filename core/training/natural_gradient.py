"""TRPO's step: the natural gradient of a surrogate within a bound on the KL.

It takes the place of an optimizer. Axes: B rows, T response tokens, N tokens that take loss, H
hidden size, V vocabulary, D trainable parameters.
Source: Trust Region Policy Optimization, arXiv:1502.05477, section 6 and appendix C.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module, Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import TokenLoss
from posttrain.core.errors import ConfigError
from posttrain.core.math.conjugate_gradient import conjugate_gradient
from posttrain.core.models.paths import OutputHead
from posttrain.core.training.exact_kl import kl_to_policy, token_kl
from posttrain.core.training.forward import (
    ResponseForward,
    policy_head,
    project_states,
    response_states,
)
from posttrain.core.training.objective import MicroLoss, Objective, PreparedMini

_CHUNK = 256  # tokens whose logits are held at a time
_ATTENTION = threading.Lock()  # the choice of attention kernels is the whole process's


class FlatParameters:
    """Parameters of one dtype, read and written as one vector [D] in their order."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.params = list(params)

    def join(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """One vector [D] of tensors shaped as the parameters; None stands for zeros."""
        pairs = zip(tensors, self.params, strict=True)
        return torch.cat([(torch.zeros_like(p) if t is None else t).reshape(-1) for t, p in pairs])

    def split(self, vector: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.params]
        parts = zip(torch.split(vector, sizes), self.params, strict=True)
        return [part.view_as(param) for part, param in parts]

    def read(self) -> Tensor:
        return self.join([p.detach() for p in self.params])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        for param, part in zip(self.params, self.split(vector), strict=True):
            param.copy_(part)


@dataclass(frozen=True, slots=True)
class WeightedTokens:
    """Rows of a batch with the weight [B, T] of each response token in a mean; 0 leaves it out."""

    batch: RolloutBatch
    weights: Tensor


def sample_tokens(
    tokens: Sequence[WeightedTokens], fraction: float, generator: torch.Generator
) -> list[WeightedTokens]:
    """A random `fraction` of the weighted tokens, at least one, each as likely as any other."""
    masks = [part.weights > 0 for part in tokens]
    sizes = [int(mask.sum()) for mask in masks]
    drawn = torch.zeros(sum(sizes), dtype=torch.bool)
    order = torch.randperm(len(drawn), generator=generator)
    drawn[order[: max(1, math.ceil(fraction * len(drawn)))]] = True
    kept = [
        torch.zeros_like(part.weights).masked_scatter(mask, part.weights[mask] * flags)
        for part, mask, flags in zip(tokens, masks, torch.split(drawn, sizes), strict=True)
    ]
    total, remaining = (
        sum(float(p.weights.sum()) for p in tokens),
        sum(float(w.sum()) for w in kept),
    )
    result = []
    for part, weights in zip(tokens, kept, strict=True):
        rows = weights.any(dim=1).nonzero().squeeze(1)
        if rows.numel():
            scaled = weights[rows] * (total / remaining)
            result.append(WeightedTokens(part.batch.select(rows), scaled))
    return result


class Fisher:
    """v -> F v [D] with F = sum_t w_t J_t' (diag(p_t) - p_t p_t') J_t at the present weights.

    p_t is the policy's distribution at token t and J_t the derivative of its logits, divided by the
    temperature. F is the Hessian of sum_t w_t KL(p_t || policy) there, and positive semi-definite
    whatever rounding does. J v comes from forward-mode differentiation and J' q from an ordinary
    backward pass, so no attention kernel needs a second derivative and no graph of a graph is held.
    Source: Martens 2014, arXiv:1412.1193, section 9; TRPO, arXiv:1502.05477, appendix C.1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Sequence[WeightedTokens],
        *,
        temperature: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.tokens, self.temperature, self.check = tokens, temperature, check
        self._states = _TokenStates(model)
        self._named = {n: p for n, p in self._states.named_parameters() if p.requires_grad}
        self._flat = FlatParameters(list(self._named.values()))
        self._head = policy_head(model)

    def __call__(self, vector: Tensor) -> Tensor:
        """The product [D] with `vector` [D], over the model's trainable parameters in order."""
        tangents = dict(zip(self._named, self._flat.split(vector), strict=True))
        total = torch.zeros_like(vector)
        for part in self.tokens:
            self.check()
            total += self._flat.join(list(self._products(part, tangents)))
        return total

    def _products(self, part: WeightedTokens, tangents: dict[str, Tensor]) -> Iterator[Tensor]:
        chosen = part.weights > 0
        hidden_dot = self._tangent_states(part.batch, chosen, tangents)
        hidden: Tensor = self._states(part.batch, chosen)
        grad_hidden, grad_head, grad_bias = self._through_softmax(
            hidden.detach(), hidden_dot, self._head_dots(tangents), part.weights[chosen].to(hidden)
        )
        params = list(self._named.values())
        grads: Sequence[Tensor | None] = [None] * len(params)
        if hidden.requires_grad:  # not when only the head is trained
            grads = torch.autograd.grad(hidden, params, grad_hidden, allow_unused=True)
        for param, grad in zip(params, grads, strict=True):
            found = torch.zeros_like(param) if grad is None else grad
            if param is self._head.weight:
                found = found + grad_head
            yield found + grad_bias if param is self._head.bias else found

    @torch.no_grad()
    def logprob_slopes(self, batch: RolloutBatch, chosen: Tensor, vector: Tensor) -> Tensor:
        """Derivative [N] along `vector` [D] of the log-probs of the tokens `chosen` [B, T]."""
        tangents = dict(zip(self._named, self._flat.split(vector), strict=True))
        hidden_dot = self._tangent_states(batch, chosen, tangents)
        hidden: Tensor = self._states(batch, chosen)
        ids = batch.response_ids[chosen].to(hidden.device)
        found = hidden.new_empty(hidden.shape[0])
        for start in range(0, hidden.shape[0], _CHUNK):
            rows = slice(start, start + _CHUNK)
            probs, _, change = self._logit_slopes(
                hidden[rows], hidden_dot[rows], self._head_dots(tangents)
            )
            centred = change - (probs * change).sum(dim=-1, keepdim=True)
            found[rows] = centred.gather(1, ids[rows, None])[:, 0]
        return found

    def _head_dots(self, tangents: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """The tangents of the head's weight and bias, where these are trained."""
        weight, bias = (
            next((tangents[n] for n, p in self._named.items() if p is part), None)
            for part in (self._head.weight, self._head.bias)
        )
        return weight, bias

    @torch.no_grad()
    def _tangent_states(
        self, batch: RolloutBatch, chosen: Tensor, tangents: dict[str, Tensor]
    ) -> Tensor:
        """Directional derivative [N, H] of the chosen tokens' states."""
        # Fused attention kernels have no forward-mode derivative, nor have compiled layers.
        eager = torch.compiler.set_stance("force_eager")
        with eager, _ATTENTION, sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(param, tangents[name])  # type: ignore[no-untyped-call]
                for name, param in self._named.items()
            }
            states = functional_call(self._states, duals, (batch, chosen))
            found = forward_ad.unpack_dual(states)  # type: ignore[no-untyped-call]
            # A state that no trained parameter reaches has no tangent.
            return torch.zeros_like(found.primal) if found.tangent is None else found.tangent

    @torch.no_grad()
    def _through_softmax(
        self,
        hidden: Tensor,
        hidden_dot: Tensor,
        head_dots: tuple[Tensor | None, Tensor | None],
        weights: Tensor,
    ) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """What J' is applied to, taken back through the head: for states [N, H], weight [V, H] and
        bias [V]. `head_dots` are the tangents of these two."""
        head = self._head.detached()
        grad_hidden = torch.empty_like(hidden)
        grad_head: Tensor | float = 0.0
        grad_bias: Tensor | float = 0.0
        for start in range(0, hidden.shape[0], _CHUNK):
            rows = slice(start, start + _CHUNK)
            probs, slope, logits_dot = self._logit_slopes(hidden[rows], hidden_dot[rows], head_dots)
            centred = logits_dot - (probs * logits_dot).sum(dim=-1, keepdim=True)
            q = slope * weights[rows, None] * probs * centred
            if head.weight is None:
                grad_hidden[rows] = q
                continue
            grad_hidden[rows] = q @ head.weight
            grad_head = grad_head + q.t() @ hidden[rows]
            grad_bias = grad_bias + q.sum(dim=0)
        return grad_hidden, grad_head, grad_bias

    def _logit_slopes(
        self, hidden: Tensor, hidden_dot: Tensor, head_dots: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor | float, Tensor]:
        """Probabilities [N, V], slope of the logits by what the head's layer gives, and tangents
        [N, V] of the logits, for states [N, H] with tangents."""
        head = self._head.detached()
        logits, slope = _with_slope(head, hidden, self.temperature)
        raw_dot = hidden_dot if head.weight is None else hidden_dot @ head.weight.t()
        if head_dots[0] is not None:
            raw_dot = raw_dot + hidden @ head_dots[0].t()
        if head_dots[1] is not None:
            raw_dot = raw_dot + head_dots[1]
        return torch.softmax(logits, dim=-1), slope, slope * raw_dot


def _with_slope(
    head: OutputHead, hidden: Tensor, temperature: float
) -> tuple[Tensor, Tensor | float]:
    """Logits at `temperature`, and their derivative with respect to what the head's layer gives."""
    logits, shape = head.logits(hidden), head.shape
    slope = shape.scale / temperature
    if shape.cap is None:
        return logits / temperature, slope
    return logits / temperature, slope * (1 - (logits / shape.cap).square())


class _TokenStates(Module):
    """The states that predict chosen tokens, as a forward whose parameters can be replaced."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: RolloutBatch, chosen: Tensor) -> Tensor:
        hidden, ids, _, _ = response_states(self.model, batch, include_last=False)
        length = ids.shape[1]
        return hidden[:, :length][chosen[:, :length].to(hidden.device)]


Record = Callable[[MicroLoss, ResponseForward, RolloutBatch, Tensor], None]
"""Receives each micro-batch's loss, forward pass and rows at the weights the step starts from."""


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
    `check` runs between passes (it raises to stop; the weights are then as before).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrustRegion,
        temperature: float,
        micro_batch_size: int,
        check: Callable[[], None] = lambda: None,
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
        self.check = check
        self._flat = FlatParameters(params)

    def step(
        self,
        mini: RolloutBatch,
        objective: Objective,
        prepared: PreparedMini,
        generator: torch.Generator,
        record: Record | None = None,
    ) -> dict[str, float]:
        """One trust-region step on the mini-batch `mini`; needs `advantages`, `old_logprobs`.

        `generator` draws the tokens of the Fisher matrix.
        """
        mini.require(["advantages", "old_logprobs"], "the trust region")
        parts, surrogate, gradient = self._differentiate(mini, objective, prepared, record)
        metrics = _nothing_taken() | {"grad/norm": float(gradient.norm())}
        if not gradient.any() or not math.isfinite(surrogate + metrics["grad/norm"]):
            return metrics | {"trpo/skipped": 1.0}
        everything = [WeightedTokens(part.micro, part.weights) for part in parts]
        fisher = Fisher(
            self.model,
            sample_tokens(everything, self.config.fvp_token_fraction, generator),
            temperature=self.temperature,
            check=self.check,
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
        return metrics | self._search(parts, objective, surrogate, gradient, full)

    def _differentiate(
        self,
        mini: RolloutBatch,
        objective: Objective,
        prepared: PreparedMini,
        record: Record | None,
    ) -> tuple[list[_Part], float, Tensor]:
        """The micro-batches that take loss, L and its gradient [D] at the present weights."""
        parts: list[_Part] = []
        surrogate, gradient = 0.0, self._flat.join([None] * len(self._flat.params))
        for rows in torch.split(torch.arange(len(mini)), self.micro_batch_size):
            self.check()
            micro, found = mini.select(rows), prepared.rows(rows)
            if not micro.mask.any():
                continue
            loss, out, hidden = self._forward(micro, found, objective)
            if record is not None:
                record(loss, out, micro, rows)
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
    ) -> dict[str, float]:
        """Try ever shorter steps along `full` [D]; keep the first that is good, else none."""
        config, start = self.config, self._flat.read()
        old_head = policy_head(self.model).copied()
        slope, accepted = float(torch.dot(gradient, full)), False
        try:
            for backtracks in range(config.max_backtracks + 1):
                fraction = config.backtrack_ratio**backtracks
                self._flat.write(torch.add(start, full, alpha=fraction))
                new, kl = self._evaluate(parts, objective, old_head)
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
        self, parts: Sequence[_Part], objective: Objective, old_head: OutputHead
    ) -> tuple[float, float]:
        surrogate, mean_kl = 0.0, 0.0
        for part in parts:
            self.check()
            loss, _, hidden = self._forward(part.micro, part.prepared, objective)
            surrogate -= float(loss.total)
            kl = token_kl(
                hidden,
                policy_head(self.model),
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
