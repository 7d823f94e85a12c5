"""What a stage's models, plugins and data are made from, in the run's process or in a rank's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from posttrain.core.config.base import Component, StageBase
from posttrain.core.config.fork_section import ForkSection, StepStage
from posttrain.core.config.presets import tool_components
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import EnvironmentComponent, EvaluationSection
from posttrain.core.contracts import (
    AnyEnvironment,
    Environment,
    LiveEnvironment,
    PlayedEnvironment,
    Plugin,
    Renderer,
    Task,
    Tool,
)
from posttrain.core.data.lengths import LengthRule
from posttrain.core.data.problem_sets import (
    check_disjoint,
    held_out_problems,
    read_problems,
    repeat_problems,
    training_problems,
)
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.gateway.runner import PlayedRunner
from posttrain.core.models.device import ModelRuntime
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.answers import AnswersHere
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.core.rollout.live import LiveRunner
from posttrain.core.rollout.plays import EpisodeLimits, OneTurn, Plays, ValueEpisodes
from posttrain.core.rollout.tool_use import ANY_NUMBER
from posttrain.core.rollout.turns import Turns
from posttrain.core.runtime.seeding import derive_seed, generator
from posttrain.core.store.artifacts import Artifact
from posttrain.core.training.ranks import ALONE, Ranks
from posttrain.core.types import Problem

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


PluginT = TypeVar("PluginT", bound=Plugin[Any])
BatchT = TypeVar("BatchT")
Episodes = EpisodeRunner | Plays
"""Whoever runs the episodes of a stage's environment."""

logger = logging.getLogger(__name__)

PROBLEMS_FILE = "problems.jsonl"
"""The problems in an artifact of kind `dataset`."""


def load_tokenizer(
    folder: Path, config: RunConfig, manager: PluginManager, *, light: bool = False
) -> ChatTokenizer:
    """The tokenizer of the model in `folder`, with the renderer and system prompt of the run."""
    component = config.model.renderer
    renderer: Renderer[Any] = manager.build(Renderer, component.name, component.fields())
    return ChatTokenizer.load(folder, config.model.system_prompt, renderer, light=light)


class StagePlugins(Protocol):
    """The plugins of a stage of a run, which may be over."""

    @property
    def run(self) -> RunConfig:
        """The run's complete config."""

    @property
    def name(self) -> str:
        """The stage's."""

    def build(self, contract: type[PluginT], component: Component) -> PluginT:
        """The plugin that a component of the config names."""


@contextmanager
def episodes_of(
    context: StagePlugins,
    component: EnvironmentComponent | None,
    tokenizer: ChatTokenizer,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Episodes | None]:
    """What runs the episodes of a stage, with its tools; None when responses have one turn.

    `check` is called while episodes or turns are waited for.
    """
    episodes = None if component is None else _episodes(context, component, tokenizer, check)
    try:
        yield episodes
    finally:
        if isinstance(episodes, Plays):
            episodes.close()


def _episodes(
    context: StagePlugins,
    component: EnvironmentComponent,
    tokenizer: ChatTokenizer,
    check: Callable[[], None],
) -> Episodes:
    environment = context.build(AnyEnvironment, component)
    if isinstance(environment, LiveEnvironment):
        turns = Turns(tokenizer, component.max_turns, component.max_observation_tokens)
        limits = episode_limits(component, environment.at_once, context.run.model.max_model_len)
        return LiveRunner(environment, turns, limits, check)
    if isinstance(environment, PlayedEnvironment):
        limits = episode_limits(component, environment.at_once, context.run.model.max_model_len)
        return PlayedRunner(environment, tokenizer, limits, component.max_requests, check)
    assert isinstance(environment, Environment)
    tools = [context.build(Tool, tool) for _, tool in tool_components(component.fields())]
    environment.setup(tools)
    return EpisodeRunner(
        environment,
        tokenizer,
        component.max_turns,
        component.max_observation_tokens,
        AnswersHere(environment, tools, check),
    )


def played_one_by_one(
    context: StageInputs, stage: RlStage, tokenizer: ChatTokenizer, episodes: Episodes | None
) -> Plays:
    """Whoever plays the stage's episodes without letting them wait for one another."""
    if isinstance(episodes, Plays):
        return episodes
    component = stage.environment or EnvironmentComponent(name="none", max_failure_rate=0.0)
    limits = episode_limits(component, ANY_NUMBER, context.run.model.max_model_len)
    limits = replace(limits, episode_s=math.inf)
    if episodes is None:
        return OneTurn(tokenizer, limits, context.check)
    return ValueEpisodes(episodes, limits, context.check)


