"""Python's garbage collector, kept off the libraries, which are most of the heap."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOADING = (2_000_000, 10, 10)
"""What a run loads is 1.4 million objects; walking them in parts of 300,000 took 0.6 s."""
_WORKING = gc.get_threshold()


@contextmanager
def command() -> Iterator[None]:
    """Around a whole command: collect seldom while it loads, take no heap apart at its end.

    The end is ordinary up to the last step: threads are joined and every other exit function runs,
    as this one was registered before them. What is left, emptying a heap that the kernel frees
    anyway, takes seconds.
    """
    gc.set_threshold(*_LOADING)
    status = 1

    def end() -> None:
        logging.shutdown()
        code = status
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `| head` has read enough
            code = code or 1
        except OSError as error:
            if not code:
                print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
            code = code or 1
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)

    atexit.register(end)
    try:
        yield
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports of a process: collect seldom, and later pass over what they left."""
    gc.set_threshold(*_LOADING)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*_WORKING)


@contextmanager
def loading_more(*, spare: bool) -> Iterator[None]:
    """Around imports inside `sparing_what_is_loaded`: collect seldom.

    With `spare` later collections pass over what they left, and over all else that exists: it is
    for a moment without a model, whose cycles would keep its memory until the run ends.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(*_LOADING)
    try:
        yield
    finally:
        if spare:
            gc.freeze()
        gc.set_threshold(*threshold)


@contextmanager
def sparing_what_is_loaded() -> Iterator[None]:
    """Inside, garbage collections pass over all that exists at its start, modules above all.

    They come as often as Python means them to, since a cycle may hold tensors. Walking the modules
    takes 0.35 s each time: an eighth of a run of small stages. Afterwards all is as before.
    Nothing is collected first, for the same reason: what imports leave behind is small.
    """
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_WORKING)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
