"""The learner: one rollout batch in, optimizer steps out, exact however the work is split.

Every term of the loss is divided by counts of the *global* mini-batch, taken before its first
micro-batch, so the summed gradients equal that of one big batch. What the loss is made of is the
objective's business; here are the epochs, mini-batches and micro-batches. The columns that the loss
reads were filled before, by `columns.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.core.batch import RolloutBatch
from posttrain.core.math.nucleus import Cut
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.models.sharded import put_away
from posttrain.core.runtime.seeding import generator
from posttrain.core.training.columns import update_columns, with_old_logprobs
from posttrain.core.training.distillation import GAP, LOGIT_GRADIENT, Distillation
from posttrain.core.training.exact_kl import response_exact_kl, response_sum_pi_squared
from posttrain.core.training.finite import not_finite, note_suspects
from posttrain.core.training.forward import (
    DISTILLED,
    UNCUT,
    ResponseForward,
    States,
    forward_only,
    response_pass,
)
from posttrain.core.training.metrics import MetricSums
from posttrain.core.training.moving_reference import MovingReference
from posttrain.core.training.natural_gradient import NaturalGradient
from posttrain.core.training.objective import (
    Distilled,
    MicroLoss,
    Objective,
    PreparedMini,
    positive_share,
)
from posttrain.core.training.optim import MasterOptimizer, StepReport, StoredOptimizer
from posttrain.core.training.ranks import ALONE, Ranks, add_gradients, in_place
from posttrain.core.training.sft import PtxTerm
from posttrain.core.training.teacher_pass import TeacherScores, candidate_pass
from posttrain.core.training.token_weights import HeardWeights
from posttrain.core.training.updates import (
    Check,
    KlGuard,
    RemotePolicy,
    UpdateResult,
    UpdateSettings,
    no_check,
)


@dataclass
class Progress:
    """What the updates on one rollout batch have come to so far; begun by `of`.

    `step` and `kl_coef` are the same for all of them. `products` are what is known of the first
    optimizer step's pass. The other fields are described in `UpdateResult`.
    """

    step: int
    kl_coef: float
    products: SampledOutputs | None
    first_logprobs: Tensor | None
    seen: ResponseForward
    seen_by: Tensor
    first_pass: tuple[Tensor, ResponseForward] | None = None
    sums: MetricSums = field(default_factory=MetricSums)
    report: StepReport | None = None
    norm_sum: float = 0.0
    rate_factor: float = 1.0
    num_updates: int = 0

    @classmethod
    def of(
        cls,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        products: SampledOutputs | None = None,
    ) -> Progress:
        """Before the first update."""
        seen = ResponseForward.full(torch.empty(batch.mask.shape), float("nan"))
        unread = torch.full((len(batch),), -1)
        return cls(step, kl_coef, products, batch.old_logprobs, seen, unread)

    def saw(self, rows: Tensor, read: ResponseForward, number: int) -> None:
        """Note what the update `number` `read` [n, T] in `rows` [n] of the batch."""
        for name in DISTILLED:
            if getattr(read, name) is not None and getattr(self.seen, name) is None:
                unread = torch.full_like(self.seen.logprobs, float("nan"))
                self.seen = self.seen.having({name: unread})
        self.seen.put(rows, read)
        self.seen_by[rows] = number

    def forget_products(self) -> None:
        """The first mini-batch has been through, and the policy moves."""
        if self.products is not None:
            self.products.forget()
            self.products = None

    def took(self, report: StepReport, own: MetricSums) -> None:
        """Count an optimizer step with the metrics of its mini-batch.

        Metrics of a step that is skipped, because its numbers are not finite, count nowhere.
        """
        self.report = report
        if report.non_finite:
            self.sums.add_scalar("grad/non_finite", 1.0)
            return
        self.sums.merge(own)
        self.norm_sum += report.grad_norm
        self.num_updates += 1
        self.sums.add_scalar("train/skipped_empty", float(report.skipped))
        self.sums.add_scalar("grad/clipped", float(report.grad_clipped))

    def metrics(self) -> dict[str, float]:
        """Of all updates so far; what sums over the parts of an update is given per update."""
        metrics = positive_share(self.sums.result())
        for name in [n for n in metrics if n.startswith("loss/")] + ["grad/clipped"]:
            if name in metrics:
                metrics[name] /= max(1, self.num_updates)
        metrics["train/updates"] = float(self.num_updates)
        if self.report is not None:
            if self.num_updates:
                metrics["grad/norm"] = self.norm_sum / self.num_updates
            metrics["lr"] = self.report.learning_rate
        return metrics


def record_micro(
    sums: MetricSums, loss: MicroLoss, out: ResponseForward, micro: RolloutBatch, rows: Tensor
) -> None:
    """Add a micro-batch's share of every metric; `rows` [n] are its rows in the mini-batch."""
    mask = micro.mask
    note_suspects(sums, loss.total, rows.tolist(), out.logprobs, micro.advantages)
    for name, value in (*loss.parts.items(), *loss.pulls.items()):
        sums.add_scalar(name, value)
    sums.add_scalar("loss/total", loss.total.detach())
    sums.add("entropy/mean", out.entropy.cpu(), mask)
    sums.add("entropy/approx", -out.logprobs.detach().cpu(), mask)
    if micro.ref_logprobs is not None:
        gap = out.logprobs.detach().cpu() - micro.ref_logprobs
        sums.add("kl/ref_k1", gap, mask)
        sums.add("kl/ref_k3", (-gap).clamp(-20, 20).exp() - 1 + gap, mask)
    for name, (value, where) in loss.tokens.items():
        if name == "ratio":
            sums.add("ratio/mean", value, where)
            sums.add_extremes("ratio", value, where)
        else:
            sums.add(name, value, where)


