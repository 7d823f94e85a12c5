"""The rewards of a rollout batch: `Scorer` calls the plugins and fills the reward columns.

The order is fixed: raw components, their weighted sum, clipping, terms on length and form, overlong
filtering, whitening, the place on the last token. Group filters, which read raw accuracy, and KL in
the reward come later. Axes: B rows, T response tokens, K reward components.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from posttrain.core.batch import RolloutBatch
from posttrain.core.contracts import PromptGroup, Reward, RolloutEngine, Task
from posttrain.core.data.tokens import ChatTokenizer, rollout_batch
from posttrain.core.errors import RunError
from posttrain.core.math import groups
from posttrain.core.math.masking import masked
from posttrain.core.rewards.checking import (
    check_failure_rate,
    checked_score,
    failure_metrics,
    is_failure,
)
from posttrain.core.rewards.shaping import RewardShaping, fill_steps, place_on_last_token
from posttrain.core.rewards.weighted import WeightedReward
from posttrain.core.rollout.episodes import Generates, generate_groups
from posttrain.core.types import Problem, RewardSample, SamplingParams, Score, of_tasks

OnMissing = Literal["zero", "unscored"]


class Pool(Protocol):
    """What scores rewards in other processes than this one; a context manager."""

    samples_per_s: float

    @property
    def rewards(self) -> tuple[Reward[Any], ...]:
        """Those that it scores."""

    def score(self, samples: Sequence[RewardSample]) -> list[list[Score]]:
        """For each of its rewards the checked scores of `samples`, in order."""

    def __enter__(self) -> Self:
        """Start what is not running yet."""

    def __exit__(self, *_: object) -> None:
        """End every process."""


@dataclass
class Scorer:
    """The rewards of one stage with their pool and their shaping."""

    task: Task[Any]
    rewards: Sequence[WeightedReward]
    tokenizer: ChatTokenizer
    clip: tuple[float | None, float | None] = (None, None)
    on_missing: OnMissing = "zero"
    max_failure_rate: float = 1.0
    pool: Pool | None = None
    shaping: RewardShaping = field(default_factory=RewardShaping)

    @property
    def names(self) -> list[str]:
        """Names of the rewards, in the order of their components."""
        return [weighted.name for weighted in self.rewards]

    def score(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """`batch` with its reward columns, and metrics; `RunError` if too many rewards failed."""
        scored = score_batch(
            batch,
            self.task,
            self.rewards,
            self.tokenizer,
            self.clip,
            on_missing=self.on_missing,
            pool=self.pool,
        )
        check_failure_rate(scored, self.names, self.max_failure_rate)
        metrics = rollout_metrics(scored, self.names)
        if self.pool is not None:
            metrics["reward/pool_samples_per_s"] = self.pool.samples_per_s
        shaped, found = self.shaping.apply(scored)
        return shaped, metrics | found

    def greedy(
        self,
        engine: RolloutEngine[Any],
        batch: RolloutBatch,
        max_tokens: int,
        episodes: Generates | None = None,
    ) -> Tensor:
        """Reward [B] of the greedy answer to each row's prompt, rescaled as the batch's rewards.

        NaN where the answer could not be scored. One more generation per prompt, at temperature 0;
        with `episodes`, a whole episode. Source: ReMax, arXiv:2310.10505, section 4.
        """
        members = list(batch.groups())
        prompts = []
        for rows in members:
            first = int(rows[0])
            ids = batch.prompt_ids[first][batch.prompt_mask[first].bool()]
            prompts.append(PromptGroup(batch.problems[first], tuple(ids.tolist())))
        params = SamplingParams(num_generations=1, max_tokens=max_tokens, temperature=0.0)
        generate = episodes.generate if episodes else generate_groups
        answered = rollout_batch(generate(engine, prompts, params), self.tokenizer)
        scored = score_batch(
            answered,
            self.task,
            self.rewards,
            clip=self.clip,
            on_missing=self.on_missing,
            pool=self.pool,
        )
        nan = torch.full((), torch.nan)
        values = torch.where(scored.column("scored").bool(), scored.column("rewards"), nan)
        result = torch.zeros(len(batch))
        firsts = [int(rows[0]) for rows in answered.groups()]  # the others are branches of it
        for rows, first in zip(members, firsts, strict=True):
            result[rows] = values[first]
        return self.shaping.rescaled(result)


def reward_samples(
    batch: RolloutBatch, task: Task[Any], *, with_steps: bool = False
) -> tuple[RewardSample, ...]:
    """What rewards see of each row, the task's verdict included, and that on its steps if asked."""
    samples = []
    for row, (problem, text) in enumerate(zip(batch.problems, batch.texts, strict=True)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()]
        sampled = batch.response_mask[row].nonzero().squeeze(1)
        response = batch.response_ids[row][sampled]
        whole = batch.response_ids[row][: int(sampled[-1]) + 1] if len(sampled) else sampled
        outcome = batch.outcomes[row] if batch.outcomes else None
        samples.append(
            RewardSample(
                problem=problem,
                prompt_ids=tuple(prompt.tolist()),
                response_ids=tuple(response.tolist()),
                text=text,
                truncated=bool(batch.truncated[row]),
                verdict=task.verdict(problem, text, outcome),
                transcript=batch.transcripts[row] if batch.transcripts else text,
                turns=batch.turns[row] if batch.turns else (text,),
                steps=task.verify_steps(problem, text) if with_steps else (),
                outcome=outcome,
                token_ids=tuple(whole.tolist()) if len(whole) > len(response) else (),
            )
        )
    return tuple(samples)


