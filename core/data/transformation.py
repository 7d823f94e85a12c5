"""Problems rewritten so that their answers are integers, and only those that verify are kept.

DAPO, arXiv:2503.14476, section 3.5 and its appendix: an answer such as 11 - 2 sqrt(6) is hard for a
rule to judge, so the question is changed to ask for k + m + n. Here an answer that is an integer
passes unchanged, closed forms are rewritten by rule and checked by arithmetic, and the rest is
rewritten by a model, whose own solutions must agree with the answer that it claims.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.core.contracts import Task
from posttrain.core.data.problems import is_plain, problem_to_json
from posttrain.core.math.closed_forms import integer_question, plain_integer
from posttrain.core.math.splits import loose_key
from posttrain.core.types import Problem

How = Literal["unchanged", "rule", "model"]
REASONS: dict[str, str] = {
    "conversation": "its prompt is more than one user message, and only plain texts are rewritten",
    "no_rule": "its answer is not a closed form that a rule knows, and no model may rewrite it",
    "unparsed": "the model's reply is not of the form that was asked for",
    "not_integer": "the answer that the model claims is not an integer",
    "same_question": "the model left the question as it was",
    "too_long": "there is no room for a response in addition to the prompt",
    "no_majority": "too few of the model's solutions agree with the answer it claims",
    "verifier": "the task's verifier refuses the new answer, or accepts another",
    "held_out": "the rewritten question is a held-out one",
    "duplicate": "another problem was rewritten to the same question",
}
PROBLEM_LINE = re.compile(r"[\W_]{0,8}(?:problem|question)[\W_]{0,4}?:(.*)", re.IGNORECASE)
ANSWER_LINE = re.compile(r"[\W_]{0,8}answer[\W_]{0,4}?:(.*)", re.IGNORECASE)

Ask = Callable[[Sequence[str], int], list[list[str]]]
"""(questions, number of replies to each; 0 = one greedy reply) -> the replies of each."""


@dataclass(frozen=True, slots=True)
class Rewriting:
    """How a model rewrites, and when it is believed. `template` holds {question} and {answer}."""

    template: str
    votes: int
    agreement: float
    by_rule: bool = True
    by_model: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """One problem: what it became, or why it was dropped (`reason`, one of `REASONS`).

    `agreement` is the share of the model's solutions that gave the new answer, where it was asked.
    """

    original: Problem
    made: Problem | None = None
    how: How = "unchanged"
    reason: str = ""
    detail: str = ""
    agreement: float | None = None

    def row(self) -> dict[str, object]:
        before = {"prompt": self.original.prompt, "answer": self.original.answer}
        if self.made is None:
            return {"reason": self.reason, "detail": self.detail, "original": before}
        return {
            **problem_to_json(self.made),
            "how": self.how,
            "detail": self.detail,
            "agreement": self.agreement,
            "original": before,
        }


@dataclass(slots=True)
class Transformer:
    """Rewrites problems of `task` with the model that `ask` stands for.

    `held_out` holds the `loose_key` of each held-out problem's key.
    """

    task: Task[Any]
    settings: Rewriting
    ask: Ask
    fits: Callable[[str], bool]
    held_out: Collection[str]
    taken: set[str] = field(default_factory=set)

    def transform(self, problems: Sequence[Problem]) -> list[Outcome]:
        outcomes = [self._without_model(problem) for problem in problems]
        open_ones = [i for i, outcome in enumerate(outcomes) if outcome is None]
        replies = self._rewrite([problems[i] for i in open_ones])
        for index, outcome in zip(open_ones, replies, strict=True):
            outcomes[index] = outcome
        return [self._last_checks(outcome) for outcome in outcomes if outcome is not None]

    def _without_model(self, problem: Problem) -> Outcome | None:
        """Integers and closed forms; None for what is left to the model."""
        if plain_integer(problem.answer) is not None:
            return Outcome(problem, problem)
        if not is_plain(problem):
            return Outcome(problem, reason="conversation")
        found = integer_question(problem.answer) if self.settings.by_rule else None
        if found is not None:
            question = self.task.question(problem)
            question += ("" if question[-1:].isspace() else " ") + found.instruction
            made = self.task.rewritten(question, str(found.answer))
            return Outcome(problem, made, "rule", detail=found.form)
        if not self.settings.by_model:
            return Outcome(problem, reason="no_rule", detail=problem.answer[:80])
        return None

    def _rewrite(self, problems: Sequence[Problem]) -> list[Outcome]:
        """Ask the model for other questions, then to solve them; keep what it agrees on."""
        asked = [self._asked(problem) for problem in problems]
        short = [i for i, text in enumerate(asked) if self.fits(text)]
        found = [Outcome(problem, reason="too_long") for problem in problems]
        for index, (reply,) in zip(short, self.ask([asked[i] for i in short], 0), strict=True):
            found[index] = self._read(problems[index], reply)
        voted = [i for i, outcome in enumerate(found) if outcome.made is not None]
        prompts = [made.prompt for i in voted if (made := found[i].made) is not None]
        for index, solutions in zip(voted, self.ask(prompts, self.settings.votes), strict=True):
            found[index] = self._counted(found[index], solutions)
        return found

    def _asked(self, problem: Problem) -> str:
        # Not `format`: a question may hold braces.
        text = self.settings.template.replace("{answer}", problem.answer)
        return text.replace("{question}", self.task.question(problem))

    def _read(self, problem: Problem, reply: str) -> Outcome:
        parsed = read_reply(reply)
        if parsed is None:
            return Outcome(problem, reason="unparsed", detail=reply[:200])
        question, claimed = parsed
        answer = plain_integer(claimed)
        if answer is None:
            return Outcome(problem, reason="not_integer", detail=claimed[:80])
        made = self.task.rewritten(question, answer)
        before = self.task.rewritten(self.task.question(problem), answer)
        if loose_key(made.key) == loose_key(before.key):
            return Outcome(problem, reason="same_question", detail=answer)
        if not self.fits(made.prompt):
            return Outcome(problem, reason="too_long")
        return Outcome(problem, made, "model")

    def _counted(self, outcome: Outcome, solutions: Sequence[str]) -> Outcome:
        made = outcome.made
        assert made is not None, "only what was rewritten is voted on"
        read = [self.task.verify(made, text) for text in solutions]
        share = sum(verdict.correct >= 1.0 for verdict in read) / len(read)
        if share > self.settings.agreement:
            return Outcome(outcome.original, made, "model", agreement=share)
        reported = Counter(str(verdict.parsed)[:20] for verdict in read).most_common(3)
        detail = f"claimed {made.answer}, solved as {', '.join(f'{v} x {n}' for v, n in reported)}"
        return Outcome(outcome.original, reason="no_majority", detail=detail, agreement=share)

    def _last_checks(self, outcome: Outcome) -> Outcome:
        """The task's own verifier, and no question twice or held out."""
        made, before = outcome.made, outcome.original
        if made is None:
            return outcome
        if outcome.how != "unchanged":
            other = str(int(made.answer) + 1)
            right, wrong = self.task.verify(made, made.worked), self.task.verify(made, other)
            if right.correct < 1.0 or wrong.correct >= 1.0:
                return Outcome(before, reason="verifier", detail=made.answer)
            if loose_key(made.key) in self.held_out:
                return Outcome(before, reason="held_out")
            if not self.fits(made.prompt):
                return Outcome(before, reason="too_long")
        if made.key in self.taken:
            return Outcome(before, reason="duplicate")
        self.taken.add(made.key)
        return outcome


