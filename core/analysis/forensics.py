"""Named statistics of rewards, each with the threshold beyond which it deserves a look.

A pattern says where to look, not that anything is wrong: a good reward may well grow with length.
With fewer than `FEWEST` responses nothing is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from posttrain.core.analysis.evidence import StepEvidence
from posttrain.core.analysis.rescoring import recorded
from posttrain.core.analysis.statistics import rank_correlation
from posttrain.core.config.base import distinct_names
from posttrain.core.config.rl_stage import TOTAL
from posttrain.core.rewards.checking import is_failure
from posttrain.core.types import Score

FEWEST = 20
NGRAM = 3
"""Tokens in a row that are compared."""
REPETITION_MEAN = 0.05
HIGH_SHARE = 0.9
ACROSS_CHARACTERS = 20
GARBLED = 2.0
"""Arithmetic over geometric mean of the ratio, from which a response is suspected of garble."""
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Response:
    """One response: `length` in sampled tokens, `reward` None where it was unscored.

    `correct` is the task's own verdict in [0, 1]; `scores` are those of each reward by name, and
    the summed reward under `total`. `ratio_means` are the arithmetic and the geometric mean over
    its tokens of the policy's probability over the engine's; None where either is not known.
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
    ratio_means: tuple[float, float] | None = None

    @property
    def length(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.token_ids)


def responses_of(evidence: StepEvidence) -> list[Response]:
    """Every response of a step, in order."""
    batch, columns = evidence.batch, component_scores(evidence)
    total = batch.column("rewards").masked_fill(~batch.column("scored").bool(), math.nan)
    columns[TOTAL] = recorded(total.tolist())
    texts = batch.transcripts or batch.texts
    found = []
    for row in range(len(batch)):
        ids = batch.response_ids[row][batch.response_mask[row].bool()]
        correct = math.nan if batch.acc is None else float(batch.acc[row])
        found.append(
            Response(
                step=evidence.step,
                row=row,
                group=(evidence.step, int(batch.group_id[row])),
                prompt=batch.problems[row].prompt if batch.problems else "",
                text=texts[row] if texts else "",
                token_ids=tuple(ids.tolist()),
                reward=columns[TOTAL][row].value,
                correct=None if math.isnan(correct) else correct,
                scores={name: column[row] for name, column in columns.items()},
                ratio_means=ratio_means(evidence, row),
            )
        )
    return found


def ratio_means(evidence: StepEvidence, row: int) -> tuple[float, float] | None:
    """Arithmetic and geometric mean of the ratio of a response's tokens; None if one is unknown.

    The policy is the one that the last optimizer step on the response read.
    """
    taken = evidence.batch.response_mask[row].bool()
    seen, engine = evidence.seen_logprobs[row][taken], evidence.batch.rollout_logprobs[row][taken]
    gaps = (seen - engine).double()
    if gaps.numel() == 0 or not bool(gaps.isfinite().all()):
        return None
    return float(gaps.exp().mean()), float(gaps.mean().exp())


def component_scores(evidence: StepEvidence) -> dict[str, list[Score]]:
    """Scores of each reward by name; without their statuses, what is missing counts as unscored."""
    batch, names = evidence.batch, distinct_names(evidence.component_names)
    if batch.scores:
        return {name: [row[i] for row in batch.scores] for i, name in enumerate(names)}
    if not names:
        return {}
    parts = batch.column("reward_components")
    return {name: recorded(parts[:, i].tolist()) for i, name in enumerate(names)}


# --- repetition ----------------------------------------------------------------------------------


def repetition(token_ids: Sequence[int]) -> float | None:
    """1 - distinct n-grams / n-grams of a response; None if it is shorter than `NGRAM` tokens."""
    starts = range(len(token_ids) - NGRAM + 1)
    grams = [tuple(token_ids[start : start + NGRAM]) for start in starts]
    return 1 - len(set(grams)) / len(grams) if grams else None


def _same_text(text: str) -> str:
    """What two texts that differ in white space alone have in common."""
    return " ".join(text.split())


def repeated_in_group(responses: Sequence[Response]) -> list[Response]:
    """Those whose text another response to the same prompt sample has too; empty ones count."""
    counts = Counter((r.group, _same_text(r.text)) for r in responses)
    return [r for r in responses if counts[r.group, _same_text(r.text)] > 1]


def repeated_across_prompts(responses: Sequence[Response]) -> list[Response]:
    """Those whose text answers another prompt as well."""
    prompts: dict[str, set[str]] = {}
    for response in responses:
        prompts.setdefault(_same_text(response.text), set()).add(response.prompt)
    return [r for r in responses if len(prompts[_same_text(r.text)]) > 1]


# --- patterns ------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class _Measured:
    """A statistic over `count` responses; `counts` False says that it is not suspicious at all."""

    value: float | None
    count: int
    examples: Sequence[Response] = ()
    counts: bool = True


@dataclass(frozen=True, slots=True)
class _Rule:
    """A statistic of the responses under a reward, suspicious where `beyond(value, threshold)`."""

    name: str
    measure: Callable[[Sequence[Response], str], _Measured]
    threshold: float
    meaning: str
    beyond: Callable[[float, float], bool] = lambda value, threshold: value >= threshold
    of_total: bool = True

    def pattern(self, responses: Sequence[Response], subject: str) -> Pattern:
        """The rule applied to one reward."""
        found = self.measure(responses, subject)
        value, suspicious = found.value, None
        if value is not None:
            suspicious = found.counts and self.beyond(value, self.threshold)
        examples = tuple(found.examples[:_EXAMPLES]) if suspicious else ()
        return Pattern(
            self.name, subject, value, self.threshold, found.count, suspicious, self.meaning,
            examples,
        )  # fmt: skip


