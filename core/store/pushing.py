"""What is sent to a store with a URL in the background: nothing waits for it, nothing is lost.

One thread sends one thing after another. While the store is away it tries again; what the store
refuses is reported and left out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from posttrain.core.errors import PosttrainError
from posttrain.core.store.remote import StoreAway

TRY_AGAIN_S = 5.0


class Pusher:
    """Sends jobs in order; `where` is the store's URL."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._jobs: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._news: list[str] = []
        self.away = False

    def add(self, what: str, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append((what, job))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="posttrain-store", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def tell(self, sentence: str) -> None:
        """Something for the user."""
        with self._changed:
            if sentence not in self._news:
                self._news.append(sentence)

    def news(self) -> list[str]:
        """Sentences for the user since the last call."""
        if not self._news:
            return []
        with self._changed:
            found, self._news = self._news, []
        return found

    def wait(self, patience_s: float) -> list[str]:
        """Wait until all is sent; what is not, when the store was away for `patience_s`."""
        with self._changed:
            away_since = time.monotonic()
            while self._jobs:
                if not self.away:
                    away_since = time.monotonic()
                elif time.monotonic() - away_since >= patience_s:
                    break
                self._changed.wait(0.2)
            return [what for what, _ in self._jobs]

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    self._changed.wait()
                what, job = self._jobs[0]
            try:
                job()
            except StoreAway as error:
                if not self.away:
                    self.tell(f"{error}: the run goes on, and sends its results later")
                self.away = True
                time.sleep(TRY_AGAIN_S)
                continue
            except Exception as error:  # whatever it is: others wait behind it
                kind = "" if isinstance(error, PosttrainError) else f"{type(error).__name__}: "
                self.tell(f"{what} was not sent to the store {self._where}: {kind}{error}")
            if self.away:
                self.tell(f"the store {self._where} answers again")
            self.away = False
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
