"""Which champion a rollback goes to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from posttrain.core.errors import ResourceError, RunError, nearest
from posttrain.core.store.approval import this_person, utc_now
from posttrain.core.tracking import registry
from posttrain.core.tracking.registry import RegisteredVersion


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


@dataclass(frozen=True, slots=True)
class RolledBack:
    name: str
    alias: str
    before: str
    now: str
    by: str
    at: str
    reason: str

    def described(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.name}: '{self.alias}' moved from version {self.before} to version {self.now}"
            f"{why}; version {self.before} is marked as taken back by {self.by}"
        )

    def row(self) -> dict[str, str]:
        return asdict(self)


def roll_back(uri: str, name: str, alias: str, to: str | None, reason: str) -> RolledBack:
    """Move the alias back to the champion before, or to version `to`."""
    current = registry.find_alias(uri, name, alias)
    if current is None:
        raise _no_alias(uri, name, alias)
    version = to or earlier_champion(_past(current), partial(_past_of, uri, name))
    if version == current.version:
        raise RunError(f"version {version} is '{name}@{alias}' already: nothing was changed")
    target = registry.find_version(uri, name, version)
    if target is None:
        raise ResourceError(
            f"'{name}' has no version {version}: see its versions in `posttrain ui` under Models"
        )
    registry.check_weights(target)
    done = RolledBack(name, alias, current.version, version, this_person(), utc_now(), reason)
    mark = json.dumps(asdict(done))
    registry.tag_version(uri, name, current.version, {registry.TAG_ROLLED_BACK: mark})
    registry.tag_version(uri, name, version, {registry.TAG_ROLLED_BACK: ""})
    registry.tag_version(uri, name, version, {registry.TAG_RESTORED: mark})
    registry.move_alias(uri, name, alias, version)
    return done


def _past(found: RegisteredVersion) -> Past:
    return Past(found.version, found.previous, found.rolled_back is not None)


def _past_of(uri: str, name: str, version: str) -> Past | None:
    found = registry.find_version(uri, name, version)
    return None if found is None else _past(found)


def _no_alias(uri: str, name: str, alias: str) -> ResourceError:
    known = registry.names(uri)
    if name not in known:
        return ResourceError(
            f"there is no registered model '{name}'{nearest(name, known)} (registered: "
            f"{known or 'none'})"
        )
    return ResourceError(
        f"'{name}' has no version with the alias '{alias}', so nothing is to be taken back: a "
        "stage of kind 'promote' sets it"
    )
