"""The environment of a stage, with its tools, ready to run episodes."""

from __future__ import annotations

from posttrain.core.config.presets import tool_components
from posttrain.core.config.sections import EnvironmentComponent
from posttrain.core.contracts import Environment, Tool
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.rollout.episodes import EpisodeRunner
from posttrain.pipelines.stage.inputs import StagePlugins


def build_episodes(
    context: StagePlugins, component: EnvironmentComponent | None, tokenizer: ChatTokenizer
) -> EpisodeRunner | None:
    """What runs the episodes of a stage; None when responses have one turn."""
    if component is None:
        return None
    environment = context.build(Environment, component)
    tools = tool_components(component.fields())
    environment.setup([context.build(Tool, tool) for _, tool in tools])
    return EpisodeRunner(
        environment, tokenizer, component.max_turns, component.max_observation_tokens
    )
