"""What runs each kind of stage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module

from posttrain.pipelines.stage.context import StageContext, StageOutput

_IMPORTING = threading.Lock()  # stages of two branches start in two threads


def stage_runner(kind: str) -> Callable[[StageContext], StageOutput]:
    """The function `run_<kind>` of the module of that name.

    Imported when a stage is computed: a run that reuses every stage does not wait for transformers.
    """
    with _IMPORTING:
        module = import_module(f"posttrain.pipelines.stages.{kind}")
    runner: Callable[[StageContext], StageOutput] = getattr(module, f"run_{kind}")
    return runner
