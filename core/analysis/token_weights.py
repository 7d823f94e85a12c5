"""How much the loss of a step pulls at each token: d loss / d logprob, and what held it back.

The weights come from the objective that trained the step, on the log-probs that it read, under the
counts of the mini-batch it read them in: no model is needed. A negative weight makes its token
likelier. Axes: B responses, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.frozen import freeze
from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import TeacherRows, TokenLoss
from posttrain.core.errors import RunError
from posttrain.core.math.masking import masked
from posttrain.core.math.teacher_gap import taught
from posttrain.core.training.objective import Distilled, MicroLoss, Objective, PreparedMini
from posttrain.core.training.updates import SLOPES_EVERY, UpdateSettings

CLIP_STATES = ("none", "high", "low", "dual", "dropped", "no loss")
"""What became of a token, by its number in `TokenWeights.clip`.

`high`, `low` and `dual` are the bound that acts, as the loss's own metrics say; the weight is 0
there except in losses that bound a factor instead (cispo). `dropped`: the policy terms give exactly
no gradient, although the advantage is not 0 and no bound says why. `no loss`: masked, or in a
row that no optimizer step read.
"""
_FLAGS = {"clip/high_frac": 1, "clip/low_frac": 2, "clip/dual_frac": 3}
_DROPPED, _NO_LOSS = 4, 5
SURE = -1e-12
"""Log-prob from which a token counts as no more certain: log(1 - p) is finite there."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """d loss / d logprob [B, T] of a step: `total`, and of it the part of the `policy` terms.

    The rest is the KL term's. 0 where a token takes no loss. `clip` [B, T] uint8 are numbers of
    `CLIP_STATES`. `divergence` [B, T] are norms of d loss / d logits of a distillation loss that
    reads more than the sampled token's log-prob; where it is the only loss, `of_logits` says that
    `total` is the same.
    """

    total: Tensor
    policy: Tensor
    clip: Tensor
    divergence: Tensor | None = None
    of_logits: bool = False


def reads_logits(objective: Objective) -> bool:
    """Whether its distillation loss reads more of the policy than the sampled token's log-prob."""
    term = objective.distillation
    return term is not None and term.loss.reads() != "sampled"


def read_rows(evidence: StepEvidence) -> Tensor:
    """Rows [B] whose log-probs are known: an optimizer step read them, and they take loss."""
    return (evidence.seen_by >= 0) & evidence.batch.mask.bool().any(dim=1)


def unread_rows(evidence: StepEvidence) -> Tensor:
    """Rows [B] that take loss, but were left out because their advantages teach nothing."""
    return ~read_rows(evidence) & evidence.batch.mask.bool().any(dim=1)


def clipped_tokens(weights: TokenWeights) -> Tensor:
    """How many tokens of each response [B] a bound acts on."""
    return ((weights.clip > 0) & (weights.clip < _DROPPED)).sum(dim=1)


def token_weights(
    evidence: StepEvidence, objective: Objective, settings: UpdateSettings
) -> TokenWeights:
    """The weights of the last optimizer step on each row, in the dtype of the evidence.

    `settings` are those of the update, whose seed decides the mini-batches. The entropy bonus and a
    KL over the vocabulary depend on more than the token's log-prob, and are not in the weights.
    Raises `RunError` when the settings are not the step's own, when a column is missing that the
    objective reads, or when a loss looks at a whole mini-batch that was not read as a whole.
    """
    if objective.kl is not None and objective.kl.from_logits:
        objective = replace(objective, kl=None)
    without_kl = replace(objective, kl=None)
    evidence.batch.require(objective.required_columns() - {"logprobs_now"}, "the microscope")
    frozen = freeze(evidence, settings)
    read = read_rows(evidence)[:, None] & evidence.batch.mask.bool()
    entropy = torch.where(read, evidence.seen_entropy, 0.0)
    batch = evidence.batch.with_columns(
        logprobs_now=frozen.logprobs, entropy=entropy.to(frozen.logprobs)
    )
    total = torch.zeros_like(evidence.seen_logprobs)
    policy, clip = total.clone(), torch.full(total.shape, _NO_LOSS, dtype=torch.uint8)
    norms = total.clone() if reads_logits(objective) and evidence.seen_slope is not None else None
    if reads_logits(objective) and norms is None and not objective.terms:
        raise RunError(
            f"the evidence of step {evidence.step} has no gradients of its distillation loss: "
            f"they are measured at steps 1, {1 + SLOPES_EVERY}, {1 + 2 * SLOPES_EVERY} ..., unless "
            "the stage sets token_weights: false; look at one of these"
        )
    for mini in frozen.minis:
        rows, own = batch.select(mini.rows), mini.taken & read_rows(evidence)[mini.rows]
        if objective.needs_prepare() and bool((rows.mask.bool().any(dim=1) & ~own).any()):
            raise RunError(
                "this loss looks at a whole mini-batch before its update, and the log-probs of "
                f"some rows of mini-batch {mini.number + 1} of step {evidence.step} are not known "
                "as they were then: those rows taught nothing, or a later update read them again"
            )
        prepared = frozen.prepare(objective, rows, mini)
        for index in settings.micro_rows(rows):
            micro, its, here = rows.select(index), prepared.rows(index), own[index]
            into = mini.rows[index][here]
            without, loss = _gradient(without_kl, micro, its, 0.0)
            grad = without
            if objective.kl is not None and evidence.kl_coef > 0:
                grad, _ = _gradient(objective, micro, its, evidence.kl_coef)
            if norms is not None:
                norms[into] = _norms(objective, evidence, mini.rows[index], micro, its)[here]
            total[into], policy[into] = grad[here], without[here]
            clip[into] = _states(loss, without, micro)[here]
    if norms is not None and not objective.terms:
        return TokenWeights(norms, policy, clip, norms, of_logits=True)
    return TokenWeights(total, policy, clip, norms)


