"""What every part of the YAML is made of: sections, and plugins by name."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, count
from typing import Any

from pydantic import ConfigDict

from posttrain.core.contracts.base import Component as Component
from posttrain.core.contracts.stage import StageBase as StageBase
from posttrain.core.runtime.config_model import ConfigModel

BASE_MODEL = "base"
"""Name under which stages read the base model."""

NO_TASK = "none"
"""Name of the task of a config that names none."""

TASK_DATA = "task"
"""What `data` of a preference stage says when the task brings the pairs; a file is `./task`."""


class Section(ConfigModel):
    """Base of every section of the YAML; defaults are validated like given values."""

    model_config = ConfigDict(validate_default=True)


def one_or_many(value: Any) -> str:  # Any: whatever YAML held
    """The tag, `one` or `many`, of a field that takes one component or a list of them."""
    return "many" if isinstance(value, list | tuple) else "one"


def distinct_names(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """`names`, the second of one name with its number: `format_2`; none of them is in `taken`."""
    known = set(taken)
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in count(2))
        found.append(next(each for each in chain([name], numbered) if each not in known))
        known.add(found[-1])
    return found
