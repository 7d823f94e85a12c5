"""Greedy and sampled accuracy of a policy on held-out problems, with 95 % intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import PromptGroup, Reward, RolloutEngine, SampledGroup, Task
from posttrain.core.data.tokens import ChatTokenizer, reward_sample
from posttrain.core.evaluation.sampled import SampledAnswer, failed_share, judged
from posttrain.core.math.groups import pass_at_k
from posttrain.core.math.intervals import mean_interval, share_interval, standard_error, wilson
from posttrain.core.rewards.scoring import model_scores
from posttrain.core.rollout.episodes import Generates, generate_groups
from posttrain.core.rollout.turns import first_branches
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Problem, SamplingParams, Verdict, of_tasks


@dataclass(frozen=True, slots=True)
class EvaluatedProblem:
    """One problem with the greedy answer and the verdicts on the sampled ones, in their order."""

    problem: Problem
    greedy_text: str
    parsed: str | None
    greedy_correct: float
    truncated: bool
    response_tokens: int
    sampled: tuple[Verdict, ...] = ()
    scores: tuple[float | None, ...] = ()
    """The reward model's score of each sampled answer, None of an episode that failed; empty
    without a reward model."""

    @property
    def sampled_accuracy(self) -> float | None:
        if not self.sampled:
            return None
        return sum(verdict.correct for verdict in self.sampled) / len(self.sampled)

    def pass_at(self, k: int) -> float:
        """Unbiased chance that k answers hold a fully right one (arXiv:2107.03374)."""
        right = sum(verdict.correct >= 1 for verdict in self.sampled)
        return pass_at_k(len(self.sampled), right, k)

    def avg_at(self, k: int) -> float:
        """Mean verdict of the first k answers (DAPO's avg@32)."""
        return sum(verdict.correct for verdict in self.sampled[:k]) / k

    def right_at(self, k: int) -> float:
        """Share of the first k answers that are fully right."""
        return sum(verdict.correct >= 1 for verdict in self.sampled[:k]) / k

    def maj_at(self, k: int) -> float:
        """Whether the answer read most often among the first k is right; the earlier wins a tie.

        Answers that could not be read have no vote; with none at all it is wrong.
        """
        read = [verdict for verdict in self.sampled[:k] if verdict.parsed is not None]
        if not read:
            return 0.0
        winner, _ = Counter(verdict.parsed for verdict in read).most_common(1)[0]
        return float(next(v for v in read if v.parsed == winner).correct >= 1)

    def rm_at(self, k: int) -> float:
        """Whether the one of the first k that scores highest is right; the earlier wins a tie."""
        known = [-math.inf if score is None else score for score in self.scores[:k]]
        best = known.index(max(known))
        return float(self.sampled[best].correct >= 1)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The rows of an evaluation and its summary metrics."""

    rows: tuple[EvaluatedProblem, ...]
    metrics: dict[str, float]


def evaluate_policy(
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    task: Task[Any],
    prompts: Sequence[PromptGroup],
    section: EvaluationSection,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
    episodes: Generates | None = None,
    reward_model: Reward[Any] | None = None,
) -> Evaluation:
    """Evaluate the engine's current weights on the problems of `prompts`.

    Greedy accuracy is right answers over problems, with Wilson's interval. Sampled accuracy is
    avg@k: the mean over problems of the share of `num_samples` answers that were right; its
    interval is over problems, since answers to one problem are not independent. `progress`
    receives how many problems are done. With `episodes`, answers take several turns. With a
    `reward_model`, which scores every sampled answer, also rm@k (arXiv:2409.12122, section 4).
    """
    rows: list[EvaluatedProblem] = []
    firsts: list[SampledAnswer] = []
    drawn: list[SampledAnswer] = []
    draw = partial(episodes.generate if episodes else generate_groups, engine)
    greedily = SamplingParams(max_tokens=section.max_response_length, temperature=0.0)
    for start in range(0, len(prompts), section.batch_size):
        part = prompts[start : start + section.batch_size]
        greedy = draw(part, greedily)
        sampled = draw(part, _sampling(section, seed)) if section.num_samples else []
        answers = [judged(group, task, tokenizer) for group in sampled]
        verdicts = [tuple(answer.verdict for answer in said) for said in answers]
        scores: list[tuple[float | None, ...]] = []
        if reward_model is not None and sampled:
            scores = _scores(reward_model, sampled, verdicts, tokenizer)
        nothing: list[tuple[Any, ...]] = [()] * len(part)  # Any: verdicts or scores
        for group, said, ranked in zip(greedy, verdicts or nothing, scores or nothing, strict=True):
            answer, completion = judged(group, task, tokenizer)[0], group.completions[0]
            firsts.append(answer)
            rows.append(
                EvaluatedProblem(
                    group.prompt.problem,
                    answer.text,
                    answer.verdict.parsed,
                    answer.verdict.correct,
                    answer.truncated,
                    sum(completion.sampled) if completion.sampled else len(completion.token_ids),
                    said,
                    ranked,
                )
            )
        drawn += [answer for said in answers for answer in said]
        progress(len(rows))
    metrics = _summary(rows, section)
    for name, found in (("eval/failed_frac", firsts), ("eval/sampled_failed_frac", drawn)):
        if found and (lost := failed_share(found)):
            metrics[name] = lost
    return Evaluation(tuple(rows), metrics)


def _sampling(section: EvaluationSection, seed: int) -> SamplingParams:
    """The engine mixes each prompt into its seed, so batch_size does not change what is drawn."""
    return SamplingParams(
        num_generations=section.num_samples,
        max_tokens=section.max_response_length,
        temperature=section.temperature,
        top_p=section.top_p,
        seed=derive_seed(seed, "evaluate"),
    )


def _scores(
    reward_model: Reward[Any],
    groups: Sequence[SampledGroup],
    verdicts: Sequence[tuple[Verdict, ...]],
    tokenizer: ChatTokenizer,
) -> list[tuple[float | None, ...]]:
    """The model's score of each answer that has not failed, in the order of `verdicts`."""
    episodes = [first_branches(group.completions) for group in groups]
    samples = [
        reward_sample(group.prompt, completion, tokenizer, verdict)
        for group, own, said in zip(groups, episodes, verdicts, strict=True)
        for completion, verdict in zip(own, said, strict=True)
        if not completion.failed
    ]
    values = iter(model_scores(reward_model, samples))
    return [tuple(None if c.failed else next(values) for c in own) for own in episodes]


def _summary(rows: Sequence[EvaluatedProblem], section: EvaluationSection) -> dict[str, float]:
    num = len(rows)
    right = sum(1 for row in rows if row.greedy_correct >= 1.0)
    low, high = wilson(right, num)
    metrics = {
        "eval/greedy_accuracy": right / num,
        "eval/greedy_low": low,
        "eval/greedy_high": high,
        "eval/num_problems": float(num),
        "resp_len/mean": sum(row.response_tokens for row in rows) / num,
        "resp_len/truncated_frac": sum(row.truncated for row in rows) / num,
    }
    for label, places in of_tasks([row.problem for row in rows]).items():
        solved = sum(rows[place].greedy_correct >= 1.0 for place in places)
        low, high = wilson(solved, len(places))
        metrics[f"eval/task_accuracy/{label}"] = solved / len(places)
        metrics |= {f"eval/task_low/{label}": low, f"eval/task_high/{label}": high}
    if section.num_samples:
        shares = [row.sampled_accuracy for row in rows if row.sampled_accuracy is not None]
        mean, low, high = share_interval(shares)
        metrics |= {
            "eval/sampled_accuracy": mean,
            "eval/sampled_low": low,
            "eval/sampled_high": high,
        }
        metrics |= _at_k(rows, section)
    return metrics


def _at_k(rows: Sequence[EvaluatedProblem], section: EvaluationSection) -> dict[str, float]:
    """pass@k, avg@k, and maj@k and rm@k where they are due, with standard errors over problems.

    What rm@k gains over the mean of the same answers has an interval over problems.
    """
    metrics: dict[str, float] = {}
    ranked = all(row.scores for row in rows)
    for k in section.pass_at or ((section.num_samples,) if ranked else ()):
        found = {"pass": [row.pass_at(k) for row in rows], "avg": [row.avg_at(k) for row in rows]}
        if section.majority:
            found["maj"] = [row.maj_at(k) for row in rows]
        if ranked:
            found["rm"] = [row.rm_at(k) for row in rows]
            gains = [best - row.right_at(k) for best, row in zip(found["rm"], rows, strict=True)]
            mean, low, high = mean_interval(gains, (-1.0, 1.0))
            metrics[f"eval/rm_gain_at/{k}"] = mean
            if standard_error(gains) is not None:  # equal ones would claim to know all problems
                metrics |= {f"eval/rm_gain_at_low/{k}": low, f"eval/rm_gain_at_high/{k}": high}
        for name, values in found.items():
            metrics[f"eval/{name}_at/{k}"] = sum(values) / len(values)
            error = standard_error(values)
            if error is not None:
                metrics[f"eval/{name}_at_se/{k}"] = error
    return metrics
