"""Waiting for a future while somebody may ask to stop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.2


def result_of(future: Future[T], check: Callable[[], object]) -> T:
    """Its result; `check` is called while it is waited for, and raises to stop and cancel it."""
    try:
        while True:
            check()
            try:
                return future.result(POLL_S)
            except NotYet:
                if future.done():  # its own, not that of the wait
                    raise
    finally:
        if not future.done():
            future.cancel()
