"""The responses of steps of a run, as one list that the statistics are taken of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.core.evidence.step import StepEvidence
from posttrain.core.rescoring.scores import recorded
from posttrain.core.types import Score

TOTAL = "total"
"""Name of the summed reward beside its components."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response: `length` in sampled tokens, `reward` None where it was unscored.

    `correct` is the task's own verdict in [0, 1]; `scores` are those of each reward by name, and
    the summed reward under `total`.
    """

    step: int
    row: int
    group: tuple[int, int]
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    reward: float | None
    correct: float | None
    scores: Mapping[str, Score]

    @property
    def length(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.token_ids)


def responses_of(evidence: StepEvidence) -> list[Response]:
    """Every response of a step, in order."""
    batch, names = evidence.batch, numbered(evidence.component_names)
    columns = _columns(evidence)
    rewards, scored = batch.column("rewards").tolist(), batch.column("scored").bool().tolist()
    texts = batch.transcripts or batch.texts
    found = []
    for row in range(len(batch)):
        reward = float(rewards[row]) if scored[row] else None
        total = Score(None, "unscored") if reward is None else Score(reward)
        ids = batch.response_ids[row][batch.response_mask[row].bool()]
        found.append(
            Response(
                step=evidence.step,
                row=row,
                group=(evidence.step, int(batch.group_id[row])),
                prompt=batch.problems[row].prompt if batch.problems else "",
                text=texts[row] if texts else "",
                token_ids=tuple(ids.tolist()),
                reward=reward,
                correct=None if batch.acc is None else _known(float(batch.acc[row])),
                scores={**dict(zip(names, columns[row], strict=True)), TOTAL: total},
            )
        )
    return found


def numbered(names: Sequence[str]) -> list[str]:
    """Names of rewards, the second of one name with its number: `format (2)`."""
    return [
        name if name not in names[:place] else f"{name} ({names[:place].count(name) + 1})"
        for place, name in enumerate(names)
    ]


def _columns(evidence: StepEvidence) -> list[Sequence[Score]]:
    """Scores of each row; without their statuses, what is missing counts as unscored."""
    batch = evidence.batch
    if batch.scores:
        return list(batch.scores)
    return [recorded(row) for row in batch.column("reward_components").tolist()]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