def model_scores(model: Reward[Any], samples: Sequence[RewardSample]) -> list[float]:
    """The scores of a reward that holds a model, which leaves none out."""
    values = [score.value for score in model.score(samples)]
    known = [value for value in values if value is not None]
    assert len(known) == len(samples), "a reward model scores every answer"
    return known


def score_batch(
    batch: RolloutBatch,
    task: Task[Any],
    rewards: Sequence[WeightedReward],
    tokenizer: ChatTokenizer | None = None,
    clip: tuple[float | None, float | None] = (None, None),
    *,
    on_missing: OnMissing = "zero",
    pool: Pool | None = None,
) -> RolloutBatch:
    """Fill `reward_components`, `rewards`, `scored`, `acc`, `token_rewards`, and narrow `mask`.

    The reward is the weighted sum of the components that could be scored, kept within `clip`, plus
    the weighted terms that shape length or form. A row that no component could score, one of whose
    components failed, or whose sum is not finite, is unscored: its reward is 0, its mask empty, and
    it takes no part in group statistics; so is a row of an episode that failed, whose `acc` is NaN.
    Branches of an episode have the reward of the first. The sum sits on the last sampled token.
    With a `tokenizer`, the steps of the first reward that scores steps fill `step_end` and
    `step_score`.
    Rewards of the `pool` are scored there, the others here. Gates (`only_if`) act on the
    components; `scores` and the steps are as the rewards gave them.
    """
    by_steps = next((i for i, w in enumerate(rewards) if w.reward.gives_steps), None)
    samples = reward_samples(batch, task, with_steps=by_steps is not None)
    scores = score_samples(rewards, samples, pool)
    columns = [_component(column) for column in scores]
    components = torch.stack(columns, dim=1) if columns else torch.zeros(len(batch), 0)
    components = gated(components, rewards)
    if by_steps is not None and tokenizer is not None:
        batch = fill_steps(batch, scores[by_steps], tokenizer)
    rows = tuple(zip(*scores, strict=True)) if scores else tuple(() for _ in samples)
    failed = torch.tensor([any(map(is_failure, row)) for row in rows], dtype=torch.bool)
    if batch.failures:
        failed |= torch.tensor([bool(reason) for reason in batch.failures])
    asked = asked_of(rewards, batch.problems)
    total, scored = shaped_sum(
        components, rewards, clip, on_missing=on_missing, failed=failed, asked=asked
    )
    acc = torch.tensor([s.verdict.correct for s in samples])
    if batch.failures:  # nobody has judged these
        acc[torch.tensor([bool(reason) for reason in batch.failures])] = torch.nan
    if (firsts := batch.first_branches()) is not None:
        total, scored, acc = total[firsts], scored[firsts], acc[firsts]
    filled = with_rewards(batch, total, scored).with_columns(reward_components=components, acc=acc)
    return replace(filled, samples=samples, scores=rows)


