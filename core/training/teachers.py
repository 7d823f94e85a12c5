"""The teachers of a stage: who judges which response, and the columns that they fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import TEACHER_COLUMNS, Advantages, AdvantageTransform
from posttrain.core.data.tokens import pad_left
from posttrain.core.errors import RunError, shortlist
from posttrain.core.math.masking import masked
from posttrain.core.math.teacher_gap import taught
from posttrain.core.training.teacher_contexts import TeacherContext
from posttrain.core.training.teacher_pass import TeacherScores
from posttrain.core.training.teacher_texts import TeacherReader, read_by_teachers
from posttrain.core.training.updates import Check, PolicyLearner, no_check
from posttrain.core.types import Problem

TOPK = frozenset({"teacher_topk_ids", "teacher_topk_logprobs"})
SCORES = TOPK | {"teacher_logprobs"}


class ScoresTokens(Protocol):
    """A teacher, wherever its weights are."""

    def scores(self, batch: RolloutBatch, top_k: int, learner: PolicyLearner) -> TeacherScores:
        """What it says of `batch`; with its best `top_k` candidates unless that is 0."""


@dataclass(frozen=True, slots=True)
class LocalTeacher:
    """A teacher whose weights are where the policy's are."""

    name: str

    def scores(self, batch: RolloutBatch, top_k: int, learner: PolicyLearner) -> TeacherScores:
        """As in `ScoresTokens`: one forward pass."""
        return learner.teacher_pass(self.name, batch, top_k)


@dataclass(frozen=True, slots=True)
class Routing:
    """`routes` maps values of the field `by` of a problem's metadata to places of teachers."""

    by: str
    routes: Mapping[str, int]
    unknown: Literal["error", "skip"]

    def teacher_of(self, batch: RolloutBatch) -> Tensor:
        """The teacher [B] of each row, -1 = none. Raises `RunError` for one that nobody teaches."""
        return torch.tensor(self.places(batch.problems), dtype=torch.int64)

    def places(self, problems: Sequence[Problem]) -> list[int]:
        """The same of problems."""
        places = []
        for problem in problems:
            value = problem.metadata.get(self.by)
            place = -1 if value is None else self.routes.get(value, -1)
            if place < 0 and self.unknown == "error":
                has = f"has {self.by} '{value}'" if value is not None else f"has no '{self.by}'"
                raise RunError(
                    f"the problem {problem.prompt[:60]!r} {has} in its metadata, which no teacher "
                    f"teaches ({shortlist(value or '', self.routes)}): name it in the `routes` of "
                    "a teacher, or set teacher_routing.unknown: skip"
                )
            places.append(place)
        return places


