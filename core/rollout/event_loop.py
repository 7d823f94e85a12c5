"""An event loop in a thread of its own, which may run somebody else's coroutines.

It is seen when it stands still, and left when it does.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from posttrain.core.runtime.waiting import result_of

T = TypeVar("T")
BEAT_S = 0.1
CANCEL_S = 1.0
"""Seconds that what was cancelled has to end."""
CLOSE_S = 10.0


class Blocked(Exception):
    """A coroutine keeps all others waiting; `place` says where it is (empty = not known)."""

    def __init__(self, silent_s: float, place: str) -> None:
        super().__init__(f"the event loop has stood still for {silent_s:.0f} s{place}")
        self.silent_s, self.place = silent_s, place


class Deaf(TimeoutError):
    """A call took too long, and goes on although it was cancelled."""


class EventLoop:
    """An event loop in a thread of its own, which may stand still for `patience_s` at most."""

    def __init__(self, patience_s: float, name: str = "episodes") -> None:
        self.blocked = False
        self.asyncio = asyncio.new_event_loop()
        self._patience_s, self._beat = patience_s, time.monotonic()
        self._thread = threading.Thread(target=self.asyncio.run_forever, name=name, daemon=True)
        self._thread.start()
        self.asyncio.call_soon_threadsafe(self._beats)

    def run(self, work: Coroutine[Any, Any, T], check: Callable[[], object] = lambda: None) -> T:
        """The result of `work`; `check` is called while it is waited for, and raises to stop.

        Raises `Blocked` once the loop has stood still for too long: nothing more runs in it then.
        """

        def both() -> None:
            check()
            self._refuse_blocking()

        return result_of(asyncio.run_coroutine_threadsafe(work, self.asyncio), both)

    def close(self) -> None:
        """Cancel what still runs; a loop that stands still is left to itself."""
        if self.blocked or self.asyncio.is_closed():
            return
        cancelled = asyncio.run_coroutine_threadsafe(self._cancel_all(), self.asyncio)
        cancelled.result(CLOSE_S)
        self.asyncio.call_soon_threadsafe(self.asyncio.stop)
        self._thread.join(CLOSE_S)
        if not self.asyncio.is_running():
            self.asyncio.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        # Who is being cancelled closes what it has opened: to cancel that too would leave it open.
        if any(task.cancelling() for task in others):
            await asyncio.wait(others, timeout=CLOSE_S / 2)
            others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CANCEL_S)

    def _beats(self) -> None:
        self._beat = time.monotonic()
        self.asyncio.call_later(BEAT_S, self._beats)

    def _refuse_blocking(self) -> None:
        silent = time.monotonic() - self._beat
        if silent < self._patience_s:
            return
        self.blocked = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        at = traceback.extract_stack(frame)[-1] if frame else None
        raise Blocked(silent, f" (at {at.filename}:{at.lineno}, in {at.name})" if at else "")


async def within(limit_s: float, call: Coroutine[Any, Any, T]) -> T:
    """What `call` gives, if that takes `limit_s` at most.

    Then it is cancelled and `TimeoutError` is raised, also where it does not heed that: it is left
    alone, and the error is `Deaf`.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
        raise
    if done:
        return task.result()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=CANCEL_S)
    raise TimeoutError if done else Deaf
