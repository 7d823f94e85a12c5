"""How long torch's threads spin before they sleep (docs/decisions/0040-waiting-threads.md).

libgomp reads the variables once, when torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SPIN_COUNT = "GOMP_SPINCOUNT"
WAIT_POLICY = "OMP_WAIT_POLICY"
SPINS = 10_000
"""0.1 to 0.5 ms by processor: longer than Python takes between two operations."""


def bounded_waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that computes; a choice of the user's stays."""
    if SPIN_COUNT in environment or WAIT_POLICY in environment:
        return {}
    return {SPIN_COUNT: str(SPINS)}


def bound_waiting() -> None:
    """Set it for this process, before it loads torch, and for what it starts."""
    os.environ.update(bounded_waiting(os.environ))
