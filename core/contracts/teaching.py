"""What is learned from a teacher: an advantage that its log-probs change, a divergence from it.

Axes: B sequences, T response tokens, N tokens, V vocabulary, K candidates of a teacher.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts.advantages import Advantages
from posttrain.core.contracts.base import ConfigT, Plugin
from posttrain.core.contracts.columns import TEXT_COLUMNS
from posttrain.core.math.alignment import members, whole_groups
from posttrain.core.math.teacher_gap import taught


class AdvantageTransform(Plugin[ConfigT]):
    """Changes the advantages that an estimator made, without gradient.

    It comes after the estimator's whitening and before the mask. A stage may have several, which
    are applied in the order of the config.
    """

    kind = "advantage_transform"
    needs: ClassVar[frozenset[str]] = frozenset()
    """Columns of the batch that `transform` reads, in addition to `mask`."""

    def required_columns(self) -> frozenset[str]:
        """`needs`, and more if the config asks."""
        return self.needs

    def varies_in_a_row(self) -> bool:
        """Whether tokens of one response may get different advantages."""
        return True

    def carries_signal(self) -> bool:
        """Whether responses of equal rewards may get an advantage other than 0.

        Then no group may be left out of the update for its rewards.
        """
        return True

    @abstractmethod
    def transform(self, advantages: Tensor, batch: RolloutBatch) -> Advantages:
        """New advantages [B, T] of `advantages` [B, T]; masked positions may hold anything.

        A token that no teacher scored (NaN in `teacher_logprobs`) keeps the advantage it has.
        """


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """What a teacher says of N tokens: `sampled` [N] are their ids.

    `logits` [N, V] are at the sampling temperature, float32, without gradient; None where only the
    `topk_ids` [N, K] are known, with their `topk_logprobs` [N, K] over the whole vocabulary, best
    first (-1 and -inf = missing). `old_logprobs` [N] are those of the policy that sampled, where
    the loss asks for them, `logprobs` [N] the teacher's of the sampled tokens (NaN = not scored).

    Of a `TextLoss`, N are groups: `others` [N] is the product of the policy's probabilities of a
    group's other tokens, with gradient, `teacher_others` [N] of the teacher's; None = 1. The
    vocabulary of the teacher's logits is its own, and `matched` [M, 2] are the tokens that are in
    both: the policy's id, the teacher's id.
    """

    sampled: Tensor
    logits: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    logprobs: Tensor | None = None
    others: Tensor | None = None
    teacher_others: Tensor | None = None
    matched: Tensor | None = None

    def part(self, rows: slice, logits: Tensor | None) -> TeacherRows:
        """The same of `rows`, where the teacher's `logits` are these."""
        names = (f.name for f in fields(self) if f.name not in ("logits", "matched"))
        columns = {name: getattr(self, name) for name in names}
        cut = {name: column[rows] for name, column in columns.items() if column is not None}
        return replace(self, logits=logits, **cut)


@dataclass(frozen=True, slots=True)
class RowLoss:
    """`loss` [N] per token, not reduced; `scored` [N] says which the teacher gave anything for.

    `metrics` are detached, [N] each; where `scored` is False all of it may hold anything.
    """

    loss: Tensor
    scored: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class DistillationLoss(Plugin[ConfigT]):
    """A divergence from a teacher at each token, from rows of logits. It never reduces.

    The learner calls it chunk by chunk, so logits of a whole batch never exist, and puts its values
    in place: the term's aggregator divides, by counts of its own.
    """

    kind = "distillation_loss"

    def reads(self) -> Literal["logits", "topk", "sampled"]:
        """What of the teacher it needs: its weights, its best candidates, or one log-prob.

        With `sampled` a token's value depends on the policy's log-prob of that token alone.
        """
        return "logits"

    def num_candidates(self) -> int:
        """K, where it reads `topk`."""
        return 0

    def required_columns(self) -> frozenset[str]:
        """Columns of the batch that are to be filled for it."""
        of_teacher: Mapping[str, frozenset[str]] = {
            "logits": frozenset(),
            "topk": frozenset({"teacher_topk_ids", "teacher_topk_logprobs"}),
            "sampled": frozenset({"teacher_logprobs"}),
        }
        return of_teacher[self.reads()]

    def counted(self, batch: RolloutBatch) -> Tensor:
        """The places [B, T] of its values, which the aggregator counts."""
        return taught(batch)

    @abstractmethod
    def rows(self, logits: Tensor, teacher: TeacherRows) -> RowLoss:
        """The loss of `logits` [N, V], float32 with gradient, at the sampling temperature."""


class TextLoss(DistillationLoss[ConfigT]):
    """Compares stretches of text in the tokens of each, so the teacher may have another tokenizer.

    The text is cut into groups, which end at the same byte in both tokenisations. A row is a group:
    its logits are those of one of its tokens, and the others count by their probabilities. The
    group's value stands at that token, and the aggregator counts groups.
    """

    at: Literal["first", "last"] = "last"
    """The token of a group whose distribution stands for it."""

    def required_columns(self) -> frozenset[str]:
        return TEXT_COLUMNS

    def temperatures(self) -> tuple[float, float]:
        """What the policy's and the teacher's logits are divided by, in addition to the sampling
        temperature, in the probabilities of a group's other tokens.
        """
        return 1.0, 1.0

    def counted(self, batch: RolloutBatch) -> Tensor:
        """1 at the token [B, T] that stands for a group all of whose tokens take loss."""
        group, mask = batch.column("text_group"), taught(batch)
        found = members(group, whole_groups(group, mask), group.shape[1], self.at)
        return torch.zeros_like(mask).index_put(
            (found.rows, found.columns), mask.new_ones(len(found.rows))
        )
