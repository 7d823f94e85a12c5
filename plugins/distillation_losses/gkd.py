"""GKD: a divergence from the teacher's distribution at each token that the policy sampled."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from posttrain.core.contracts import DistillationLoss, PluginConfig, RowLoss, TeacherRows
from posttrain.core.math.correction import bounded_exp
from posttrain.core.math.divergence import (
    ABSENT,
    Divergence,
    divergence,
    gathered,
    relative_entropy,
    renormalised,
    union,
    with_tail,
)


class GkdConfig(PluginConfig):
    """Settings of `gkd`."""

    divergence: Divergence = Field(
        default="jsd",
        description="forward: KL(teacher || policy); reverse: KL(policy || teacher); jsd: "
        "generalised Jensen-Shannon; jeffreys: a weighted sum of the first two",
    )
    beta: float = Field(
        default=0.5,
        ge=0.01,
        le=0.99,
        description="the teacher's share in jsd, which becomes 0 at both ends: there use forward "
        "or reverse, which are not its limits",
    )
    weight: float = Field(default=0.5, ge=0, le=1, description="of forward in jeffreys")
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="both logits are divided by it, in addition to the sampling temperature",
    )
    scale_tau2: bool = Field(
        default=False, description="multiply by temperature^2, which keeps the gradient's size"
    )
    support: Literal["full", "topk", "sampled"] = Field(
        default="full",
        description="full: the whole vocabulary; topk: a few candidates; sampled: the sampled "
        "token alone, of reverse, by its policy gradient",
    )
    top_k: int = Field(default=32, ge=1, le=1_000_000, description="candidates of topk")
    of: Literal["teacher", "student", "union", "sampled", "teacher_and_sampled"] | None = Field(
        default=None,
        description="whose candidates; student and union need the teacher's weights, not a server; "
        "null = teacher for forward, student for reverse, union for the others",
    )
    rest: Literal["tail", "renorm", "raw", "sampled_tail"] = Field(
        default="tail",
        description="of topk, the mass outside: tail = one more bucket; renorm = left out; raw = "
        "left out of the sum alone; sampled_tail = estimated from the sampled token, unbiased",
    )
    log_prob_floor: float | None = Field(
        default=None,
        ge=-1_000,
        le=0,
        description="of topk: least log-prob of a candidate, no gradient below; null = off",
    )
    floor_at_zero: bool = Field(
        default=False, description="a negative value, which raw may have, counts as 0 (verl)"
    )
    clamp: float | None = Field(
        default=None,
        gt=0,
        le=1_000,
        description="most that a token's value counts, of `sampled` its factor sg(log p_S - "
        "log p_T); null = off",
    )
    ratio_cap: float | None = Field(
        default=None,
        gt=0,
        le=1_000,
        description="weigh a token by min(p / p_old, this), held constant (SDPO: 2); null = off",
    )

    @model_validator(mode="after")
    def _has_a_gradient(self) -> GkdConfig:
        alone = self.candidates_of in ("teacher", "student") and self.top_k == 1
        alone = alone or self.candidates_of == "sampled"
        if self.support == "topk" and alone and self.rest == "renorm":
            raise ValueError(
                "one candidate renormalised is 1 for both, so there is nothing to learn; use rest: "
                "tail, or a larger top_k"
            )
        if self.support == "sampled" and self.divergence != "reverse":
            raise ValueError(
                f"support: sampled is an estimate of reverse, not of {self.divergence}; set "
                "divergence: reverse, or support: topk"
            )
        if self.support == "sampled" and self.floor_at_zero:
            raise ValueError(
                "with support: sampled a token's value is an estimate of both signs, and only "
                "their mean is a divergence; remove floor_at_zero"
            )
        if self.rest == "sampled_tail" and self.divergence not in ("forward", "reverse"):
            raise ValueError(
                f"sampled_tail is known for forward and reverse, not for {self.divergence}; use "
                "rest: tail"
            )
        if self.temperature != 1 and not self.needs_logits:
            raise ValueError(
                "the teacher's log-probs of candidates are at the sampling temperature; set "
                "temperature: 1, or support: full"
            )
        return self

    @model_validator(mode="after")
    def _is_read(self) -> GkdConfig:
        readers = {"beta": ("divergence", "jsd"), "weight": ("divergence", "jeffreys")}
        for_topk = dict.fromkeys(("top_k", "of", "rest", "log_prob_floor"), ("support", "topk"))
        for name, (field, reader) in {**readers, **for_topk}.items():
            usual = GkdConfig.model_fields[name].default
            if getattr(self, name) != usual and getattr(self, field) != reader:
                raise ValueError(
                    f"{name} is of {field}: {reader} and changes nothing with {field}: "
                    f"{getattr(self, field)}; set {name}: {'null' if usual is None else usual}, "
                    f"or {field}: {reader}"
                )
        return self

    @property
    def candidates_of(self) -> str:
        """Whose candidates a support of topk has."""
        by_divergence = {"forward": "teacher", "reverse": "student"}
        return self.of or by_divergence.get(self.divergence, "union")

    @property
    def needs_logits(self) -> bool:
        """Whether the teacher's weights are needed, not only what a server says."""
        if self.support == "topk":
            return self.candidates_of in ("student", "union")
        return self.support == "full"


