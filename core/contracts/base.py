"""What every plugin is: a class with a kind, a name and a pydantic config."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict


class PluginConfig(BaseModel):
    """Base of every plugin config: unknown keys are errors and values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NoConfig(PluginConfig):
    """Config of a plugin without settings."""


ConfigT = TypeVar("ConfigT", bound=PluginConfig)


class Plugin(ABC, Generic[ConfigT]):
    """Base of every plugin. `kind` comes from the contract, `name` is what users write in YAML."""

    kind: ClassVar[str]
    name: ClassVar[str]
    Config: type[ConfigT]

    def __init__(self, config: ConfigT) -> None:
        self.config = config
