"""What people write on the command line for a plugin: `NAME[,field=value ...]`."""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml

from posttrain.core.config.positions import read_value
from posttrain.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spec:
    """A plugin by name with fields of its own; `text` is what was written."""

    text: str
    name: str
    fields: dict[str, object] = field(default_factory=dict)

    def component(self) -> dict[str, object]:
        return {"name": self.name, **self.fields}


def parse_spec(option: str, text: str) -> Spec:
    """`gspo,clip_low=0.001` as a name and fields, whose values are YAML."""
    name, *parts = _split(text)
    fields: dict[str, object] = {}
    for part in parts:
        key, sign, value = part.partition("=")
        key = key.strip()
        if not sign or not key:
            raise ConfigError(
                f"{option} '{text}': '{part}' must look like field=value; the form is "
                f"{option} NAME,field=value,field=value"
            )
        if key in fields:
            raise ConfigError(f"{option} '{text}': field '{key}' is given twice; give it once")
        try:
            fields[key] = read_value(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            problem = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{option} '{text}': the value of '{key}' is not YAML ({problem}); quote it"
            ) from error
    if not name.strip() or "=" in name:
        raise ConfigError(
            f"{option} '{text}' must begin with a plugin's name, as in {option} NAME,field=value; "
            "`posttrain plugins list` shows the names"
        )
    return Spec(text, name.strip(), fields)


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
