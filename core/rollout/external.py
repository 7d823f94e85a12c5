"""What environments of other packages and servers share: their package, and an episode's seed."""

from __future__ import annotations

import importlib.util
import os
from typing import Annotated

from pydantic import Field

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Problem

SEED = "seed"
"""The field of a problem's metadata that says which episode it is; the task `episodes` has it."""
LARGEST_SEED = 2**31 - 1
"""Servers may keep a seed in 32 bits."""
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
VariableName = Annotated[str, Field(pattern=VARIABLE)]
"""NAME of an environment variable: what it holds is in no config, log or page."""


def require(module: str, environment: str, extra: str) -> None:
    """Raise `ResourceError` unless the package of an environment is installed."""
    if importlib.util.find_spec(module) is None:
        raise ResourceError(
            f"environment '{environment}' needs the package {module}, which is not installed: "
            f"pip install 'posttrain[{extra}]'"
        )


def episode_seed(problem: Problem) -> int:
    """The seed of a problem's episodes, in [0, 2^31): all of them begin in one state.

    A problem without a seed of its own has one by its key.
    """
    given = problem.metadata.get(SEED, "")
    if given.isascii() and given.isdigit():
        return int(given) % (LARGEST_SEED + 1)
    return derive_seed(0, "episode", problem.key) % (LARGEST_SEED + 1)


def variable(name: str, use: str) -> str:
    """What the environment variable `name` holds, for `use`; `ResourceError` where it is unset."""
    value = os.environ.get(name, "")
    if not value:
        raise ResourceError(f"the environment variable '{name}', for {use}, is not set: export it")
    return value