@dataclass(frozen=True, slots=True)
class Teachers:
    """All teachers of a stage, in order. Without `routing` there is one, which judges everything.

    `top_k` is the number of candidates that a loss asks for. `contexts` are of the teachers that
    read another prompt than the policy does; a response that has none for its teacher has no
    teacher. `readers` are the teachers, in order, where these have tokenizers of their own. `check`
    runs between teachers (it raises to stop).
    """

    scorers: Mapping[str, ScoresTokens]
    routing: Routing | None = None
    top_k: int = 0
    on_missing: Literal["error", "mask"] = "error"
    contexts: Mapping[str, TeacherContext] = field(default_factory=dict)
    readers: tuple[TeacherReader, ...] = ()
    check: Check = no_check

    def fill(
        self,
        batch: RolloutBatch,
        names: Set[str],
        learner: PolicyLearner,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with `teacher_id`, with those of `names` that teachers fill, and metrics.

        Raises `RunError` for a sampled token that its teacher did not score, unless `on_missing`
        allows it.
        """
        metrics: dict[str, float] = {}
        if batch.teacher_id is None:
            batch, metrics = self._assigned(batch)
        wanted = (names & SCORES) - batch.columns()
        if not wanted:
            return batch, metrics
        began = perf_counter()
        # One pass gives all of it, for whoever reads the rest later.
        batch = batch.with_columns(**self._scored(batch, learner))
        metrics |= self._metrics(batch) | {"time/teacher_s": perf_counter() - began}
        return batch, metrics

    def _assigned(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with its teachers, and the prompts that they read where these are others."""
        teacher_id = torch.zeros(len(batch), dtype=torch.int64)
        if self.routing is not None:
            teacher_id = self.routing.teacher_of(batch)
        metrics: dict[str, float] = {}
        if self.contexts:
            batch, metrics = self._shown(batch, teacher_id)
        if self.readers:
            columns, metrics = read_by_teachers(batch, teacher_id, self.readers)
            batch, teacher_id = batch.with_columns(**columns), columns["teacher_id"]
        if self.contexts or self.readers or len(self.scorers) > 1:
            metrics["distil/skipped_frac"] = float((teacher_id < 0).double().mean())
        return batch.with_columns(teacher_id=teacher_id), metrics

    def _shown(
        self, batch: RolloutBatch, teacher_id: Tensor
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with what each response's teacher reads before it.

        Where a teacher has no context, or one too long for it, `teacher_id` becomes -1.
        """
        prompts = [
            tuple(ids[own.bool()].tolist())
            for ids, own in zip(batch.prompt_ids, batch.prompt_mask, strict=True)
        ]
        lengths, too_long = batch.response_mask.sum(dim=1).tolist(), 0
        for place, name in enumerate(self.scorers):
            context = self.contexts.get(name)
            if context is None:
                continue
            rows = (teacher_id == place).nonzero().squeeze(1).tolist()
            for row, prompt in zip(rows, context.prompts(batch, rows), strict=True):
                fits = prompt is not None and len(prompt) + lengths[row] <= context.max_length
                if prompt is not None and fits:
                    prompts[row] = prompt
                    continue
                teacher_id[row] = -1
                too_long += prompt is not None
        ids, mask = pad_left(prompts, 0)
        shown = batch.with_columns(teacher_prompt_ids=ids, teacher_prompt_mask=mask)
        return shown, {"distil/context_too_long_frac": too_long / len(batch)}

    def _scored(self, batch: RolloutBatch, learner: PolicyLearner) -> dict[str, Tensor]:
        shape, top_k = batch.response_ids.shape, self.top_k
        logprobs = torch.full(shape, torch.nan)
        ids = torch.full((*shape, top_k), -1, dtype=torch.int64)
        values = torch.full((*shape, top_k), -torch.inf)
        for place, scorer in enumerate(self.scorers.values()):
            rows = (batch.column("teacher_id") == place).nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            self.check()
            found = scorer.scores(batch.select(rows), top_k, learner)
            logprobs[rows] = found.logprobs.to(logprobs)
            if found.topk_ids is not None and found.topk_logprobs is not None:
                ids[rows] = found.topk_ids
                values[rows] = found.topk_logprobs.to(values)
        self.check()
        missing = logprobs.isnan() & taught(batch).bool()
        if missing.any() and self.on_missing == "error":
            raise RunError(
                f"{int(missing.sum())} of {int(taught(batch).sum())} sampled tokens have no "
                "log-prob of their teacher: set teacher_missing: mask to learn nothing there, or "
                "see why the server leaves them out"
            )
        columns = {"teacher_logprobs": logprobs}
        if top_k:
            columns |= {"teacher_topk_ids": ids, "teacher_topk_logprobs": values}
        return columns

    def _metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """How far the policy that sampled is from the teachers, of all and of each."""
        teacher = batch.column("teacher_logprobs")
        mask = taught(batch).bool()
        known = mask & ~teacher.isnan()
        policy = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        gap = masked(policy, known) - masked(teacher, known)
        metrics = {"distil/missing_frac": _share(mask & ~known, mask)}
        known = known & ~policy.isnan()  # an answer that was given has no policy that sampled it
        if known.any():
            metrics["distil/rollout_kl"] = float(gap[known].double().mean())
        if len(self.scorers) == 1:
            return metrics
        for place, name in enumerate(self.scorers):
            own = known & (batch.column("teacher_id") == place)[:, None]
            metrics[f"distil/tokens/{name}"] = float(own.sum())
            if own.any():
                metrics[f"distil/rollout_kl/{name}"] = float(gap[own].double().mean())
        return metrics


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum()) / max(1.0, float(whole.sum()))


def transformed(
    estimate: Advantages, transforms: Sequence[AdvantageTransform[Any]], batch: RolloutBatch
) -> Advantages:
    """`estimate` after each of `transforms`, in order; 0 under the batch's mask."""
    for each in transforms:
        batch.require(each.required_columns(), f"advantage_transform '{each.name}'")
        found = each.transform(estimate.advantages, batch)
        estimate = replace(
            estimate,
            advantages=masked(found.advantages, batch.mask),
            metrics={**estimate.metrics, **found.metrics},
        )
    return estimate


assert SCORES < TEACHER_COLUMNS