def read_reply(text: str) -> tuple[str, str] | None:
    """Question and answer of the last `Problem: ...` that a line `Answer: ...` follows."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if PROBLEM_LINE.match(line)]
    for end in range(len(lines) - 1, 0, -1):
        answer = ANSWER_LINE.match(lines[end])
        before = [start for start in starts if start < end]
        if answer is None or not before:
            continue
        first = PROBLEM_LINE.match(lines[before[-1]])
        assert first is not None, "it is one of the starts"
        question = "\n".join([first[1], *lines[before[-1] + 1 : end]]).strip(" \n*")
        claimed = answer[1].strip(" *$.")
        return (question, claimed) if question and claimed else None
    return None


def outcome_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """How many problems were kept, by what, and how many dropped, for what."""
    kept = [outcome for outcome in outcomes if outcome.made is not None]
    shares = [outcome.agreement for outcome in outcomes if outcome.agreement is not None]
    metrics = {
        "transform/num_problems": float(len(outcomes)),
        "transform/kept": float(len(kept)),
        "transform/kept_frac": len(kept) / len(outcomes),
    }
    for how in ("unchanged", "rule", "model"):
        metrics[f"transform/by_{how}"] = float(sum(outcome.how == how for outcome in kept))
    if shares:
        metrics["transform/agreement"] = sum(shares) / len(shares)
    dropped = Counter(outcome.reason for outcome in outcomes if outcome.made is None)
    return metrics | {f"transform/dropped/{name}": float(n) for name, n in dropped.items()}
