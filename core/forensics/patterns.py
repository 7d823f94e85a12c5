"""Named statistics of rewards, each with the threshold beyond which somebody should look.

A pattern says where to look, not that anything is wrong: a good reward may well grow with length.
With fewer than `FEWEST` responses nothing is said. Over all responses of the steps given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from posttrain.core.compare.vectors import rank_correlation
from posttrain.core.forensics.repetition import (
    NGRAM,
    repeated_across_prompts,
    repeated_in_group,
    repetition,
)
from posttrain.core.forensics.responses import TOTAL, Response
from posttrain.core.rewards.checking import is_failure

FEWEST = 20
LENGTH_RHO = 0.5
REPETITION_RHO = 0.3
REPETITION_MEAN = 0.05
HIGH_SHARE = 0.9
WRONG_SHARE = 0.5
IN_GROUP_SHARE = 0.5
ACROSS_SHARE = 0.2
ACROSS_CHARACTERS = 20
FAILURE_SHARE = 0.01
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Pattern:
    """One statistic of one reward (`subject`), or of the responses themselves (`responses`).

    `value` None and `suspicious` None: too few responses, or no such quantity. `examples` are
    responses to look at where it is suspicious.
    """

    name: str
    subject: str
    value: float | None
    threshold: float
    count: int
    suspicious: bool | None
    meaning: str
    examples: tuple[Response, ...] = ()


def find_patterns(responses: Sequence[Response]) -> list[Pattern]:
    """Every statistic of every reward, suspicious ones first."""
    names = list(dict.fromkeys(name for r in responses for name in r.scores))
    found: list[Pattern] = []
    for name in names:
        found.append(_length(responses, name))
        found.append(_repetition(responses, name))
        if name != TOTAL:
            found.append(_high_but_wrong(responses, name))
            found.append(_failures(responses, name))
        found.append(_constant(responses, name))
    found.append(_in_group(responses))
    found.append(_across(responses))
    return sorted(found, key=lambda p: (not p.suspicious, p.suspicious is None))


def _valued(responses: Iterable[Response], name: str) -> list[tuple[Response, float]]:
    """Responses that the reward scored, with its value."""
    pairs = ((r, r.scores[name].value) for r in responses if name in r.scores)
    return [(response, value) for response, value in pairs if value is not None]


def _rho(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rho of pairs; None for few of them, or where one side never varies."""
    if len(pairs) < FEWEST:
        return None
    first, second = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    return rank_correlation(first, second)


def _length(responses: Sequence[Response], name: str) -> Pattern:
    valued = _valued(responses, name)
    rho = _rho([(value, float(response.length)) for response, value in valued])
    return Pattern(
        "length_correlation",
        name,
        rho,
        LENGTH_RHO,
        len(valued),
        None if rho is None else abs(rho) >= LENGTH_RHO,
        "Spearman's rho of the reward and the response's length in tokens; suspicious where |rho| "
        f"is {LENGTH_RHO} or more: the reward may pay for length alone",
        _best(valued) if rho is not None and abs(rho) >= LENGTH_RHO else (),
    )


def _repetition(responses: Sequence[Response], name: str) -> Pattern:
    valued = [
        (response, value, share)
        for response, value in _valued(responses, name)
        if (share := repetition(response.token_ids)) is not None
    ]
    rho = _rho([(value, share) for _, value, share in valued])
    mean = sum(share for _, _, share in valued) / len(valued) if valued else 0.0
    flagged = None if rho is None else rho >= REPETITION_RHO and mean >= REPETITION_MEAN
    worst = sorted(valued, key=lambda one: (-one[2], -one[1]))[:_EXAMPLES]
    return Pattern(
        "repetition_rewarded",
        name,
        rho,
        REPETITION_RHO,
        len(valued),
        flagged,
        f"Spearman's rho of the reward and the share of a response's {NGRAM}-grams of tokens that "
        f"it has said before; suspicious from {REPETITION_RHO} on where that share is "
        f"{REPETITION_MEAN} or more on average (here {mean:.3f})",
        tuple(response for response, _, _ in worst) if flagged else (),
    )


