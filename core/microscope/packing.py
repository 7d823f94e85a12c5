"""Columns of numbers as short text in a page: bytes of one place together, deflated, base64."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Column = NDArray[np.float32] | NDArray[np.uint8] | NDArray[np.uint32]
FULL_BITS = 23
"""Bits after the point of a float32."""


def pack(values: Column, bits: int = FULL_BITS) -> str:
    """`values` [N] as text. Of float32, `bits` binary digits after the point are kept, rounded.

    The bytes are laid out by their place in the number, the lowest first, since those of one place
    are alike. What is not finite stays what it is.
    """
    kept = _rounded(values.astype(np.float32), bits) if values.dtype == np.float32 else values
    plain = np.frombuffer(kept.astype(kept.dtype.newbyteorder("<")).tobytes(), np.uint8)
    planes = plain.reshape(len(values), values.dtype.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


def unpack(text: str, kind: DTypeLike) -> NDArray[Any]:
    """What `pack` was given, of that kind."""
    data = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    size = np.dtype(kind).itemsize
    return np.frombuffer(data.reshape(size, -1).T.tobytes(), dtype=kind)


def _rounded(values: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    if bits == FULL_BITS:
        return values
    cut = FULL_BITS - bits
    raw = values.view(np.uint32).astype(np.uint64)
    kept = ((raw + (1 << (cut - 1))) >> cut << cut).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), kept, values)