def episode_limits(
    component: EnvironmentComponent, at_once: int, max_model_len: int
) -> EpisodeLimits:
    """The limits of episodes that are played at once, at most `at_once` unless the config says."""
    return EpisodeLimits(
        at_once=component.at_once or at_once,
        episode_s=component.episode_s,
        step_s=component.step_s,
        most_failed=component.max_failure_rate,
        max_model_len=max_model_len,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInputs:
    """A stage of a run with what it reads. `check` raises when asked to stop.

    `ranks` and `mesh` are of a rank among several, whose models are sharded over the mesh. `store`
    is the folder of finished stages, of a run's own process.
    """

    run: RunConfig
    name: str
    stage: StageBase
    inputs: Mapping[str, Artifact]
    manager: PluginManager
    task: Task[Any]
    runtime: ModelRuntime
    check: Callable[[], None]
    ranks: Ranks = ALONE
    mesh: DeviceMesh | None = None
    store: Path | None = None

    @property
    def model_dir(self) -> Path:
        """Directory of the model this stage reads."""
        return self.inputs["model"].path

    @property
    def trained_runtime(self) -> ModelRuntime:
        """How a model that is trained is loaded: sharded weights are the float32 masters."""
        if self.mesh is None:
            return self.runtime
        return replace(self.runtime, dtype=torch.float32, autocast=False)

    @property
    def fork(self) -> ForkSection | None:
        """Where the stage's first steps come from, if it does not take them itself."""
        return self.stage.fork if isinstance(self.stage, StepStage) else None

    def begins_fork_at(self, step: int) -> bool:
        """Whether a checkpoint after `step` is the one that the stage was given to begin with."""
        return self.fork is not None and self.fork.step == step

    @property
    def draw_seed(self) -> int:
        """The seed of what steps draw: the run's, or another that a fork has for later steps."""
        if self.fork is None or self.fork.seed is None:
            return self.run.seed
        return derive_seed(self.run.seed, "fork", self.fork.seed)

    def drew_with(self, step: int) -> int:
        """The seed of what a past step drew: one that a fork shares, with the run's."""
        shared = self.fork is not None and step <= self.fork.step
        return self.run.seed if shared else self.draw_seed

    def in_order(self, batches: Sequence[BatchT]) -> list[BatchT]:
        """The batches of all steps: a fork with a seed of its own takes later ones in another
        order.
        """
        if self.fork is None or self.fork.seed is None:
            return list(batches)
        shared, later = batches[: self.fork.step], batches[self.fork.step :]
        draw = generator(self.draw_seed, self.name, "order after the fork")
        return [*shared, *(later[i] for i in torch.randperm(len(later), generator=draw).tolist())]

    def place(self, model: PreTrainedModel) -> None:
        """Spread a model over the ranks, if there are several."""
        if self.mesh is not None:
            from posttrain.core.models.sharded import shard

            shard(model, self.mesh, self.runtime.dtype)

    def build(self, contract: type[PluginT], component: Component) -> PluginT:
        """The plugin that a component of the config names."""
        return self.manager.build(contract, component.name, component.fields())

    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the model this stage reads."""
        return load_tokenizer(self.model_dir, self.run, self.manager)

    def report_lengths(self, rule: LengthRule, group: str = "data") -> None:
        """Warn of rows that were too long. Raises `DataError` where that is not allowed."""
        if warning := rule.check():
            logger.warning("%s: %s", self.name, warning)

    def training_problems(self, count: int) -> list[Problem]:
        """Training problems for this stage, disjoint from the held-out ones."""
        made = self.inputs.get("dataset")
        if made is None:
            problems = training_problems(self.task, count, self.run.seed, self.name)
        else:
            pool = read_problems(made.path / PROBLEMS_FILE)
            problems = repeat_problems(pool, count, self.run.seed, self.name)
        check_disjoint(problems, self.held_out(self.run.evaluation))
        return problems

    def held_out(self, section: EvaluationSection) -> list[Problem]:
        """The run's held-out problems."""
        return held_out_problems(self.task, section.num_problems, self.run.seed)