def find_patterns(responses: Sequence[Response]) -> list[Pattern]:
    """Every statistic of every reward, over all responses given, suspicious ones first."""
    names = dict.fromkeys(name for r in responses for name in r.scores)
    found = [
        rule.pattern(responses, name)
        for name in names
        for rule in REWARD_RULES
        if rule.of_total or name != TOTAL
    ]
    found += [rule.pattern(responses, "responses") for rule in RESPONSE_RULES]
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


def _best(valued: Sequence[tuple[Response, float]]) -> list[Response]:
    """Highest reward first, in order where equal."""
    return [response for response, _ in sorted(valued, key=lambda pair: -pair[1])]


def _share(some: Sequence[Response], of: int) -> _Measured:
    return _Measured(len(some) / of if of >= FEWEST else None, of, some)


def _length(responses: Sequence[Response], name: str) -> _Measured:
    valued = _valued(responses, name)
    rho = _rho([(value, float(response.length)) for response, value in valued])
    return _Measured(rho, len(valued), _best(valued))


def _repetition(responses: Sequence[Response], name: str) -> _Measured:
    valued = [
        (response, value, share)
        for response, value in _valued(responses, name)
        if (share := repetition(response.token_ids)) is not None
    ]
    rho = _rho([(value, share) for _, value, share in valued])
    mean = sum(share for _, _, share in valued) / max(1, len(valued))
    worst = [response for response, _, _ in sorted(valued, key=lambda one: (-one[2], -one[1]))]
    return _Measured(rho, len(valued), worst, mean >= REPETITION_MEAN)


def _high_but_wrong(responses: Sequence[Response], name: str) -> _Measured:
    valued = [(r, v) for r, v in _valued(responses, name) if r.correct is not None]
    most, least = (pick((v for _, v in valued), default=0.0) for pick in (max, min))
    high = [(r, v) for r, v in valued if most > 0 and v >= HIGH_SHARE * most]
    wrong = [(r, v) for r, v in high if r.correct is not None and r.correct < 1]
    if most == least:  # a reward that gives everybody the same is `constant_reward`, not gaming
        return _Measured(None, len(high))
    return _share(_best(wrong), len(high))


def _failures(responses: Sequence[Response], name: str) -> _Measured:
    seen = [r for r in responses if name in r.scores]
    return _share([r for r in seen if is_failure(r.scores[name])], len(seen))


def _constant(responses: Sequence[Response], name: str) -> _Measured:
    values = [value for _, value in _valued(responses, name)]
    return _Measured(float(len(set(values))) if len(values) >= FEWEST else None, len(values))


def _in_group(responses: Sequence[Response], _: str) -> _Measured:
    return _share(repeated_in_group(responses), len(responses))


def _across(responses: Sequence[Response], _: str) -> _Measured:
    long = [r for r in responses if len(r.text.strip()) >= ACROSS_CHARACTERS]
    return _share(repeated_across_prompts(long), len(long))


def _garble(responses: Sequence[Response], _: str) -> _Measured:
    known = [
        (r, r.ratio_means[0] / max(r.ratio_means[1], 1e-300)) for r in responses if r.ratio_means
    ]
    worst = [r for r, times in sorted(known, key=lambda pair: -pair[1]) if times >= GARBLED]
    return _share(worst, len(known))


REWARD_RULES = (
    _Rule(
        "length_correlation",
        _length,
        0.5,
        "Spearman's rho of the reward and the response's length in tokens; suspicious where |rho| "
        "is 0.5 or more: the reward may pay for length alone",
        beyond=lambda value, threshold: abs(value) >= threshold,
    ),
    _Rule(
        "repetition_rewarded",
        _repetition,
        0.3,
        f"Spearman's rho of the reward and the share of a response's {NGRAM}-grams of tokens that "
        f"occurred before in it; suspicious from 0.3 on where that share is {REPETITION_MEAN} or "
        "more on average",
    ),
    _Rule(
        "high_score_wrong_answer",
        _high_but_wrong,
        0.5,
        f"of the responses within {1 - HIGH_SHARE:.0%} of the reward's largest value, the share "
        "that the task's verdict calls wrong; suspicious from 0.5 on: form pays without the answer",
        of_total=False,
    ),
    _Rule(
        "failures",
        _failures,
        0.01,
        "share of responses on which the reward failed (error, timeout, crash), without zeros and "
        "unscored ones; suspicious from 0.01 on: a response may provoke it",
        of_total=False,
    ),
    _Rule(
        "constant_reward",
        _constant,
        1.0,
        "how many different values the reward gave; suspicious at 1: it teaches nothing",
        beyond=lambda value, threshold: value == threshold,
    ),
)
RESPONSE_RULES = (
    _Rule(
        "duplicates_in_group",
        _in_group,
        0.5,
        "share of responses whose text, white space apart, another response to the same prompt has "
        "too; suspicious from 0.5 on: the policy may have collapsed",
    ),
    _Rule(
        "duplicates_across_prompts",
        _across,
        0.2,
        f"share of responses of {ACROSS_CHARACTERS} or more characters whose text answers another "
        "prompt as well; suspicious from 0.2 on: an answer that fits anything",
    ),
    _Rule(
        "garbled",
        _garble,
        0.01,
        "share of responses whose ratios of the policy's probability to the engine's have an "
        f"arithmetic mean of {GARBLED:g} times the geometric one or more; suspicious from 0.01 "
        "on: a part of them, often the tail, is text that the policy would not write",
    ),
)
