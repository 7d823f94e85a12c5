"""avg@k and pass@k of a policy from k sampled answers to each of a few held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.config.sampled_evaluation import SampledEvaluationSection
from posttrain.core.config.sections import EvaluationSection
from posttrain.core.contracts import PromptGroup, RolloutEngine, SampledGroup, Task
from posttrain.core.data.tokens import ChatTokenizer, response_texts
from posttrain.core.math.groups import pass_at_k
from posttrain.core.math.intervals import share_interval
from posttrain.core.rollout.episodes import Generates, generate_groups
from posttrain.core.rollout.turns import first_branches
from posttrain.core.types import Problem, SamplingParams, Verdict


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One sampled answer: its text, the verdict, whether the length limit cut it, and whether its
    episode failed, which counts as wrong."""

    text: str
    verdict: Verdict
    truncated: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class SampledProblem:
    """A problem with its k sampled answers, in the order in which they were drawn."""

    problem: Problem
    answers: tuple[SampledAnswer, ...]

    @property
    def right(self) -> int:
        """Answers that are fully right."""
        return sum(answer.verdict.correct >= 1 for answer in self.answers)

    @property
    def average(self) -> float:
        """Mean verdict of the answers."""
        return sum(answer.verdict.correct for answer in self.answers) / len(self.answers)

    def pass_at(self, k: int) -> float:
        """Unbiased chance that k answers hold a fully right one (arXiv:2107.03374)."""
        return pass_at_k(len(self.answers), self.right, k)


@dataclass(frozen=True, slots=True)
class SampledEvaluation:
    """The problems with their answers, and the metrics over them."""

    rows: tuple[SampledProblem, ...]
    metrics: dict[str, float]

    def table(self, shown: int = 2) -> list[dict[str, object]]:
        """A row per problem: right answers of k, and the first right and wrong texts."""
        found: list[dict[str, object]] = []
        for row in self.rows:
            texts: dict[bool, list[str]] = {True: [], False: []}
            for answer in row.answers:
                texts[answer.verdict.correct >= 1].append(answer.text)
            found.append(
                {
                    "prompt": row.problem.prompt,
                    "answer": row.problem.answer,
                    "right": row.right,
                    "sampled": len(row.answers),
                    "different": len({answer.text for answer in row.answers}),
                    "truncated": sum(answer.truncated for answer in row.answers),
                    **{f"right response {i + 1}": t for i, t in enumerate(texts[True][:shown])},
                    **{f"wrong response {i + 1}": t for i, t in enumerate(texts[False][:shown])},
                }
            )
        return found


def sample_policy(
    engine: RolloutEngine[Any],
    tokenizer: ChatTokenizer,
    task: Task[Any],
    prompts: Sequence[PromptGroup],
    section: SampledEvaluationSection,
    whole: EvaluationSection,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
    episodes: Generates | None = None,
) -> SampledEvaluation:
    """Sample k answers of the engine's current weights to the first of `prompts`, and judge them.

    `whole` is the run's own evaluation, of which these problems are a part. The draws depend on
    `seed`, the prompts and the weights alone. `progress` receives how many problems are done. With
    `episodes`, answers take several turns.
    """
    limits, rows = section.as_evaluation(whole), list[SampledProblem]()
    chosen = prompts[: limits.num_problems]
    params = SamplingParams(
        num_generations=section.k,
        max_tokens=limits.max_response_length,
        temperature=section.temperature,
        top_p=section.top_p,
        seed=seed,
    )
    draw = episodes.generate if episodes else generate_groups
    for start in range(0, len(chosen), limits.batch_size):
        # The engine mixes each prompt into its seed, so the batch does not change what is drawn.
        for group in draw(engine, chosen[start : start + limits.batch_size], params):
            rows.append(SampledProblem(group.prompt.problem, judged(group, task, tokenizer)))
        progress(len(rows))
    return SampledEvaluation(tuple(rows), sampled_metrics(rows, section))


def judged(
    group: SampledGroup, task: Task[Any], tokenizer: ChatTokenizer
) -> tuple[SampledAnswer, ...]:
    """The answers to one problem; of several branches of one, the one that came to an end."""
    answers = []
    for completion in first_branches(group.completions):
        said = response_texts(completion, tokenizer)
        failed, verdict = bool(completion.failed), Verdict(0.0, None)
        if not failed:
            verdict = task.verdict(group.prompt.problem, said.last, completion.reward)
        cut = tokenizer.is_truncated(completion)
        answers.append(SampledAnswer(said.transcript, verdict, cut, failed))
    return tuple(answers)


def failed_share(answers: Sequence[SampledAnswer]) -> float:
    """The share of answers whose episodes failed."""
    return sum(answer.failed for answer in answers) / len(answers)


def sampled_metrics(
    rows: Sequence[SampledProblem], section: SampledEvaluationSection
) -> dict[str, float]:
    """avg@k and each pass@k with 95 % intervals over problems; answers of one are not independent.

    Where an environment's branches left fewer than k answers to some problem, sizes above that are
    left out.
    """
    least = min(len(row.answers) for row in rows)
    values = {f"avg_at{{}}/{section.k}": [row.average for row in rows]}
    values |= {
        f"pass_at{{}}/{k}": [row.pass_at(k) for row in rows] for k in section.sizes if k <= least
    }
    metrics = {"eval/sampled_problems": float(len(rows))}
    if lost := failed_share([answer for row in rows for answer in row.answers]):
        metrics["eval/sampled_failed_frac"] = lost
    for name, shares in values.items():
        mean, low, high = share_interval(shares)
        metrics |= {
            f"eval/{name.format('')}": mean,
            f"eval/{name.format('_low')}": low,
            f"eval/{name.format('_high')}": high,
        }
    return metrics
