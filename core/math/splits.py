"""The split rule of every task: a problem's own content decides whether it is held out.

No seed takes part, so the splits are disjoint by construction, in every stage and every run.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable

from posttrain.core.errors import DataError
from posttrain.core.types import Split


def stable_hash(text: str) -> int:
    """A non-negative integer that depends on `text` alone, in every process (SHA-256)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")


def split_of(key: str, held_out_permille: int) -> Split:
    """The split of the problem with this key: `held_out` for `held_out_permille` in 1000 keys."""
    return "held_out" if stable_hash(key) % 1000 < held_out_permille else "train"


def held_out_keys(keys: Iterable[str], fraction: float) -> frozenset[str]:
    """The `fraction` of the distinct `keys` that is held out: those of the smallest hash.

    At least one key is, and at least one is not, if there are two. When keys are added, nearly all
    that were held out stay so.
    """
    distinct = sorted(set(keys), key=stable_hash)
    count = min(max(1, round(len(distinct) * fraction)), max(0, len(distinct) - 1))
    return frozenset(distinct[:count])


def text_key(text: str) -> str:
    """Which text it is: Unicode NFC. Texts that differ in white space are different texts."""
    return unicodedata.normalize("NFC", text)


def loose_key(text: str) -> str:
    """`text_key` with runs of white space as one space, to find one question in two sources."""
    return " ".join(text_key(text).split())


def too_few(task: str, split: Split, wanted: int, available: int, fix: str) -> DataError:
    """The error of a task that is asked for more problems than it has."""
    return DataError(
        f"task '{task}' has {available} distinct problems in its {split} split, but {wanted} are "
        f"asked for: {fix}"
    )
