"""Presets: a name for one plugin per axis."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from posttrain.core.contracts.base import ConfigT, Plugin


class Algorithm(Plugin[ConfigT]):
    """A preset: names one plugin per axis. Every field it sets can be overridden in the YAML."""

    kind = "algorithm"
    stage: ClassVar[Literal["rl", "preference"]] = "rl"
    """The kind of stage whose fields `expand` sets."""
    variant_of: ClassVar[str | None] = None
    """The preset that this one varies; that one's recipe and results serve it."""

    @abstractmethod
    def expand(self) -> dict[str, object]:
        """Fields of a stage that this algorithm sets, as they would be written in YAML."""
