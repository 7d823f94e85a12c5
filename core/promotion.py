"""Which champion a rollback goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posttrain.core.errors import RunError


@dataclass(frozen=True, slots=True)
class Past:
    """A version in the history of an alias: what it replaced, and whether it was taken back."""

    version: str
    previous: str
    rolled_back: bool


def earlier_champion(current: Past, look_up: Callable[[str], Past | None]) -> str:
    """The version to go back to: the nearest that `current` came after and nobody took back."""
    passed = {current.version}
    version = current.previous
    why = "it is the first champion" if not version else ""
    while version and version not in passed:
        passed.add(version)
        found = look_up(version)
        if found is None:
            why = f"version {version}, which it replaced, was deleted"
            break
        if not found.rolled_back:
            return version
        version, why = found.previous, f"version {version} was itself taken back"
    raise RunError(
        f"there is nothing to go back to from version {current.version}: {why}; name a version "
        "with --to VERSION"
    )
