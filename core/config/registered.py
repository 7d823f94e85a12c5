"""MLflow's names of registered models: `models:/NAME@ALIAS` and `models:/NAME/VERSION`."""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "models:/"
_FORM = re.compile(r"models:/(?P<name>[^/@:]+)(@(?P<alias>[A-Za-z0-9_-]+)|/(?P<version>[0-9]+))")


@dataclass(frozen=True, slots=True)
class RegisteredName:
    """A registered model by its alias or by its version; the other one is None."""

    name: str
    alias: str | None
    version: str | None

    @classmethod
    def parse(cls, source: str) -> RegisteredName | None:
        """None for what does not begin with `models:/`; raises `ValueError` for a wrong form."""
        if not source.startswith(PREFIX):
            return None
        found = _FORM.fullmatch(source)
        if found is None:
            raise ValueError(
                f"{source!r} names no registered model: expected models:/NAME@ALIAS, such as "
                "models:/posttrain@champion, or models:/NAME/VERSION"
            )
        return cls(found["name"], found["alias"], found["version"])
