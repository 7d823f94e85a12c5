"""Rollouts on their way from the sampler to the update, some of them sampled ahead of it.

With `max_staleness: k` the rollouts up to step s + k are sampled while step s trains, one after
another, so rollout n is sampled with policy version max(0, n - 1 - k): always, whatever was faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from posttrain.core.batch import RolloutBatch
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import RolloutEngine, RolloutRequest, SampledGroup, Sampler
from posttrain.core.data.tokens import ChatTokenizer, response_texts, rollout_batch
from posttrain.core.models.sampled_outputs import SampledOutputs
from posttrain.core.rollout.episode_log import EpisodeLog
from posttrain.core.rollout.episodes import (
    EpisodeRunner,
    episode_metrics,
    generate_groups,
    groups_from_json,
    groups_to_json,
)
from posttrain.core.rollout.prompts import PromptStream
from posttrain.core.rollout.streaming import GroupStream
from posttrain.core.runtime.locks import SharedLock
from posttrain.core.runtime.seeding import derive_seed
from posttrain.pipelines.rl.build import sampling_of
from posttrain.pipelines.rl.given_answers import GivenAnswers
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import Episodes


@dataclass(frozen=True, slots=True)
class Rollout:
    """The sampled groups of one step as a batch that grows, and what sampling measured.

    `metrics` belong to `step`, whatever step was trained on while they were taken. `batch` is None
    when the sampler kept no group at all. `mean_length` is the mean number of sampled tokens of a
    response. `reference_kl` is the KL to the reference per token and per sequence, once measured.
    `products` are what the engine kept for the update. `given` answers are none of the policy's.
    """

    step: int
    groups: Sequence[SampledGroup]
    batch: RolloutBatch | None
    metrics: dict[str, float]
    mean_length: float = 0.0
    reference_kl: tuple[float, float] | None = None
    products: SampledOutputs | None = field(default=None, repr=False)
    given: bool = False

    @property
    def rows(self) -> RolloutBatch:
        """The batch of a step that has one."""
        assert self.batch is not None, "a step without samples has no update"
        return self.batch

    def with_rows(self, batch: RolloutBatch) -> Rollout:
        """The same rollout with columns filled."""
        return replace(self, batch=batch)

    def forget_products(self) -> None:
        """The update has used them, or there is none."""
        if self.products is not None:
            self.products.forget()

    def staleness(self) -> dict[str, float]:
        """Age, in updates, of the policies that sampled the tokens, when `step` begins."""
        sampled = None if self.batch is None else self.batch.response_mask.bool()
        if self.batch is None or sampled is None or not sampled.any():
            return {}
        lag = (self.step - 1) - self.batch.policy_version[sampled].double()
        return {"staleness/mean": float(lag.mean()), "staleness/max": float(lag.max())}


@dataclass
class Rollouts:
    """Samples the rollouts of a stage, and keeps those that no update has used yet.

    The sampler, the cursor on the prompts and the engine while it samples have no other owner.
    `recording` records what the engine computes, for the update; None where it does not. `log` has
    the samples of steps that were drawn before, where drawing them again gives others. `stream`
    samples without an end, with `engine_use` held together; whoever else calls the engine is alone.
    `given` has the answers of steps that learn from others than the policy's.
    """

    context: StageContext
    stage: RlStage
    engine: RolloutEngine[Any]
    tokenizer: ChatTokenizer
    sampler: Sampler[Any]
    prompts: PromptStream
    episodes: Episodes | None = None
    recording: Callable[[], AbstractContextManager[SampledOutputs | None]] = nullcontext
    log: EpisodeLog | None = None
    stream: GroupStream | None = None
    engine_use: SharedLock = field(default_factory=SharedLock)
    given: GivenAnswers | None = None
    waiting: dict[int, Rollout] = field(default_factory=dict)

    def sample(self, step: int) -> Rollout:
        """The groups of `step`, sampled with the engine's policy unless a checkpoint had them.

        May run in a thread while the policy is updated.
        """
        if step not in self.waiting:
            found = None if self.log is None else self.log.read(step)
            if found is not None:
                self.waiting[step] = self._recalled(step, found)
            else:
                self.waiting[step] = self._made(step)
                if self.log is not None:
                    self.log.write(step, self._logged(self.waiting[step]))
        return self.waiting[step]

    def _made(self, step: int) -> Rollout:
        if self.given is not None and self.given.are_of(step):
            return self._given(step, self.given)
        return self._taken(step) if self.stream else self._sampled(step)

    def _given(self, step: int, given: GivenAnswers) -> Rollout:
        """The answers that somebody else has for the next prompts."""
        began = time.perf_counter()
        found = given.source.answers(step, self.prompts)
        if isinstance(found, RolloutBatch):
            rollout = self._of_batch(step, (), found, {})
        else:
            rollout = self._rollout(step, found, {})
        seconds = time.perf_counter() - began
        return replace(rollout, metrics={"distil/on_policy": 0.0, "time/rollout_s": seconds})

    def _sampled(self, step: int) -> Rollout:
        with self.using_engine():
            return self._sample(step)

    def _taken(self, step: int) -> Rollout:
        """The first groups that the stream has done."""
        assert self.stream is not None
        began, stage = time.perf_counter(), self.stage
        oldest = self.engine.policy_version - stage.max_staleness
        taken = self.stream.take(stage.prompts_per_step, oldest, self.context.check)
        rollout = self._rollout(step, taken.groups, {})
        seconds = time.perf_counter() - began
        metrics = {**episode_metrics(taken.groups), **taken.metrics, "time/rollout_s": seconds}
        return replace(rollout, metrics=metrics)

    def close(self) -> None:
        """Sample nothing more."""
        if self.stream is not None:
            self.stream.close()
            if self.stream.plays is not self.episodes:
                self.stream.plays.close()

    def _logged(self, rollout: Rollout) -> dict[str, Any]:  # Any: JSON
        return {
            "sampler": self.sampler.state(),
            "prompts": self.prompts.position,
            "stream": self.stream.state() if self.stream else None,
            "metrics": rollout.metrics,
            "groups": groups_to_json(rollout.groups),
        }

    def _recalled(self, step: int, found: Mapping[str, Any]) -> Rollout:  # Any: JSON
        """The rollout as it was sampled, and everything behind it."""
        self.sampler.load_state(found["sampler"])
        self.prompts.position = found["prompts"]
        if self.stream is not None:
            self.stream.load_state(found["stream"])
        return self._rollout(step, groups_from_json(found["groups"]), found["metrics"])

    def take(self, step: int) -> Rollout:
        """The rollout of `step`, which is kept no longer."""
        return self.waiting.pop(step)

    @contextmanager
    def using_engine(self) -> Iterator[None]:
        """Hold the engine: rollouts that are sampled in a thread wait, or are waited for.

        Whoever calls the engine between the start of a step and the end of its update needs this.
        """
        with self.engine_use.alone():
            yield

    def _sample(self, step: int) -> Rollout:
        stage = self.stage
        began = time.perf_counter()
        seed = derive_seed(self.context.draw_seed, self.context.name, "rollout", step)
        params = sampling_of(stage, seed)
        check, episodes = self.context.check, self.episodes
        generate = partial(episodes.generate, check=check) if episodes else generate_groups
        request = RolloutRequest(
            engine=self.engine,
            prompts=self.prompts.take(stage.prompts_per_step),
            params=params,
            policy_version=self.engine.policy_version,
            generate=partial(generate, self.engine),
            more_prompts=self.prompts.take,
            verify=self._verify,
            check=check,
            episodes=episodes if isinstance(episodes, EpisodeRunner) else None,
        )
        with self.recording() as products:
            sampled = self.sampler.sample(request)
        rollout = self._rollout(step, sampled.groups, {})
        batch = rollout.batch
        kept = 0.0 if batch is None else float(batch.response_mask.sum())
        seconds = time.perf_counter() - began
        tokens = sampled.metrics.get("sampling/tokens_drawn", kept)
        metrics = {
            **episode_metrics(sampled.groups),
            **sampled.metrics,
            "time/rollout_s": seconds,
            "throughput/rollout_tokens_per_s": tokens / seconds,
        }
        if self.given is not None:
            metrics["distil/on_policy"] = 1.0
        return replace(rollout, metrics=metrics, products=products)

    def _verify(self, group: SampledGroup) -> list[float]:
        """The verifier's raw verdict on each response of a group."""
        task, problem = self.context.task, group.prompt.problem
        texts = [response_texts(c, self.tokenizer).last for c in group.completions]
        judged = zip(texts, group.completions, strict=True)
        return [task.verdict(problem, text, c.reward).correct for text, c in judged]

    def _rollout(
        self, step: int, groups: Sequence[SampledGroup], metrics: dict[str, float]
    ) -> Rollout:
        """The rollout of `groups`, its batch included."""
        if not groups:
            return Rollout(step, groups, None, metrics)
        return self._of_batch(step, groups, rollout_batch(groups, self.tokenizer), metrics)

    def _of_batch(
        self,
        step: int,
        groups: Sequence[SampledGroup],
        batch: RolloutBatch,
        metrics: dict[str, float],
    ) -> Rollout:
        lengths = batch.response_mask.sum(dim=1).double()
        given = self.given is not None and self.given.are_of(step)
        if given:  # so that it is as old as the policy
            version = torch.full_like(batch.policy_version, self.engine.policy_version)
            batch = batch.with_columns(policy_version=version)
        return Rollout(step, groups, batch, metrics, float(lengths.mean()), given=given)

    def state(self) -> dict[str, Any]:  # Any: JSON
        """Sampler, cursor and waiting rollouts; must not be called while one is sampled."""
        return {
            "sampler": self.sampler.state(),
            "prompts": self.prompts.position,
            "stream": self.stream.state() if self.stream else None,
            "waiting": [
                {"step": r.step, "metrics": r.metrics, "groups": groups_to_json(r.groups)}
                for r in self.waiting.values()
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Continue from `state`."""
        if "sampler" in state:  # a fork leaves out that of another sampler
            self.sampler.load_state(state["sampler"])
        self.prompts.position = state["prompts"]
        if self.stream is not None:
            self.stream.load_state(state["stream"])
        for saved in state["waiting"]:
            step, groups = int(saved["step"]), groups_from_json(saved["groups"])
            self.waiting[step] = self._rollout(step, groups, saved["metrics"])


def rollouts_due(step: int, first_step: int, last_step: int, max_staleness: int) -> range:
    """Steps whose rollouts are to be started when `step` begins, in order.

    At the first step (of the stage, or after a restart) all up to `max_staleness` ahead, then one
    for each step.
    """
    newest = step + max_staleness
    return range(step if step == first_step else newest, min(newest, last_step) + 1)
