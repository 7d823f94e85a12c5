"""The isolation that a run's programs have on its own machine is the least they have anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from posttrain.core.errors import ResourceError
from posttrain.core.sandbox.model import BETTER, Level, SandboxSettings, strength
from posttrain.core.sandbox.runner import Sandbox


@dataclass(frozen=True, slots=True)
class Isolation:
    """What the programs of a plugin (`of`) need: its settings, and the weakest level allowed."""

    of: str
    settings: SandboxSettings
    least: Level

    def check(self) -> None:
        """Raise `ResourceError` where this machine has less."""
        found = Sandbox.best(self.settings).level
        if strength(found) < strength(self.least):
            raise ResourceError(
                f"programs of {self.of} would run in the sandbox {found}, which is weaker than "
                f"{self.least}, the one of the run's own machine: {BETTER}"
            )


def isolations(of: str, config: BaseModel) -> list[Isolation]:
    """What the programs of a plugin need elsewhere: as much as this machine would give them."""
    found = []
    for settings in _settings(config):
        try:
            least = Sandbox.best(settings).level
        except ResourceError:  # then programs run elsewhere only
            least = settings.min_level
        found.append(Isolation(of, settings, least))
    return found


def _settings(value: object) -> Iterator[SandboxSettings]:
    """Every section of that kind in a config."""
    if isinstance(value, SandboxSettings):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _settings(getattr(value, name))
