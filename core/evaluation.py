"""Greedy and sampled accuracy of a policy on held-out problems, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.core.config.schema import EvaluationSection
from posttrain.core.contracts import PromptGroup, RolloutEngine, Task
from posttrain.core.data.packing import response_texts
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.math.intervals import mean_interval, wilson
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.rollout.generation import generate_groups
from posttrain.core.rollout.prompts import PromptEncoder
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Problem, SamplingParams


@dataclass(frozen=True, slots=True)
class EvaluatedProblem:
    """One problem with the greedy answer and the share of sampled answers that were right."""

    problem: Problem
    greedy_text: str
    parsed: str | None
    greedy_correct: float
    truncated: bool
    response_tokens: int
    sampled_accuracy: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The rows of an evaluation and its summary metrics."""

    rows: tuple[EvaluatedProblem, ...]
    metrics: dict[str, float]


def evaluate_policy(
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    task: Task[Any],
    problems: Sequence[Problem],
    section: EvaluationSection,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
    episodes: EpisodeRunner | None = None,
) -> Evaluation:
    """Evaluate the engine's current weights on `problems`.

    Greedy accuracy is right answers over problems, with Wilson's interval. Sampled accuracy is
    avg@k: the mean over problems of the share of `num_samples` answers that were right; its
    interval is over problems, since answers to one problem are not independent. `progress`
    is told how many problems are done. With `episodes`, answers take several turns.
    """
    rows: list[EvaluatedProblem] = []
    for start in range(0, len(problems), section.batch_size):
        part = problems[start : start + section.batch_size]
        rows += _evaluate_part(engine, tokenizer, task, part, section, seed, episodes)
        progress(len(rows))
    return Evaluation(tuple(rows), _summary(rows, section))


def _evaluate_part(
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    task: Task[Any],
    problems: Sequence[Problem],
    section: EvaluationSection,
    seed: int,
    episodes: EpisodeRunner | None,
) -> list[EvaluatedProblem]:
    encoder: PromptEncoder = episodes or tokenizer
    prompts = [PromptGroup(problem, encoder.encode_prompt(problem)) for problem in problems]
    draw = partial(episodes.generate if episodes else generate_groups, engine, prompts)
    greedy = draw(SamplingParams(max_tokens=section.max_response_length, temperature=0.0))
    sampled_accuracy: list[float | None] = [None] * len(problems)
    if section.num_samples:
        # The engine mixes each prompt into its seed, so batch_size does not change what is drawn.
        sampled = draw(
            SamplingParams(
                num_generations=section.num_samples,
                max_tokens=section.max_response_length,
                temperature=section.temperature,
                top_p=section.top_p,
                seed=derive_seed(seed, "evaluate"),
            ),
        )
        for i, (problem, group) in enumerate(zip(problems, sampled, strict=True)):
            texts = [response_texts(c, tokenizer)[0] for c in group.completions]
            right = [task.verify(problem, text).correct for text in texts]
            sampled_accuracy[i] = sum(right) / len(right)
    rows = []
    for problem, group, share in zip(problems, greedy, sampled_accuracy, strict=True):
        (completion,) = group.completions
        text, transcript = response_texts(completion, tokenizer)
        verdict = task.verify(problem, text)
        rows.append(
            EvaluatedProblem(
                problem,
                transcript,
                verdict.parsed,
                verdict.correct,
                completion.finish_reason == "length",
                sum(completion.sampled) if completion.sampled else len(completion.token_ids),
                share,
            )
        )
    return rows


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
    if section.num_samples:
        shares = [row.sampled_accuracy for row in rows if row.sampled_accuracy is not None]
        mean, low, high = mean_interval(shares)
        metrics |= {
            "eval/sampled_accuracy": mean,
            "eval/sampled_low": max(0.0, low),
            "eval/sampled_high": min(1.0, high),
        }
    return metrics
