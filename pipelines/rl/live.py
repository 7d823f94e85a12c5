"""A handle for live objects that tasks pass to one another in memory.

Prefect walks arguments that are containers or models, and stores flow parameters as JSON. It does
neither with this class: it sees one opaque value.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Live(Generic[T]):
    """Holds one live object."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value
