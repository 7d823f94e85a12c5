"""Products with a policy's Fisher matrix, which is never formed, and parameters as one vector.

Axes: B rows, T response tokens, N chosen tokens, H hidden size, V vocabulary, D parameters.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module, Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.training.forward import head_weight, response_states

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
        self._head = head_weight(model)

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
        head_dot = next((tangents[n] for n, p in self._named.items() if p is self._head), None)
        hidden: Tensor = self._states(part.batch, chosen)
        grad_hidden, grad_head = self._through_softmax(
            hidden.detach(), hidden_dot, head_dot, part.weights[chosen].to(hidden)
        )
        params = list(self._named.values())
        grads: Sequence[Tensor | None] = [None] * len(params)
        if hidden.requires_grad:  # not when only the head is trained
            grads = torch.autograd.grad(hidden, params, grad_hidden, allow_unused=True)
        for param, grad in zip(params, grads, strict=True):
            found = torch.zeros_like(param) if grad is None else grad
            yield found + grad_head if param is self._head else found

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
        self, hidden: Tensor, hidden_dot: Tensor, head_dot: Tensor | None, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What J' is applied to, taken back through the head: for states [N, H] and head [V, H]."""
        head, scale = self._head.detach(), 1.0 / self.temperature
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        for start in range(0, hidden.shape[0], _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits_dot = hidden_dot[rows] @ head.t()
            if head_dot is not None:
                logits_dot += hidden[rows] @ head_dot.t()
            probs = torch.softmax(scale * (hidden[rows] @ head.t()), dim=-1)
            centred = logits_dot - (probs * logits_dot).sum(dim=-1, keepdim=True)
            q = scale**2 * weights[rows, None] * probs * centred
            grad_hidden[rows] = q @ head
            grad_head += q.t() @ hidden[rows]
        return grad_hidden, grad_head


class _TokenStates(Module):
    """The states that predict chosen tokens, as a forward whose parameters can be replaced."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: RolloutBatch, chosen: Tensor) -> Tensor:
        hidden, ids, _, _ = response_states(self.model, batch, include_last=False)
        length = ids.shape[1]
        return hidden[:, :length][chosen[:, :length].to(hidden.device)]
