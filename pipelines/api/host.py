"""A run inside somebody else's process: a notebook's kernel, a script, a server.

The process stays as it was: its signal handlers, its event loop, its environment, its settings of
Prefect and MLflow, its number of threads. Nothing here ends it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

from posttrain.core.runtime.startup import bound_waiting

T = TypeVar("T")


def call(function: Callable[[], T], stop: threading.Event) -> T:
    """What `function` returns, computed in a thread if this one runs an event loop, as Jupyter's.

    Prefect and MLflow behave differently below a running loop. An interrupt sets `stop` and waits
    for the run's next safe point; a second one does not wait.
    """
    if not _runs_a_loop():
        return function()
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # an interrupt too: it is raised again below
            errors.append(error)
        finally:
            ended.set()

    # In this context, so that what is printed goes to the notebook's cell.
    thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True, name="run")
    try:
        thread.start()
        _wait_for(ended)
    except KeyboardInterrupt:
        stop.set()
        _wait_for(ended)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _wait_for(ended: threading.Event) -> None:
    """Until it is set, in parts: a signal just before a wait begins is not noticed until its end.

    Not by `Thread.join`: in Python 3.11 an interrupt there marks a thread that works as ended.
    """
    while not ended.wait(0.2):
        pass


def _runs_a_loop() -> bool:
    """Whether this thread runs an event loop; commands need not load asyncio to know."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio.events._get_running_loop() is not None


@contextmanager
def as_guest() -> Iterator[None]:
    """Put back what a run changes for the whole process."""
    if "torch" not in sys.modules:
        bound_waiting()  # the variables are read when torch is loaded
    before = {name: value for name, value in os.environ.items() if _is_theirs(name)}
    raises, threads = logging.raiseExceptions, _threads()
    try:
        yield
    finally:
        if (mlflow := sys.modules.get("mlflow")) is not None:
            # It keeps both in the environment too: None there leaves what the next lines put back.
            mlflow.set_tracking_uri(before.get("MLFLOW_TRACKING_URI"))
            mlflow.set_registry_uri(before.get("MLFLOW_REGISTRY_URI"))
        for name in [name for name in os.environ if _is_theirs(name) and name not in before]:
            del os.environ[name]
        os.environ.update(before)
        logging.raiseExceptions = raises
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)


def _is_theirs(name: str) -> bool:
    """Whether a variable says where Prefect and MLflow are.

    Others that a run sets only if the user did not, such as MLflow's telemetry, stay: they are set
    once in a process.
    """
    return name.startswith("PREFECT_") or name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")


def _threads() -> int | None:
    """Threads of torch, if the process has loaded it."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())