class Learner:
    """Owns the policy, its frozen reference (when a KL term needs it) and the optimizer.

    `trust_region` takes the place of AdamW for a loss with a step of its own; `ptx` adds the
    pre-training term; `guard` bounds how far one batch may move the policy; `moving` moves the
    reference, or a teacher that follows the policy. `teachers` are all that the stage has, in
    order; one whose weights are elsewhere is None, one may be the policy itself. `matched` are, for
    a loss of texts, the tokens [M, 2] that each shares with the policy. Of several `ranks` each has
    a learner, and all are called alike. `check` runs between micro-batches (it raises to stop).
    """

    source: RemotePolicy | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        objective: Objective,
        settings: UpdateSettings,
        reference: PreTrainedModel | None = None,
        *,
        moving: MovingReference | None = None,
        guard: KlGuard | None = None,
        ptx: PtxTerm | None = None,
        trust_region: NaturalGradient | None = None,
        ranks: Ranks = ALONE,
        check: Check = no_check,
        teachers: Mapping[str, PreTrainedModel | None] | None = None,
        matched: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.optimizer, self.ranks, self.check = model, optimizer, ranks, check
        self.objective, self.settings, self.reference = objective, settings, reference
        self.moving = moving
        self.guard, self.ptx, self.trust_region = guard, ptx, trust_region
        self.teachers, self.matched = teachers or {}, matched or {}

    @property
    def stored_reference(self) -> StoredOptimizer | None:
        """What a checkpoint keeps of a reference that moves."""
        return self.moving

    @property
    def stored(self) -> StoredOptimizer:
        """What a checkpoint keeps of the policy."""
        return self.optimizer

    def update(
        self,
        batch: RolloutBatch,
        step: int,
        kl_coef: float,
        products: SampledOutputs | None = None,
    ) -> UpdateResult:
        """All epochs and mini-batches over `batch`, which has the columns of `update_columns`.

        A batch without `old_logprobs` has one optimizer step, and takes them from the forward pass
        of that step, which sees the policy that sampled. `products` are what the present policy
        computed when it sampled `batch`; the first optimizer step does not compute it again, and
        they are empty afterwards.
        """
        settings, done = self.settings, Progress.of(batch, step, kl_coef, products)
        needed = update_columns(self.objective, settings, kl_coef) - {"is_weight"}
        batch.require({"advantages", "mask"} | needed, "the learner")
        version = None if self.moving is None else float(self.moving.version)
        parts = settings.mini_batches(batch, settings.seed, "mini_batches", step)
        for number, (rows, mini) in enumerate(parts):
            mini, prepared = self._prepare(done, mini, number)
            done.sums.add_means(prepared.metrics)
            if self.trust_region is not None:
                self._trust_region_step(done, mini, prepared, number, rows)
            elif not self._one_update(done, mini, prepared, number, rows):
                break
        metrics = done.metrics()
        if self.moving is not None and version is not None:
            follows = self.moving.reference is self.reference
            metrics["kl/ref_version" if follows else "distil/teacher_version"] = version
        if self.guard is not None:
            metrics["guard/exceeded"] = metrics.get("guard/exceeded", 0.0)
            metrics["guard/rate_factor"] = done.rate_factor
        first = batch.rollout_logprobs if done.first_logprobs is None else done.first_logprobs
        metrics |= self._phase_end(batch.with_columns(old_logprobs=first), metrics)
        return UpdateResult(metrics, first, done.seen, done.seen_by, done.first_pass)

    def _one_update(
        self,
        done: Progress,
        mini: RolloutBatch,
        prepared: PreparedMini,
        number: int,
        of_batch: Tensor,
    ) -> bool:
        """One optimizer step on a mini-batch; False when the guard gives up the rest of the batch.

        `number` is the update's on the rollout batch; `of_batch` are the mini-batch's rows in it.
        """
        own = MetricSums()
        heard = HeardWeights(mini) if self.settings.token_weights else None
        idle = self.settings.idle_rows(self.objective, mini, done.kl_coef)
        seen = self._accumulate(done, mini, prepared, idle, own, heard)
        done.forget_products()
        own = self.ranks.merge(own)
        if heard is not None:
            heard.record(own, self.ranks)
        own.add_scalar("train/idle_rows", float((idle & mini.mask.any(dim=1)).sum()))
        if done.first_logprobs is None:
            done.first_logprobs = seen.logprobs
        rows = (~idle).nonzero().squeeze(1)
        read = seen.rows(rows)
        done.saw(of_batch[rows], read, number)
        if done.first_pass is None and len(rows):
            done.first_pass = (of_batch[rows], read)
        if self.guard is not None and self.guard.exceeded(own.mean("kl/old_k3", default=0.0)):
            done.sums.add_scalar("guard/exceeded", 1.0)
            if self.guard.action == "stop":
                self.optimizer.zero_grad()
                return False
            done.rate_factor *= self.guard.factor
        if self.ptx is not None:
            self.ptx.accumulate(self.model, done.step, number, own, self.check, self.ranks)
        loss = sum(own.mean(name, default=0.0) for name in ("loss/total", "loss/term/ptx"))
        report = self.optimizer.step(done.rate_factor, loss=loss, rows=own.blamed(of_batch))
        if not report.non_finite:
            self._stepped(own)
        done.took(report, own)
        return True

    def _stepped(self, own: MetricSums) -> None:
        """Let follow what follows a step that was taken: the reference, the entropy bonus.

        The metrics `own` of the step get the coefficient that the bonus had in it.
        """
        if self.moving is not None:
            self.moving.after_step()
        if (controller := self.objective.entropy_controller) is not None:
            own.add_means({"entropy/coef": controller.coefficient()})
            controller.update(own.mean("entropy/mean", default=float("nan")))

    def _trust_region_step(
        self,
        done: Progress,
        mini: RolloutBatch,
        prepared: PreparedMini,
        number: int,
        of_batch: Tensor,
    ) -> None:
        """As `_one_update`, by a loss with a step of its own, which numbers stop that are not
        finite.
        """
        assert self.trust_region is not None
        own = MetricSums()
        heard = HeardWeights(mini) if self.settings.token_weights else None
        draw = generator(self.settings.seed, "trust_region", done.step, number)

        def record(
            loss: MicroLoss, out: ResponseForward, micro: RolloutBatch, rows: Tensor
        ) -> None:
            record_micro(own, loss, out, micro, rows)
            if heard is not None:
                heard.listen(loss, rows)

        taken = self.trust_region.step(mini, self.objective, prepared, draw, record)
        if heard is not None:
            heard.record(own)
        old = mini.column("old_logprobs")
        entropy = torch.full_like(old, float("nan")) if mini.entropy is None else mini.entropy
        done.saw(of_batch, ResponseForward(old, entropy), number)
        if wrong := not_finite(own.mean("loss/total", default=0.0), taken["grad/norm"]):
            self.optimizer.note_non_finite(wrong, own.blamed(of_batch))
            done.sums.add_scalar("grad/non_finite", 1.0)
            return
        self._stepped(own)
        done.sums.merge(own)
        done.sums.add_means(taken)
        done.num_updates += 1

    def _prepare(
        self, done: Progress, mini: RolloutBatch, number: int
    ) -> tuple[RolloutBatch, PreparedMini]:
        """Counts and statistics of a mini-batch; its present log-probs if a loss needs them."""
        if self.objective.needs_prepare():
            # Before the first update the old policy *is* the present one.
            if number == 0 and mini.entropy is not None and not self.objective.bypass_old:
                mini = mini.with_columns(logprobs_now=mini.column("old_logprobs"))
            else:
                now = self.forward_only(self.model, mini)
                mini = mini.with_columns(logprobs_now=now.logprobs, entropy=now.entropy)
        draw = generator(self.settings.seed, "prepare", done.step, number)
        num_parts = len(self.settings.micro_rows(mini, self.ranks.size))
        return mini, self.objective.prepare(mini, draw, num_parts, done.step)

    def _phase_end(self, batch: RolloutBatch, metrics: dict[str, float]) -> dict[str, float]:
        """Report the finished batch to the losses; measure how far it moved the policy if asked."""
        losses = [term.loss for term in self.objective.terms]
        found: dict[str, float] = {}
        if any(loss.wants_phase_kl() for loss in losses):
            now = self.forward_only(self.model, batch)
            gap = (now.logprobs - batch.column("old_logprobs"))[batch.mask.bool()].double()
            gap = gap[gap.isfinite()]  # rows of a step that was skipped have none
            if gap.numel():
                found["kl/phase_k3"] = float((gap.clamp(-20, 20).expm1() - gap).mean())
        for loss in losses:
            loss.on_phase_end(metrics | found)
        return found

    def refresh_reference(self) -> None:
        """Make the present policy the reference."""
        assert self.moving is not None, "there is no reference to refresh"
        put_away(self.model)
        self.moving.move(1.0)

    def reference_logprobs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs [B, T] of the frozen reference policy."""
        assert self.reference is not None, "a KL term needs a reference model"
        return self.forward_only(self.reference, batch).logprobs

    def policy_pass(
        self, batch: RolloutBatch, products: SampledOutputs | None = None
    ) -> ResponseForward:
        """The present policy's log-probs, entropy and probability kept by top-k and top-p."""
        return self.forward_only(self.model, batch, self.settings.cut, products)

    def forward_only(
        self,
        model: PreTrainedModel,
        batch: RolloutBatch,
        cut: Cut = UNCUT,
        products: SampledOutputs | None = None,
    ) -> ResponseForward:
        """Log-probs and entropy [B, T] of `model` without gradient, in micro-batches."""
        return forward_only(
            model,
            batch,
            self.settings.micro_batch_size,
            self.settings.temperature,
            self.check,
            cut,
            self.settings.max_tokens,
            self.ranks,
            products,
        )

    def sum_pi_squared(self, batch: RolloutBatch) -> Tensor:
        """The policy's sum of squared probabilities [B, T] at each response token."""
        rows, parts = [], []
        for index, counts in self.ranks.share(self.settings.micro_rows(batch, self.ranks.size)):
            self.check()
            micro, temperature = batch.select(index), self.settings.temperature
            found = response_sum_pi_squared(self.model, micro, temperature=temperature)
            if counts:
                rows.append(index)
                parts.append(found)
        put_away(self.model)
        return self.ranks.add(in_place(rows, parts, batch.response_ids.shape))

    def _accumulate(
        self,
        done: Progress,
        mini: RolloutBatch,
        prepared: PreparedMini,
        idle: Tensor,
        sums: MetricSums,
        heard: HeardWeights | None = None,
    ) -> ResponseForward:
        """Forward and backward over the micro-batches of one mini-batch, without its `idle` rows.

        What `done.products` has of them is not computed again, and forgotten with the last of them.
        Returns what the forward passes gave, 0 in rows without loss; the probability kept by top-k
        and top-p where the passes are those of the old policy too.
        """
        cut = self.settings.cut if mini.old_logprobs is None else UNCUT
        slopes = self.settings.measures_slopes(done.step)
        kept = ("log_kept",) if cut else ()
        distils = DISTILLED if self.objective.distillation is not None and slopes else ()
        seen = ResponseForward.full(mini.rollout_logprobs, 0.0, *kept, *distils)
        active = (~idle).nonzero().squeeze(1)
        if len(active) == 0 and mini.mask.any():
            self.optimizer.fill_gradients()
        parts = []
        if len(active):
            parts = self.settings.micro_rows(mini.select(active), self.ranks.size)
        observed = self.objective.reads_observed(mini)
        learned = mini.mask + mini.column("obs_mask") if observed else mini.mask
        order = [active[part] for part in parts if learned[active[part]].any()]
        for rows, counts in self.ranks.share(order):
            self.check()
            micro = mini.select(rows)
            states, out = response_pass(
                self.model,
                micro,
                temperature=self.settings.temperature,
                cut=cut,
                outputs=done.products,
                last=rows is order[-1],
                observed=observed,
            )
            if micro.old_logprobs is None:
                micro = with_old_logprobs(micro, out)
            distilled = self._distilled(micro, states, slopes)
            loss = self.objective.loss(
                out.logprobs.cpu(),
                out.entropy.cpu(),
                micro,
                prepared.rows(rows),
                done.kl_coef,
                self._exact_kl(micro, states, done.kl_coef),
                None if out.observed is None else out.observed.cpu(),
                distilled,
            )
            if counts:
                if slopes and distilled is not None:
                    values = distilled.seen(LOGIT_GRADIENT, GAP)
                    out = out.having(dict(zip(DISTILLED, values, strict=True)))
                seen.put(rows, out)
                record_micro(sums, loss, out, micro, rows)
                if heard is not None:
                    heard.listen(loss, rows)
                sums.add_scalar("train/reused_rows", float(len(rows) * out.reused))
            add_gradients(loss.total, counts)
        return seen.map(self.ranks.add)

    def teacher_pass(self, name: str, batch: RolloutBatch, top_k: int) -> TeacherScores:
        """As in `PolicyLearner`."""
        batch = batch.for_teachers()
        teacher, temperature = self.teachers[name], self.settings.temperature
        assert teacher is not None, "its weights are in this process"
        if not top_k:
            return TeacherScores(self.forward_only(teacher, batch).logprobs)
        order = self.settings.micro_rows(batch, self.ranks.size)
        return candidate_pass(
            teacher,
            batch,
            order,
            top_k=top_k,
            temperature=temperature,
            check=self.check,
            ranks=self.ranks,
        )

    def _distilled(self, micro: RolloutBatch, states: States, slopes: bool) -> Distilled | None:
        """The divergence [B, T] from the teachers, for a term of it."""
        term = self.objective.distillation
        if term is None:
            return None
        temperature = self.settings.temperature
        made = Distillation(self.model, term.loss, self.teachers, self.matched, temperature)
        return made.of(micro, states, slopes=slopes)

    def _exact_kl(self, micro: RolloutBatch, states: States, kl_coef: float) -> Tensor | None:
        """KL [B, T] to the reference over the whole vocabulary, for a plugin that wants that."""
        kl, temperature = self.objective.kl, self.settings.temperature
        if kl is None or not kl.from_logits or kl_coef <= 0:
            return None
        assert self.reference is not None, "a KL term needs a reference model"
        return response_exact_kl(
            self.model, self.reference, micro, temperature, kl.kl_of_logits, states=states
        ).cpu()
