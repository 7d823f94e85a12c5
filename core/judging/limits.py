"""What a run may ask of an endpoint: how fast, and how much in all."""

from __future__ import annotations

import asyncio
import time


class Pace:
    """Starts of requests at least 1 / `per_second` apart; None = no limit. For one event loop."""

    def __init__(self, per_second: float | None) -> None:
        self.gap = 0.0 if per_second is None else 1.0 / per_second
        self.next_start = 0.0

    async def wait(self) -> None:
        """Return when the next request may start."""
        start = max(time.monotonic(), self.next_start)
        self.next_start = start + self.gap
        await asyncio.sleep(start - time.monotonic())


class Budget:
    """Requests sent and tokens used since it was made, and the most there may be; None = any."""

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0

    def take(self) -> str | None:
        """Count one more request; a sentence instead when there may be none."""
        if self.max_requests is not None and self.requests >= self.max_requests:
            return f"the budget is spent: {self.requests} requests were sent"
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return f"the budget is spent: {self.tokens} tokens were used"
        self.requests += 1
        return None

    def spend(self, tokens: int) -> None:
        self.tokens += tokens
