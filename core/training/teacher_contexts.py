"""What the policy reads as its own teacher: the problem, and an answer to it that it did not have.

Sources: SDFT, arXiv:2601.19897 (a demonstration); SDPO, arXiv:2601.20802 (a sibling's success).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from posttrain.core.batch import RolloutBatch
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import RunError
from posttrain.core.types import Problem


@dataclass(frozen=True, slots=True)
class TeacherContext:
    """Prompts with a context, which comes from `source` and is put in by `template`.

    `field` is of the metadata, for that source. A sibling is another response of the group whose
    reward is at least `min_reward`; the first one is taken. A teacher can read `max_length` tokens
    of prompt and response.
    """

    tokenizer: ChatTokenizer
    template: str
    source: Literal["worked", "metadata", "sibling"]
    max_length: int
    field: str = ""
    min_reward: float = 1.0

    def prompts(self, batch: RolloutBatch, rows: Sequence[int]) -> list[tuple[int, ...] | None]:
        """Token ids of the prompt of each of `rows`; None without a context.

        Raises `RunError` where all of `rows` lack one that the data should have.
        """
        contexts = self._siblings(batch) if self.source == "sibling" else self._given(batch)
        if rows and self.source != "sibling" and not any(contexts[row] for row in rows):
            what = "worked answer" if self.source == "worked" else f"'{self.field}' in its metadata"
            raise RunError(
                f"none of the {len(rows)} responses is to a problem with a {what}, which the "
                "policy should read as its own teacher: use a task that has one, or another "
                "`context` of the teacher"
            )
        known: dict[tuple[int, str], tuple[int, ...]] = {}
        found: list[tuple[int, ...] | None] = []
        for row in rows:
            context = contexts[row]
            if not context:
                found.append(None)
                continue
            key = (int(batch.group_id[row]), context)
            if key not in known:
                problem = with_context(batch.problems[row], context, self.template)
                known[key] = self.tokenizer.encode_prompt(problem)
            found.append(known[key])
        return found

    def _given(self, batch: RolloutBatch) -> list[str]:
        """What the data has for each row."""
        if self.source == "worked":
            return [problem.worked for problem in batch.problems]
        return [problem.metadata.get(self.field, "") for problem in batch.problems]

    def _siblings(self, batch: RolloutBatch) -> list[str]:
        """The text of the first other row of each row's group that succeeded."""
        above = batch.column("rewards") >= self.min_reward
        succeeded = (above & batch.column("scored").bool()).tolist()  # unscored ones hold a 0
        found = [""] * len(batch)
        for members in batch.groups():
            good = [row for row in members.tolist() if succeeded[row]]
            for row in members.tolist():
                other = next((sibling for sibling in good if sibling != row), None)
                found[row] = "" if other is None else batch.texts[other]
        return found


def with_context(problem: Problem, context: str, template: str) -> Problem:
    """`problem` with `template` in place of its last question; {prompt} is what stood there."""
    messages = list(problem.messages)
    asked = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if asked is None:
        raise RunError(
            f"the problem {problem.prompt[:60]!r} has no message of a user, which a teacher's "
            "context could be added to"
        )
    parts = {"prompt": messages[asked].content, "context": context}
    text = re.sub(r"\{(prompt|context)\}", lambda place: parts[place[1]], template)
    messages[asked] = replace(messages[asked], content=text)
    return replace(problem, messages=tuple(messages))
