"""Evaluation harnesses without a network: their libraries' own switches, for a while."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCHES = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
_QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
_SENDERS = ("INSPECT_TELEMETRY", "INSPECT_API_KEY_OVERRIDE")
"""Variables by which inspect-ai loads code that sends what was evaluated."""
_LOCK = threading.RLock()


@contextmanager
def without_network(active: bool = True) -> Iterator[None]:
    """Inside, nothing is sent; and if `active`, nothing is fetched from a hub.

    The environment is read when the libraries are imported, which they are by now: so the values
    that they read are set. One thread at a time.
    """
    with _LOCK:
        modules = [(importlib.import_module(module), name) for module, name in _SWITCHES]
        before = [getattr(module, name) for module, name in modules]
        variables = {name: os.environ.pop(name, None) for name in _SENDERS}
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            for module, name in modules:
                setattr(module, name, active or getattr(module, name))
            yield
        finally:
            for (module, name), value in zip(modules, before, strict=True):
                setattr(module, name, value)
            os.environ.update({k: v for k, v in variables.items() if v is not None})
