"""What every plugin is: a class with a kind, a name and a pydantic config; presets among them."""

from __future__ import annotations

import copy
import re
from abc import ABC
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from posttrain.core.runtime.config_model import ConfigModel


class PluginConfig(ConfigModel):
    """Base of every plugin config; `ConfigModel` says what no field accepts."""


class NoConfig(PluginConfig):
    """Config of a plugin without settings."""


class Component(PluginConfig):
    """A plugin by name, with its own fields next to it: `name` or `{name: ..., field: ...}`."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(description="registered plugin name")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:  # Any: whatever YAML held
        return {"name": value} if isinstance(value, str) else value

    @property
    def shown(self) -> str:
        """The name in titles and tags: of a plugin in a file, its class."""
        return self.name.rpartition(":")[2]

    def fields(self) -> dict[str, object]:
        return dict(self.model_extra or {})


def _compiles(value: str) -> str:
    try:
        re.compile(value, re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return value


RegularExpression = Annotated[str, AfterValidator(_compiles)]
"""A field that holds a Python regular expression, in which . matches line ends too."""

ConfigT = TypeVar("ConfigT", bound=PluginConfig)


class Plugin(ABC, Generic[ConfigT]):
    """Base of every plugin. `kind` comes from the contract, `name` is what users write in YAML."""

    kind: ClassVar[str]
    name: ClassVar[str]
    Config: type[ConfigT]

    def __init__(self, config: ConfigT) -> None:
        self.config = config


class StatefulPlugin(Plugin[ConfigT]):
    """A plugin that may keep numbers, such as moving averages, from step to step."""

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint's `state`."""


class Algorithm(Plugin[ConfigT]):
    """A preset: names one plugin per axis. Every field it sets can be overridden in the YAML."""

    kind = "algorithm"
    stage: ClassVar[Literal["rl", "preference"]] = "rl"
    """The kind of stage whose fields it sets."""
    variant_of: ClassVar[str | None] = None
    """The preset that this one varies; that one's recipe and results serve it."""

    fields: ClassVar[Mapping[str, object]] = {}
    """Fields of a stage that this algorithm sets, as they would be written in YAML."""

    def expand(self) -> dict[str, object]:
        """`fields`, or others that depend on the preset's own settings."""
        return copy.deepcopy(dict(self.fields))
