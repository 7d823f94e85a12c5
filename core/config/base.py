"""What every part of the YAML is made of: sections, plugins by name, stages with their inputs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, count
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from posttrain.core.runtime.config_model import ConfigModel

BASE_MODEL = "base"
"""Name under which stages read the base model."""

NO_TASK = "none"
"""Name of the task of a config that names none."""

TASK_DATA = "task"
"""What `data` of a preference stage says when the task brings the pairs; a file is `./task`."""

STAGE_NAME, MOST_LETTERS = r"^[a-z][a-z0-9_]*$", 100
StageName = Annotated[str, Field(pattern=STAGE_NAME, max_length=MOST_LETTERS)]


class Section(ConfigModel):
    """Base of every section of the YAML; defaults are validated like given values."""

    model_config = ConfigDict(validate_default=True)


class Component(ConfigModel):
    """A plugin by name, with its own fields next to it: `name` or `{name: ..., field: ...}`."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(description="registered plugin name")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:  # Any: whatever YAML held
        return {"name": value} if isinstance(value, str) else value

    @property
    def shown(self) -> str:
        """The name in titles and tags: of a plugin in a file, its class."""
        return self.name.rpartition(":")[2]

    def fields(self) -> dict[str, object]:
        return dict(self.model_extra or {})


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


class StageBase(Section):
    """What every stage has: the artifacts it reads, by the name of the stage that makes them."""

    inputs: dict[str, StageName] = Field(
        default_factory=dict,
        description="role -> stage that produces it, or 'base' for the base model",
    )

    def outside_paths(self) -> dict[str, str]:
        """Files and folders that the stage reads in addition to its inputs, by the field that
        names them.

        Their contents are part of the stage's identity.
        """
        return {}