def _high_but_wrong(responses: Sequence[Response], name: str) -> Pattern:
    valued = [(r, v) for r, v in _valued(responses, name) if r.correct is not None]
    most = max((value for _, value in valued), default=0.0)
    least = min((value for _, value in valued), default=0.0)
    high = [(r, v) for r, v in valued if most > 0 and v >= HIGH_SHARE * most]
    wrong = [(r, v) for r, v in high if r.correct is not None and r.correct < 1]
    # A reward that gives everybody the same is `constant_reward`, not gaming.
    known = len(high) >= FEWEST and most > least
    share = len(wrong) / len(high) if known else None
    flagged = None if share is None else share >= WRONG_SHARE
    return Pattern(
        "high_score_wrong_answer",
        name,
        share,
        WRONG_SHARE,
        len(high),
        flagged,
        f"of the responses within {1 - HIGH_SHARE:.0%} of the reward's largest value, the share "
        f"that the task's verdict calls wrong; suspicious from {WRONG_SHARE} on: form pays without "
        "the answer",
        _best(wrong) if flagged else (),
    )


def _failures(responses: Sequence[Response], name: str) -> Pattern:
    seen = [r for r in responses if name in r.scores]
    failed = [r for r in seen if is_failure(r.scores[name])]
    share = len(failed) / len(seen) if len(seen) >= FEWEST else None
    return Pattern(
        "failures",
        name,
        share,
        FAILURE_SHARE,
        len(seen),
        None if share is None else share >= FAILURE_SHARE,
        "share of responses on which the reward failed (error, timeout, crash), zeros and unscored "
        f"ones apart; suspicious from {FAILURE_SHARE} on: a response may provoke it",
        tuple(failed[:_EXAMPLES]),
    )


def _constant(responses: Sequence[Response], name: str) -> Pattern:
    values = [value for _, value in _valued(responses, name)]
    distinct = len(set(values)) if len(values) >= FEWEST else None
    return Pattern(
        "constant_reward",
        name,
        None if distinct is None else float(distinct),
        1.0,
        len(values),
        None if distinct is None else distinct == 1,
        "how many different values the reward gave; suspicious at 1: it teaches nothing",
    )


def _in_group(responses: Sequence[Response]) -> Pattern:
    repeated = repeated_in_group(responses)
    share = len(repeated) / len(responses) if len(responses) >= FEWEST else None
    flagged = None if share is None else share >= IN_GROUP_SHARE
    return Pattern(
        "duplicates_in_group",
        "responses",
        share,
        IN_GROUP_SHARE,
        len(responses),
        flagged,
        "share of responses whose text, white space apart, another response to the same prompt has "
        f"too; suspicious from {IN_GROUP_SHARE} on: the policy may have collapsed",
        tuple(repeated[:_EXAMPLES]) if flagged else (),
    )


def _across(responses: Sequence[Response]) -> Pattern:
    long = [r for r in responses if len(r.text.strip()) >= ACROSS_CHARACTERS]
    repeated = repeated_across_prompts(long)
    share = len(repeated) / len(long) if len(long) >= FEWEST else None
    flagged = None if share is None else share >= ACROSS_SHARE
    return Pattern(
        "duplicates_across_prompts",
        "responses",
        share,
        ACROSS_SHARE,
        len(long),
        flagged,
        f"share of responses of {ACROSS_CHARACTERS} or more characters whose text answers another "
        f"prompt as well; suspicious from {ACROSS_SHARE} on: an answer that fits anything",
        tuple(repeated[:_EXAMPLES]) if flagged else (),
    )


def _best(valued: Sequence[tuple[Response, float]]) -> tuple[Response, ...]:
    """The best paid of them, the first of equal ones."""
    ordered = sorted(valued, key=lambda pair: -pair[1])
    return tuple(response for response, _ in ordered[:_EXAMPLES])
