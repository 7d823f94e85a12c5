"""The environment of a stage, with its tools, ready to run episodes."""

from __future__ import annotations

from typing import Any

from posttrain.core.config.presets import tool_components
from posttrain.core.config.sections import EnvironmentComponent
from posttrain.core.contracts import Environment, Tool
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.episodes import EpisodeRunner


def build_episodes(
    manager: PluginManager, component: EnvironmentComponent | None, tokenizer: ChatTokenizer
) -> EpisodeRunner | None:
    """What runs the episodes of a stage; None when responses have one turn."""
    if component is None:
        return None
    environment: Environment[Any] = manager.build(Environment, component.name, component.fields())
    named = [tool for _, tool in tool_components(component.fields())]
    environment.setup([manager.build(Tool, tool.name, tool.fields()) for tool in named])
    return EpisodeRunner(
        environment, tokenizer, component.max_turns, component.max_observation_tokens
    )
