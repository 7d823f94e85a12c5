"""The learner: one rollout batch in, optimizer steps out, exact however the work is split.

Every term of the loss is divided by counts of the *global* mini-batch, taken before its first
micro-batch, so the summed gradients equal that of one big batch. What the loss is made of is the
objective's business; here are the epochs, mini-batches and micro-batches. Over 300 lines
because one update, on one rank or several, is read from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.models.sharded import put_away
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.collision import response_sum_pi_squared
from posttrain.core.training.exact_kl import response_exact_kl
from posttrain.core.training.forward import (
    UNCUT,
    ResponseForward,
    States,
    forward_only,
    response_pass,
)
from posttrain.core.training.guard import KlGuard
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.natural_gradient import NaturalGradient
from posttrain.core.training.objective import Objective, PreparedMini
from posttrain.core.training.optim import MasterOptimizer, StoredOptimizer
from posttrain.core.training.ptx import PtxTerm
from posttrain.core.training.ranks import ALONE, Ranks, in_place
from posttrain.core.training.records import record_micro, update_metrics
from posttrain.core.training.sampled_law import mismatch_of, on_uncut_law
from posttrain.core.training.splitting import mini_rows
from posttrain.core.training.updates import Progress, UpdateResult, UpdateSettings

Check = Callable[[], None]
# Neighbours, so that both have one prompt, mostly: each pass reads all weights as it is.
AUDITED_ROWS = 2


def _nothing() -> None:
    """A check that never stops anything."""


class Learner:
    """Owns the policy, its frozen reference (when a KL term needs it) and the optimizer.

    `trust_region` takes the place of AdamW for a loss with a step of its own; `ptx` adds the
    pre-training term; `guard` bounds how far one batch may move the policy. Of several `ranks` each
    has a learner, and all are called alike.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        objective: Objective,
        settings: UpdateSettings,
        reference: PreTrainedModel | None = None,
        *,
        guard: KlGuard | None = None,
        ptx: PtxTerm | None = None,
        trust_region: NaturalGradient | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.objective, self.settings, self.reference = objective, settings, reference
        self.guard, self.ptx, self.trust_region = guard, ptx, trust_region

    @property
    def stored(self) -> StoredOptimizer:
        """What a checkpoint keeps of the policy."""
        return self.optimizer

    def update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        check: Check = _nothing,
        products: SampledOutputs | None = None,
    ) -> UpdateResult:
        """All epochs and mini-batches over `batch`.

        Needs `advantages`, and fills `old_logprobs` itself: from a forward pass before the first
        update, or, when there is only one update and nothing else reads them, from that update's
        own forward, which is the same policy. `check` raises to stop, between micro-batches.
        `products` are what the present policy computed when it sampled `batch`: its log-probs and
        the first optimizer step do not compute it again. They are empty afterwards.
        """
        batch.require(["advantages", "mask"], "the learner")
        given = batch.columns()
        # Of what the engine computed itself its difference from the trainer says nothing.
        audited = self._audit(batch, step, check) if products is not None else {}
        batch, metrics = self._ready(batch, kl_coef, check, products)
        columns = {name: batch.column(name) for name in batch.columns() - given}
        settings, done = self.settings, Progress.of(batch, products)
        # An update without a row to learn from, or one that sees the policy only when it has moved.
        moved = self.objective.bypass_old and self.trust_region is not None
        unseen = moved or not (batch.mask.any(dim=1) & ~self._idle_rows(batch, kl_coef)).any()
        if unseen and not audited:
            metrics |= self.mismatch(batch, check)
        parts = mini_rows(
            batch, settings.epochs, settings.num_mini_batches, settings.seed, "mini_batches", step
        )
        for number, rows in enumerate(parts):
            mini = batch if settings.num_mini_batches == 1 else batch.select(rows)
            mini, prepared = self._prepare(mini, step, number, check)
            done.sums.add_means(prepared.metrics)
            if self.trust_region is not None:
                draw = generator(settings.seed, "trust_region", step, number)
                record = partial(record_micro, done.sums)
                taken = self.trust_region.step(mini, self.objective, prepared, draw, check, record)
                done.sums.add_means(taken)
                done.num_updates += 1
                done.saw(rows, mini.column("old_logprobs"), mini.entropy, number)
            elif not self._one_update(mini, prepared, (step, number), kl_coef, done, check, rows):
                break
        metrics |= update_metrics(done.sums, done.num_updates)
        if done.report is not None:
            metrics |= {"grad/norm": done.mean_norm, "lr": done.report.learning_rate}
        if self.guard is not None:
            metrics["guard/exceeded"] = metrics.get("guard/exceeded", 0.0)
            metrics["guard/rate_factor"] = done.rate_factor
        first = batch.rollout_logprobs if done.first_logprobs is None else done.first_logprobs
        if audited:
            metrics |= audited
        elif not unseen:
            metrics |= self._seen_mismatch(batch, done, first)
        metrics |= self._phase_end(batch.with_columns(old_logprobs=first), metrics, check)
        return UpdateResult(
            metrics, first, done.seen_logprobs, done.seen_entropy, done.seen_by, columns
        )

    def _one_update(
        self,
        mini: RolloutBatch,
        prepared: PreparedMini,
        place: tuple[int, int],
        kl_coef: float,
        done: Progress,
        check: Check,
        of_batch: Tensor,
    ) -> bool:
        """One optimizer step on a mini-batch; False when the guard gives up the rest of the batch.

        `place` is the rollout batch's step and the update's number on it; `of_batch` are the
        mini-batch's rows in that batch.
        """
        own = MetricSums()
        idle = self._idle_rows(mini, kl_coef)
        seen, entropy, log_kept = self._accumulate(
            mini, prepared, kl_coef, own, idle, check, done.products
        )
        done.forget_products()
        own = self.ranks.merge(own)
        own.add_scalar("train/idle_rows", float((idle & mini.mask.any(dim=1)).sum()))
        if done.first_logprobs is None:
            done.first_logprobs = seen
        rows = (~idle).nonzero().squeeze(1)
        done.saw(of_batch[rows], seen[rows], entropy[rows], place[1])
        if done.first_mini is None and len(rows):
            kept = on_uncut_law(mini, log_kept)
            done.first_mini, done.first_seen = kept.select(rows), seen[rows]
        if self.guard is not None and self.guard.exceeded(own.mean("kl/old_k3", default=0.0)):
            done.sums.add_scalar("guard/exceeded", 1.0)
            if self.guard.action == "stop":
                self.optimizer.zero_grad()
                return False
            done.rate_factor *= self.guard.factor
        if self.ptx is not None:
            self.ptx.accumulate(self.model, *place, own, check, self.ranks)
        done.sums.merge(own)
        report = self.optimizer.step(done.rate_factor)
        done.took(report)
        return True

    def _idle_rows(self, batch: RolloutBatch, kl_coef: float) -> Tensor:
        """Rows [B] that are left out because they teach nothing."""
        if not self.settings.skip_idle_rows:
            return torch.zeros(len(batch), dtype=torch.bool)
        return self.objective.idle_rows(batch, kl_coef)

    def _ready(
        self,
        batch: RolloutBatch,
        kl_coef: float,
        check: Check,
        products: SampledOutputs | None = None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Fill `old_logprobs` and `ref_logprobs` where they are needed, and the correction."""
        objective = self.objective
        needs_old = (
            self.settings.updates_per_batch > 1
            or objective.correction is not None
            or objective.needs_prepare()
            or self.trust_region is not None
        )
        if needs_old or objective.bypass_old:
            batch = self.with_old_logprobs(batch, check, products)
        exact = objective.kl is not None and objective.kl.from_logits
        if kl_coef > 0 and objective.kl is not None and batch.ref_logprobs is None and not exact:
            batch = batch.with_columns(ref_logprobs=self.reference_logprobs(batch, check))
        corrected = batch.is_weight is not None or batch.correction_mask is not None
        return (batch, {}) if corrected else objective.correct(batch)

    def with_old_logprobs(
        self,
        batch: RolloutBatch,
        check: Check = _nothing,
        products: SampledOutputs | None = None,
    ) -> RolloutBatch:
        """`batch` with `old_logprobs` and `entropy` of the present policy, unless it has them."""
        if batch.old_logprobs is not None:
            return batch
        if self.objective.bypass_old:
            return batch.with_columns(old_logprobs=batch.rollout_logprobs)
        old = self.forward_only(self.model, batch, check, self.settings.cut, products)
        batch = on_uncut_law(batch, old.log_kept)
        return batch.with_columns(old_logprobs=old.logprobs, entropy=old.entropy)

    def mismatch(self, batch: RolloutBatch, check: Check = _nothing) -> dict[str, float]:
        """Engine against the present policy on all of `batch`, for a step that updates nothing."""
        if batch.old_logprobs is not None and not self.objective.bypass_old:
            return mismatch_of(batch, batch.old_logprobs, batch.response_mask)
        old = self.forward_only(self.model, batch, check, self.settings.cut)
        batch = on_uncut_law(batch, old.log_kept)
        return mismatch_of(batch, old.logprobs, batch.response_mask)

    def _seen_mismatch(
        self, batch: RolloutBatch, done: Progress, first: Tensor
    ) -> dict[str, float]:
        """Engine against the policy that sampled, as the passes of this update saw it."""
        # With `bypass_old` only the first mini-batch is seen by the policy that sampled it.
        own = self.objective.bypass_old or batch.old_logprobs is None
        compared, seen = (done.first_mini, done.first_seen) if own else (batch, first)
        assert compared is not None and seen is not None
        return mismatch_of(compared, seen, compared.mask)

    def _audit(self, batch: RolloutBatch, step: int, check: Check) -> dict[str, float]:
        """`mismatch` of a few rows, others at each step, by the trainer alone."""
        count = min(AUDITED_ROWS, len(batch))
        few = batch.select((torch.arange(count) + step * count) % len(batch))
        own = self.forward_only(self.model, few, check, self.settings.cut)
        few = on_uncut_law(few, own.log_kept)
        return mismatch_of(few, own.logprobs, few.response_mask)

    def _prepare(
        self, mini: RolloutBatch, step: int, number: int, check: Check
    ) -> tuple[RolloutBatch, PreparedMini]:
        """Counts and whole-mini-batch statistics; the policy's present log-probs if asked for."""
        if self.objective.needs_prepare():
            # Before the first update the old policy *is* the present one.
            if number == 0 and mini.entropy is not None and not self.objective.bypass_old:
                mini = mini.with_columns(logprobs_now=mini.column("old_logprobs"))
            else:
                now = self.forward_only(self.model, mini, check)
                mini = mini.with_columns(logprobs_now=now.logprobs, entropy=now.entropy)
        draw = generator(self.settings.seed, "prepare", step, number)
        return mini, self.objective.prepare(mini, draw, len(self._micro_rows(mini)))

    def _phase_end(
        self, batch: RolloutBatch, metrics: dict[str, float], check: Check
    ) -> dict[str, float]:
        """Tell the losses that this batch is done; measure how far it moved the policy if asked."""
        losses = [term.loss for term in self.objective.terms]
        found: dict[str, float] = {}
        if any(loss.wants_phase_kl() for loss in losses):
            now = self.forward_only(self.model, batch, check)
            gap = (now.logprobs - batch.column("old_logprobs"))[batch.mask.bool()].double()
            if gap.numel():
                found["kl/phase_k3"] = float((gap.clamp(-20, 20).expm1() - gap).mean())
        for loss in losses:
            loss.on_phase_end(metrics | found)
        return found

    def refresh_reference(self) -> None:
        """Make the present policy the reference."""
        assert self.reference is not None, "there is no reference to refresh"
        put_away(self.model)
        put_away(self.reference)
        self.reference.load_state_dict(self.model.state_dict())

    def reference_logprobs(self, batch: RolloutBatch, check: Check = _nothing) -> Tensor:
        """Log-probs [B, T] of the frozen reference policy."""
        assert self.reference is not None, "a KL term needs a reference model"
        return self.forward_only(self.reference, batch, check).logprobs

    def forward_only(
        self,
        model: PreTrainedModel,
        batch: RolloutBatch,
        check: Check = _nothing,
        cut: Cut = UNCUT,
        products: SampledOutputs | None = None,
    ) -> ResponseForward:
        """Log-probs and entropy [B, T] of `model` without gradient, in micro-batches."""
        size, most = self.settings.micro_batch_size, self.settings.max_tokens
        temperature = self.settings.temperature
        return forward_only(model, batch, size, temperature, check, cut, most, self.ranks, products)

    def _micro_rows(self, batch: RolloutBatch) -> list[Tensor]:
        """Row indices of each micro-batch, of all ranks."""
        return self.settings.micro_rows(batch, self.ranks.size)

    def sum_pi_squared(self, batch: RolloutBatch, check: Check = _nothing) -> Tensor:
        """The policy's sum of squared probabilities [B, T] at each response token."""
        rows, parts = [], []
        for index, counts in self.ranks.share(self._micro_rows(batch)):
            check()
            micro, temperature = batch.select(index), self.settings.temperature
            found = response_sum_pi_squared(self.model, micro, temperature=temperature)
            if counts:
                rows.append(index)
                parts.append(found)
        put_away(self.model)
        return self.ranks.add(in_place(rows, parts, batch.response_ids.shape))

    def _accumulate(
        self,
        mini: RolloutBatch,
        prepared: PreparedMini,
        kl_coef: float,
        sums: MetricSums,
        idle: Tensor,
        check: Check = _nothing,
        products: SampledOutputs | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Forward and backward over the micro-batches of one mini-batch, without its `idle` rows.

        What `products` has of them is not computed again, and forgotten with the last of them.
        Returns log-probs and entropy [B, T] of the forward passes (rows without loss stay 0) and,
        when these are the old policy's too, the log mass that a cut of the rollout keeps.
        """
        seen = torch.zeros_like(mini.rollout_logprobs)
        entropy = torch.zeros_like(seen)
        cut = self.settings.cut if mini.old_logprobs is None else UNCUT
        log_kept = torch.zeros_like(seen) if cut else None
        active = (~idle).nonzero().squeeze(1)
        if len(active) == 0 and mini.mask.any():
            self.optimizer.fill_gradients()
        parts = self._micro_rows(mini.select(active)) if len(active) else []
        order = [active[part] for part in parts if mini.mask[active[part]].any()]
        for rows, counts in self.ranks.share(order):
            check()
            micro = mini.select(rows)
            temperature, last = self.settings.temperature, rows is order[-1]
            states, out = response_pass(
                self.model, micro, temperature=temperature, cut=cut, outputs=products, last=last
            )
            if counts:
                seen[rows] = out.logprobs.detach().to(seen)
                entropy[rows] = out.entropy.detach().to(seen)
            if log_kept is not None and out.log_kept is not None:
                if counts:
                    log_kept[rows] = out.log_kept.to(log_kept)
                micro = on_uncut_law(micro, out.log_kept)
            if micro.old_logprobs is None:
                micro = micro.with_columns(old_logprobs=out.logprobs.cpu())
            loss = self.objective.loss(
                out.logprobs.cpu(),
                out.entropy.cpu(),
                micro,
                prepared.rows(rows),
                kl_coef,
                self._exact_kl(micro, states, kl_coef),
            )
            if counts:
                record_micro(sums, loss, out, micro)
                sums.add_scalar("train/reused_rows", float(len(rows) * out.reused))
            share = loss.total if counts else 0.0 * loss.total
            share.backward()  # type: ignore[no-untyped-call]
        add = self.ranks.add
        return add(seen), add(entropy), None if log_kept is None else add(log_kept)

    def _exact_kl(self, micro: RolloutBatch, states: States, kl_coef: float) -> Tensor | None:
        """KL [B, T] to the reference over the whole vocabulary, for a plugin that wants that."""
        kl, temperature = self.objective.kl, self.settings.temperature
        if kl is None or not kl.from_logits or kl_coef <= 0:
            return None
        assert self.reference is not None, "a KL term needs a reference model"
        return response_exact_kl(
            self.model, self.reference, micro, temperature, kl.kl_of_logits, states=states
        ).cpu()