class GkdLoss(DistillationLoss[GkdConfig]):
    """D(p_T, p_S) per token [N]: forward sum p_T (l_T - l_S), reverse sum p_S (l_S - l_T), jsd
    beta KL(T || M) + (1 - beta) KL(S || M) with M = (1 - beta) p_S + beta p_T.

    l = log p in nats, S the policy, T the teacher, who gets no gradient. With support topk the sums
    are over K candidates and what `rest` says. Source: arXiv:2306.13649 (GKD); the top-k forms of
    TRL and verl; sampled_tail arXiv:2602.04417 with both gradients exact.
    """

    name = "gkd"
    Config = GkdConfig

    def reads(self) -> Literal["logits", "topk", "sampled"]:
        config = self.config
        if config.needs_logits:
            return "logits"
        if config.support == "sampled" or config.candidates_of == "sampled":
            return "sampled"
        return "topk"

    def num_candidates(self) -> int:
        return self.config.top_k if self.reads() == "topk" else 0

    def required_columns(self) -> frozenset[str]:
        config, columns = self.config, super().required_columns()
        with_sampled = (
            config.candidates_of == "teacher_and_sampled" or config.rest == "sampled_tail"
        )
        if config.support == "topk" and with_sampled and not config.needs_logits:
            columns |= {"teacher_logprobs"}
        return columns | {"old_logprobs"} if self._is_weighed else columns

    @property
    def _is_weighed(self) -> bool:
        """Whether the policy that sampled is asked for."""
        config = self.config
        return config.ratio_cap is not None or (
            config.support == "topk" and config.rest == "sampled_tail"
        )

    def rows(self, logits: Tensor, teacher: TeacherRows) -> RowLoss:
        """The divergence [N] of `logits` [N, V]; masses and overlap of candidates as metrics."""
        config = self.config
        log_s = torch.log_softmax(logits / config.temperature, dim=-1)
        log_t = None
        if teacher.logits is not None:
            log_t = torch.log_softmax(teacher.logits / config.temperature, dim=-1).detach()
        own = log_s.gather(1, teacher.sampled[:, None]).squeeze(1)
        scored, metrics = torch.ones_like(own, dtype=torch.bool), {}
        if config.support == "full":
            assert log_t is not None, "a loss that reads logits is given them"
            loss = divergence(log_s, log_t, config.divergence, self._share)
            metrics["distil/teacher_entropy"] = _entropy(log_t)
        elif config.support == "sampled":
            said = self._of_sampled(teacher, log_t)
            scored = said.isfinite()
            value = self._bounded((own - torch.where(scored, said, 0.0)).detach())
            loss = value * own
        else:
            loss, scored, metrics = self._of_candidates(log_s, log_t, own, teacher)
        if config.support != "sampled":
            value = loss = self._bounded(loss)
        metrics["distil/divergence"] = value.detach()
        if config.ratio_cap is not None:
            assert teacher.old_logprobs is not None
            loss = loss * bounded_exp(own.detach() - teacher.old_logprobs).clamp(
                max=config.ratio_cap
            )
        return RowLoss(loss, scored, metrics)

    @property
    def _share(self) -> float:
        return self.config.weight if self.config.divergence == "jeffreys" else self.config.beta

    def _bounded(self, value: Tensor) -> Tensor:
        """Values [N] between the bounds of the config, and on its scale."""
        config = self.config
        if config.floor_at_zero:
            value = value.clamp(min=0)
        if config.clamp is not None:
            value = value.clamp(-config.clamp, config.clamp)
        return value * config.temperature**2 if config.scale_tau2 else value

    def _of_sampled(self, teacher: TeacherRows, log_t: Tensor | None) -> Tensor:
        """The teacher's log-prob [N] of the sampled tokens."""
        if log_t is not None:
            return log_t.gather(1, teacher.sampled[:, None]).squeeze(1)
        assert teacher.logprobs is not None, "the column teacher_logprobs is filled"
        return teacher.logprobs

    def _candidates(
        self, log_s: Tensor, log_t: Tensor | None, teacher: TeacherRows
    ) -> tuple[Tensor, Tensor]:
        """Ids [N, K] and the teacher's log-probs of them."""
        of, k = self.config.candidates_of, min(self.config.top_k, log_s.shape[1])
        sampled = teacher.sampled[:, None]
        if log_t is None:
            if of == "sampled":
                return sampled, self._of_sampled(teacher, None)[:, None]
            assert teacher.topk_ids is not None and teacher.topk_logprobs is not None
            ids, said = teacher.topk_ids, teacher.topk_logprobs
            if of == "teacher_and_sampled":
                new = (ids != sampled).all(dim=1, keepdim=True)
                ids = torch.cat([ids, torch.where(new, sampled, ABSENT)], dim=1)
                known = self._of_sampled(teacher, None)[:, None]
                said = torch.cat([said, torch.where(new, known, -torch.inf)], dim=1)
            return ids, said
        best = log_t.topk(k, dim=1).indices
        chosen = {
            "teacher": (best,),
            "student": (log_s.detach().topk(k, dim=1).indices,),
            "union": (best, log_s.detach().topk(k, dim=1).indices),
            "sampled": (sampled,),
            "teacher_and_sampled": (best, sampled),
        }[of]
        ids = union(*chosen)
        return ids, gathered(log_t, ids)

    def _of_candidates(
        self, log_s: Tensor, log_t: Tensor | None, own: Tensor, teacher: TeacherRows
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        config = self.config
        ids, said = self._candidates(log_s, log_t, teacher)
        ids = torch.where(said.isfinite(), ids, ABSENT)
        scored = (ids != ABSENT).any(dim=1)
        # A token without any candidate has no loss; one that is equal on both sides stands there.
        ids = torch.where(scored[:, None], ids, teacher.sampled[:, None])
        held = torch.where(scored[:, None], said, gathered(log_s.detach(), ids)).to(log_s.dtype)
        mine, theirs = gathered(log_s, ids), torch.where(ids == ABSENT, -torch.inf, held)
        metrics = {
            "distil/student_mass": mine.detach().exp().sum(dim=1),
            "distil/teacher_mass": theirs.exp().sum(dim=1),
            "distil/overlap": self._overlap(log_s, ids),
        }
        if config.log_prob_floor is not None:
            mine, theirs = (
                torch.where(ids == ABSENT, each, each.clamp(min=config.log_prob_floor))
                for each in (mine, theirs)
            )
        tail: Tensor | float = 0.0
        if config.rest == "tail":
            mine, theirs = with_tail(mine), with_tail(theirs)
        elif config.rest == "renorm":
            mine, theirs = renormalised(mine), renormalised(theirs)
        elif config.rest == "sampled_tail":
            tail = self._sampled_tail(own, self._of_sampled(teacher, log_t), teacher)
            tail = torch.where((ids == teacher.sampled[:, None]).any(dim=1), 0.0, tail)
        metrics["distil/teacher_entropy"] = _entropy(theirs)
        return divergence(mine, theirs, config.divergence, self._share) + tail, scored, metrics

    def _sampled_tail(self, own: Tensor, said: Tensor, teacher: TeacherRows) -> Tensor:
        """An unbiased estimate [N], in value and gradient, of what lies outside the candidates."""
        held, said = own.detach(), torch.where(said.isfinite(), said, own.detach())
        if self.config.divergence == "reverse":
            found = (held - said) * (own - held).exp() + (own - held)
        else:
            found = bounded_exp(said - held) * (said - own)
        assert teacher.old_logprobs is not None
        return found * bounded_exp(held - teacher.old_logprobs)

    def _overlap(self, log_s: Tensor, ids: Tensor) -> Tensor:
        """The share [N] of the policy's best candidates that are among `ids` [N, K]."""
        k = min(self.config.top_k, log_s.shape[1])
        rows, size = log_s.shape
        among = torch.zeros(rows, size + 1, dtype=torch.bool, device=ids.device)
        among.scatter_(1, torch.where(ids == ABSENT, size, ids), True)
        best = log_s.detach().topk(k, dim=1).indices
        return among.gather(1, best).to(log_s.dtype).mean(dim=1)


def _entropy(logprobs: Tensor) -> Tensor:
    """-sum p log p [N] of `logprobs` [N, M]."""
    return -relative_entropy(logprobs, torch.zeros_like(logprobs))