def with_rewards(
    batch: RolloutBatch, rewards: Tensor, scored: Tensor | None = None
) -> RolloutBatch:
    """`batch` with one reward a row, [B]: `rewards`, `scored`, `token_rewards`, and a mask without
    the rows that are not `scored` [B] (None = all are).
    """
    if scored is None:
        scored = torch.ones(len(batch), dtype=torch.bool)
    return batch.with_columns(
        rewards=rewards,
        scored=scored,
        mask=batch.mask * scored[:, None].to(batch.mask.dtype),
        token_rewards=place_on_last_token(rewards, batch.response_mask),
    )


def asked_of(rewards: Sequence[WeightedReward], problems: Sequence[Problem]) -> Tensor:
    """Which of K rewards score answers to which of B problems, [B, K]."""
    asked = torch.zeros(len(problems), len(rewards), dtype=torch.bool)
    for index, weighted in enumerate(rewards):
        asked[:, index] = torch.tensor([weighted.scores(p) for p in problems], dtype=torch.bool)
    return asked


def score_samples(
    rewards: Sequence[WeightedReward], samples: Sequence[RewardSample], pool: Pool | None
) -> list[list[Score]]:
    """The checked scores of each reward, one per sample, in order.

    A reward of some tasks of a mixture gives None for samples of the others.
    """
    asked = asked_of(rewards, [sample.problem for sample in samples])
    pooled = _pooled_scores(rewards, samples, asked, pool)
    columns = []
    for weighted, own in zip(rewards, asked.unbind(1), strict=True):
        rows = _rows(own)
        found = pooled.get(id(weighted.reward))
        if found is None:
            scores = _host_scores(weighted.reward, [samples[row] for row in rows]) if rows else []
            found = dict(zip(rows, scores, strict=True))
        columns.append([found[r] if its else NOT_ASKED for r, its in enumerate(own.tolist())])
    return columns


NOT_ASKED = Score(None, "unscored", "a reward of other tasks")


def _pooled_scores(
    rewards: Sequence[WeightedReward],
    samples: Sequence[RewardSample],
    asked: Tensor,
    pool: Pool | None,
) -> dict[int, dict[int, Score]]:
    """Scores by row of each reward of the `pool`, by its id.

    The pool asks all its rewards about a sample, so it gets those that any of them is asked about.
    """
    if pool is None:
        return {}
    there = {id(reward) for reward in pool.rewards}
    own = torch.tensor([id(weighted.reward) in there for weighted in rewards], dtype=torch.bool)
    rows = _rows(asked[:, own].any(dim=1))
    found = pool.score([samples[row] for row in rows]) if rows else [[] for _ in there]
    return {
        id(reward): dict(zip(rows, scores, strict=True))
        for reward, scores in zip(pool.rewards, found, strict=True)
    }


def _rows(chosen: Tensor) -> list[int]:
    """Places of the true values of `chosen` [B]."""
    rows: list[int] = chosen.nonzero().flatten().tolist()
    return rows


