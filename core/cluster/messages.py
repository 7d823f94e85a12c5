"""Messages between a process and its ranks: pickled, and of each tensor its own numbers only.

torch pickles the storage behind a tensor: a view of 16 numbers takes its whole batch along, and 272
of them take it 272 times.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a rank says what torch may use before it is loaded
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:  # Any: anything is pickled
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        octets = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (octets, value.dtype, tuple(value.shape))


def _tensor(octets: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.from_numpy(octets).view(dtype).reshape(shape)


class _Aside(_Pickler):
    """Leaves objects of one type out, as their number in `kept`."""

    def __init__(self, stream: io.BytesIO, kind: type) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._kind, self.kept = kind, list[Any]()

    def persistent_id(self, value: Any) -> int | None:  # Any: anything is pickled
        if type(value) is not self._kind:
            return None
        self.kept.append(value)
        return len(self.kept) - 1


class _WithKept(pickle.Unpickler):
    def __init__(self, data: Any, kept: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._kept = kept

    def persistent_load(self, number: int) -> Any:  # Any: what was left out
        return self._kept[number]


def encode_beside(message: object, kind: type) -> tuple[memoryview, list[Any]]:
    """As `encode`, and the objects of type `kind` in `message`, which travel in another way."""
    stream = io.BytesIO()
    pickler = _Aside(stream, kind)
    pickler.dump(message)
    return stream.getbuffer(), pickler.kept


def decode_beside(data: Any, kept: Sequence[Any]) -> Any:  # Any: as in `decode`
    """What `encode_beside` was given."""
    return _WithKept(data, kept).load() if kept else decode(data)


def encode(message: object) -> memoryview:
    """`message` as bytes, for `decode`. Tensors arrive on the CPU."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return stream.getbuffer()


def decode(data: Any) -> Any:  # Any: bytes or an array of them; what was sent
    """What `encode` was given, in a process of ours."""
    return pickle.loads(data)  # noqa: S301 - see above
