"""Post-training of language models from Python: run a pipeline, read what it left, compare runs.

    import posttrain

    run = posttrain.run("quickstart", overrides={"stages.rl.steps": 3})
    run.metrics("rl")["reward/mean"]

`docs/python-api.md` describes each name. They are loaded when they are first asked for, so that
`import posttrain` loads nothing heavy. The folder of this file is the package: `posttrain.core` is
`core/` (docs/decisions/0001-import-root.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.core.errors import (
        ApprovalRefused,
        ConfigError,
        DataError,
        PosttrainError,
        ResourceError,
        RunError,
    )
    from posttrain.core.store.approval import ApprovalNeeded
    from posttrain.pipelines.api.calls import compare, fork, load, plan, run, sweep, validate
    from posttrain.pipelines.api.planned import Plan
    from posttrain.pipelines.api.run import Run
    from posttrain.pipelines.api.validated import Validation

__all__ = [
    "ApprovalNeeded",
    "ApprovalRefused",
    "ConfigError",
    "DataError",
    "Plan",
    "PosttrainError",
    "ResourceError",
    "Run",
    "RunError",
    "Validation",
    "compare",
    "fork",
    "load",
    "plan",
    "run",
    "sweep",
    "validate",
]

_CALLS = "posttrain.pipelines.api.calls"
_ERRORS = "posttrain.core.errors"
_PLACES = {
    "ApprovalNeeded": "posttrain.core.store.approval",
    "ApprovalRefused": _ERRORS,
    "ConfigError": _ERRORS,
    "DataError": _ERRORS,
    "Plan": "posttrain.pipelines.api.planned",
    "PosttrainError": _ERRORS,
    "ResourceError": _ERRORS,
    "Run": "posttrain.pipelines.api.run",
    "RunError": _ERRORS,
    "Validation": "posttrain.pipelines.api.validated",
    "compare": _CALLS,
    "fork": _CALLS,
    "load": _CALLS,
    "plan": _CALLS,
    "run": _CALLS,
    "sweep": _CALLS,
    "validate": _CALLS,
}


def __getattr__(name: str) -> object:
    """A public name, from the module that has it."""
    if name == "__version__":
        from importlib.metadata import version

        return version("posttrain")
    if name not in _PLACES:
        raise AttributeError(f"module 'posttrain' has no attribute '{name}'")
    found: object = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
