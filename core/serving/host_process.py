"""What vLLM in this process changes of its host, put back: threads, environment, random numbers."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that weights need no copy
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # weights pass as an iterator; none is pickled
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its log records go through the host's own logging
}


@contextlib.contextmanager
def undisturbed_process() -> Iterator[None]:
    """Undo what vLLM does to torch's thread settings and to the environment of child processes."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    before = dict(os.environ)
    for key, value in {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(key, value)  # without OMP_NUM_THREADS vLLM takes one thread
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces the function on a CPU
        torch.set_num_threads(threads)
        for key in os.environ.keys() | before.keys():
            if key.startswith("VLLM_") or os.environ.get(key) == before.get(key):
                continue  # vLLM reads its own ones again later
            if key in before:
                os.environ[key] = before[key]
            else:
                del os.environ[key]


@contextlib.contextmanager
def undisturbed_random() -> Iterator[None]:
    """Undo what vLLM does to the global generators: it seeds all of them and draws from torch's."""
    state, array_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(array_state)
