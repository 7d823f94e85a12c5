"""Rows longer than the model may read: one rule for every kind of training and for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.core.config.sections import ModelSection, Overlong
from posttrain.core.errors import DataError
from posttrain.core.types import Problem

if TYPE_CHECKING:
    from posttrain.core.data.tokens import ChatTokenizer

Ids = tuple[int, ...]


@dataclass(slots=True)
class LengthRule:
    """`overlong` applied to rows of at most `limit` tokens, prompt and answer together.

    `what` names the rows and `setting` the limit, for people. A row is cut where its prompt leaves
    room for a token of the answer; otherwise `truncate` leaves it out too.
    """

    overlong: Overlong
    limit: int
    what: str
    setting: str = "model.max_model_len"
    seen: int = 0
    dropped: int = 0
    truncated: int = 0
    refused: int = 0
    example: str = ""

    @classmethod
    def of(cls, model: ModelSection, what: str, max_length: int | None = None) -> LengthRule:
        """The run's rule, with a stage's own limit where that is smaller."""
        if max_length is not None and max_length < model.max_model_len:
            return cls(model.overlong, max_length, what, "max_length")
        return cls(model.overlong, model.max_model_len, what)

    def answer_room(self, where: str, prompt: int, answer: int) -> int | None:
        """Tokens of the answer that are kept after a prompt of `prompt`; None: leave the row out.

        `where` says which row it is.
        """
        self.seen += 1
        if prompt + answer <= self.limit:
            return answer
        room = self.limit - prompt
        return room if self._cut(where, prompt, answer, possible=room >= 1) else None

    def prompt(self, where: str, ids: Ids, answer: int) -> Ids | None:
        """The prompt, cut at its start to leave `answer` tokens; None: leave it out."""
        self.seen += 1
        if len(ids) + answer <= self.limit:
            return ids
        room = self.limit - answer
        return ids[-room:] if self._cut(where, len(ids), answer, possible=room >= 1) else None

    def leave_out(self) -> None:
        """Count a row that was cut as left out: nothing can be learned from what remains."""
        self.truncated -= 1
        self.dropped += 1

    def _cut(self, where: str, prompt: int, answer: int, *, possible: bool) -> bool:
        if not self.example:
            self.example = f"{where} with {prompt} tokens of prompt and {answer} of answer"
        if self.overlong == "error":
            self.refused += 1
            return False
        cut = self.overlong == "truncate" and possible
        self.truncated += cut
        self.dropped += not cut
        return cut

    def check(self) -> str:
        """A warning about the rows that were dropped or cut; empty if none were.

        Raises `DataError` when `overlong` is `error` and some are too long, or none is left.
        """
        longer = self.dropped + self.truncated + self.refused
        if not longer:
            return ""
        reported = (
            f"{longer} of {self.seen} {self.what} are too long, such as {self.example}, which "
            f"exceeds {self.setting} {self.limit}"
        )
        if self.refused:
            raise DataError(
                f"{reported}: raise {self.setting}, shorten the data, or set model.overlong to "
                "drop or truncate"
            )
        if self.dropped == self.seen:
            raise DataError(f"{reported}; none is left: raise {self.setting}, or shorten the data")
        parts = {"left out": self.dropped, "cut": self.truncated}
        done = " and ".join(f"{count} were {how}" for how, count in parts.items() if count)
        return f"{reported}; {done} (model.overlong: {self.overlong})"

    def metrics(self, group: str) -> dict[str, float]:
        return {
            f"{group}/overlong_dropped": float(self.dropped),
            f"{group}/overlong_truncated": float(self.truncated),
        }


def shown(problem: Problem) -> str:
    """A problem's start, to name it in a message."""
    return repr(problem.prompt if len(problem.prompt) <= 60 else f"{problem.prompt[:57]}...")


def fitting_prompts(
    prompts: Sequence[tuple[Problem, Ids]], answer: int, rule: LengthRule
) -> list[tuple[Problem, Ids]]:
    """Prompts that leave room for `answer` tokens, cut or left out by `rule`.

    A problem that comes several times is counted once.
    """
    known: dict[str, Ids | None] = {}
    found = []
    for problem, ids in prompts:
        if problem.key not in known:
            known[problem.key] = rule.prompt(shown(problem), ids, answer)
        kept = known[problem.key]
        if kept is not None:
            found.append((problem, kept))
    return found


def fitting_worked(
    tokenizer: ChatTokenizer, problems: Sequence[Problem], rule: LengthRule
) -> list[Problem]:
    """Problems whose worked answers can be learned from, each counted once by `rule`."""
    fits: dict[str, bool] = {}
    for problem in problems:
        if problem.key not in fits:
            prompt = tokenizer.encode_prompt(problem)
            answer = tokenizer.encode_worked(problem)
            room = rule.answer_room(shown(problem), len(prompt), len(answer))
            fits[problem.key] = room is not None
    return [problem for problem in problems if fits[problem.key]]