def _gradient(
    objective: Objective, micro: RolloutBatch, prepared: PreparedMini, kl_coef: float
) -> tuple[Tensor, MicroLoss]:
    leaf = micro.column("logprobs_now").clone().requires_grad_()
    with torch.enable_grad():
        distilled = _of_sampled(objective, leaf, micro)
        entropy = micro.column("entropy")
        loss = objective.loss(leaf, entropy, micro, prepared, kl_coef, None, None, distilled)
        (grad,) = torch.autograd.grad(loss.total, leaf)
    return grad, loss


def _of_sampled(objective: Objective, logprobs: Tensor, micro: RolloutBatch) -> Distilled | None:
    """The values [b, T] of a distillation loss that depend on `logprobs` [b, T] alone.

    All other tokens of the vocabulary stand as one, which has the rest of the probability.
    """
    if objective.distillation is None or reads_logits(objective):
        return None
    where = taught(micro).bool() & logprobs.isfinite()
    own = logprobs[where].double()
    own = own + (own.clamp(max=SURE) - own).detach()  # moved, and not cut off from its gradient
    logits = torch.stack([own, (-own.expm1()).log()], dim=1)
    old = micro.old_logprobs
    said = TeacherRows(
        sampled=torch.zeros(len(own), dtype=torch.int64),
        old_logprobs=None if old is None else old[where].double(),
        logprobs=micro.column("teacher_logprobs")[where].double(),
    )
    found = objective.distillation.loss.rows(logits, said)
    scored = torch.zeros(logprobs.shape, dtype=torch.bool)
    scored[where] = found.scored
    values = masked(found.loss, found.scored)
    return Distilled(values.new_zeros(logprobs.shape).index_put((where,), values), scored)


def _norms(
    objective: Objective,
    evidence: StepEvidence,
    rows: Tensor,
    micro: RolloutBatch,
    prepared: PreparedMini,
) -> Tensor:
    """Norms of d loss / d logits [b, T] of the distillation loss, by the slopes of its values."""
    term = objective.distillation
    assert term is not None and evidence.seen_slope is not None, "asked for where both are there"
    mask, slope = term.loss.counted(micro), evidence.seen_slope[rows]
    leaf = torch.zeros_like(slope).requires_grad_()
    with torch.enable_grad():
        value = TokenLoss(leaf, masked(mask, slope.isfinite()))
        counts = prepared.distillation_counts
        share = term.share(value, mask, counts, micro, prepared.step)
        (grad,) = torch.autograd.grad(share, leaf)
    return masked(grad.abs() * slope, value.mask)


def _states(loss: MicroLoss, policy: Tensor, micro: RolloutBatch) -> Tensor:
    """Numbers of `CLIP_STATES` [b, T] of a micro-batch with gradients `policy` [b, T]."""
    state = torch.zeros(policy.shape, dtype=torch.uint8)
    pulled = masked(micro.column("advantages"), micro.mask) != 0
    state[pulled & (policy == 0)] = _DROPPED
    for name, number in _FLAGS.items():
        if name in loss.tokens:
            flag, where = loss.tokens[name]
            if flag.dim() == 2:
                state[masked(flag, where).bool()] = number
    state[~micro.mask.bool()] = _NO_LOSS
    return state