def _host_scores(reward: Reward[Any], samples: Sequence[RewardSample]) -> list[Score]:
    """The scores of a reward that runs in this process."""
    scores = reward.score(samples)
    if len(scores) != len(samples):
        raise RunError(
            f"reward '{reward.name}' returned {len(scores)} scores for {len(samples)} samples: it "
            "must return one Score per sample, in order"
        )
    return [checked_score(score) for score in scores]


def _component(scores: Sequence[Score]) -> Tensor:
    """Values [B] in float64; NaN where a sample could not be scored."""
    values = [math.nan if s.value is None else float(s.value) for s in scores]
    return torch.tensor(values, dtype=torch.float64)


def gated(components: Tensor, rewards: Sequence[WeightedReward]) -> Tensor:
    """`components` [B, K] with 0 where a reward's gate is closed; what is missing stays missing."""
    names, found = [weighted.name for weighted in rewards], components.clone()
    for index, weighted in enumerate(rewards):
        if weighted.only_if is not None:
            gate, own = components[:, names.index(weighted.only_if)], components[:, index]
            found[:, index] = torch.where((gate >= 1) | own.isnan(), own, 0.0)
    return found


def shaped_sum(
    components: Tensor,
    rewards: Sequence[WeightedReward],
    clip: tuple[float | None, float | None],
    *,
    on_missing: OnMissing = "zero",
    failed: Tensor | None = None,
    asked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rewards [B], float32, and which of them are scored [B], of `components` [B, K].

    Terms that shape length or form (`after_clip`) are added to the clipped sum of the others.
    """
    weights = [weighted.weight for weighted in rewards]
    shaping = [weighted.reward.after_clip for weighted in rewards]
    _, scored = weighted_sum(components, weights, on_missing=on_missing, failed=failed, asked=asked)
    before, after = (
        _sum([w if s is late else 0.0 for w, s in zip(weights, shaping, strict=True)], components)
        for late in (False, True)
    )
    total = clip_rewards(before, *clip) + after
    return masked(total, scored).float(), scored


def weighted_sum(
    components: Tensor,
    weights: Sequence[float],
    *,
    on_missing: OnMissing = "zero",
    failed: Tensor | None = None,
    asked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rewards [B] of `components` [B, K], and which of them are scored [B].

    A missing component (NaN) adds nothing, or with `on_missing` "unscored" leaves its row unscored,
    unless its reward was not `asked` [B, K] about that row.
    A row without any, one with a component that `failed` [B], or whose sum is not finite, is not
    scored: its reward is 0. Where there are no rewards at all, every row that did not fail is.
    """
    total = _sum(weights, components)
    missing = components.isnan()
    scored = torch.isfinite(total)
    if components.shape[1]:
        scored = scored & ~missing.all(dim=1)
    if on_missing == "unscored":
        wanted = missing if asked is None else missing & asked
        scored = scored & ~wanted.any(dim=1)
    if failed is not None:
        scored = scored & ~failed
    return masked(total, scored), scored


def _sum(weights: Sequence[float], components: Tensor) -> Tensor:
    """Weighted sum [B] of `components` [B, K]; a missing one adds nothing."""
    factors = torch.tensor(list(weights), dtype=components.dtype)
    given = components.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return (given * factors).sum(dim=1)


def clip_rewards(rewards: Tensor, low: float | None, high: float | None) -> Tensor:
    """`rewards` [B] between `low` and `high`; null = no bound. Comes before KL in the reward."""
    return rewards if low is None and high is None else rewards.clamp(low, high)


def rollout_metrics(batch: RolloutBatch, names: Sequence[str]) -> dict[str, float]:
    """Rewards, accuracy, groups and lengths of a scored batch; unscored rows are counted apart.

    Of rewards and verdicts an episode counts once, whatever its branches, and one that failed has
    none. Without rewards, whose `names` are none, nothing is said of them.
    """
    firsts = batch.first_branches()
    own = batch if firsts is None else batch.select(torch.unique(firsts))
    scored, acc = own.column("scored").bool(), own.column("acc")
    lengths = batch.response_mask.sum(dim=1).double()
    metrics = {
        "reward/unscored_frac": 1.0 - float(scored.double().mean()),
        "resp_len/mean": float(lengths.mean()),
        "resp_len/min": float(lengths.min()),
        "resp_len/max": float(lengths.max()),
        "resp_len/truncated_frac": float(batch.truncated.double().mean()),
        "tokens/response": float(lengths.sum()),
    }
    metrics["sampling/duplicate_frac"] = duplicate_frac(batch)
    if names:
        metrics |= reward_metrics(own.column("rewards"), scored)
    metrics |= component_metrics(own.column("reward_components")[~acc.isnan()], names)
    metrics |= failure_metrics(batch.scores, names)
    tasks = {f"acc/task/{label}": acc[rows] for label, rows in of_tasks(own.problems).items()}
    for name, verdicts in {"acc/mean": acc, **tasks}.items():
        if (judged := verdicts[~verdicts.isnan()]).numel():
            metrics[name] = float(judged.double().mean())
    metrics |= _group_metrics(own)
    if not names:  # without rewards all groups are equal, which says nothing
        del metrics["group/zero_adv_frac"]
    return metrics


def duplicate_frac(batch: RolloutBatch) -> float:
    """Share of responses whose tokens are those of an earlier response of their group; one without
    a token, of an episode that failed, repeats none."""
    repeats = 0
    for rows in batch.groups():
        own = [
            tuple(batch.response_ids[row][batch.response_mask[row].bool()].tolist())
            for row in rows.tolist()
        ]
        own = [tokens for tokens in own if tokens]
        repeats += len(own) - len(set(own))
    return repeats / len(batch)


def reward_metrics(rewards: Tensor, scored: Tensor, ddof: int = 0) -> dict[str, float]:
    """Mean, deviation and range of the scored `rewards` [B]; empty if none is scored.

    `ddof` 0 is the deviation of the batch itself, 1 the unbiased one (TRL).
    """
    values = rewards[scored.bool()].double()
    if values.numel() == 0:
        return {}
    return {
        "reward/mean": float(values.mean()),
        "reward/std": groups.sample_std(values, ddof),
        "reward/min": float(values.min()),
        "reward/max": float(values.max()),
    }


def component_metrics(components: Tensor, names: Sequence[str], ddof: int = 0) -> dict[str, float]:
    """Mean and deviation of each of `components` [B, K] before its weight; NaN is left out."""
    metrics = {}
    for name, column in zip(names, components.unbind(1), strict=True):
        values = column[~column.isnan()].double()
        if values.numel():
            metrics[f"reward/component/{name}"] = float(values.mean())
            metrics[f"reward/component_std/{name}"] = groups.sample_std(values, ddof)
    return metrics


def _group_metrics(batch: RolloutBatch) -> dict[str, float]:
    acc = batch.column("acc")
    verdicts = [acc[rows][~acc[rows].isnan()] for rows in batch.groups()]
    equal = groups.equal_share(batch.column("rewards"), batch.group_id, batch.column("scored"))
    return {
        "group/zero_adv_frac": equal,
        "group/all_correct_frac": _share(bool(v.numel() and (v >= 1).all()) for v in verdicts),
        "group/all_wrong_frac": _share(bool(v.numel() and (v < 1).all()) for v in verdicts),
    }


def _share(found: Iterable[bool]) -> float:
    return fmean(map(float, found))


def advantage_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Mean, spread and sign of the advantages over the tokens that take loss."""
    kept = batch.column("advantages")[batch.mask.bool()].double()
    if kept.numel() == 0:
        return {}
    return {
        "adv/mean": float(kept.mean()),
        "adv/std": float(kept.std(correction=0)),
        "adv/max_abs": float(kept.abs().max()),
        "adv/pos_frac": float((kept > 0).double().mean()),
    }
