"""One seed for everything: each use derives its own from the run's seed and a path of names.

Nothing draws from a global generator, so what a step draws does not depend on what ran before it.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed for the use named by `path`, the same on every machine."""
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, *path))
