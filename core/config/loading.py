"""YAML files and `--set` overrides to a checked `RunConfig` that knows each value's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import ValidationError

import posttrain.core
from posttrain.core.config.marks import Loc, dotted, read_yaml
from posttrain.core.config.marks import where as mark_of
from posttrain.core.config.problems import explain, raise_problems
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ConfigError, nearest

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, the plain values it was made from, and where they were written."""

    config: RunConfig
    raw: dict[str, object]
    files: tuple[Path, ...]
    marks: Mapping[Loc, str] = field(repr=False)

    def where(self, loc: str | Loc) -> str:
        """`file.yaml:12` of a place (`stages.rl.steps` or its parts), or of what holds it."""
        parts: Loc = tuple(loc.split(".")) if isinstance(loc, str) else loc
        return mark_of(self.marks, _indexed(parts, self.raw), str(self.files[0]))

    def problem(self, loc: str | Loc, text: str) -> str:
        """A line about this place: `file.yaml:12: stages.rl.steps: TEXT`."""
        return f"{self.where(loc)}: {loc if isinstance(loc, str) else dotted(loc)}: {text}"

    def wrote(self, loc: Loc) -> bool:
        """Whether a file or `--set` holds exactly this place."""
        return loc in self.marks


def _indexed(parts: Loc, raw: object) -> Loc:
    """`parts` with the digits that index a list turned into numbers."""
    found: list[str | int] = []
    for part in parts:
        if isinstance(raw, list) and str(part).isdigit():
            part = int(part)
            raw = raw[part] if part < len(raw) else None
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
        found.append(part)
    return tuple(found)


def shipped_folder() -> Path:
    # In a checkout and in an installed wheel alike it lies beside the folder of `core`.
    return Path(posttrain.core.__file__).parents[1] / "configs"


def shipped_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name: `quickstart`, `recipes/dapo`."""
    folder = shipped_folder()
    found = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("recipes/*.yaml"))]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def find_config(name: Path) -> Path:
    """The file `name`, or the shipped configuration of that name."""
    if name.exists():
        return name
    shipped = shipped_configs()
    wanted = (name.with_suffix("") if name.suffix in SUFFIXES else name).as_posix()
    if wanted in shipped:
        return shipped[wanted]
    folder = name.parent
    if not folder.is_dir():
        raise ConfigError(
            f"no config file {name}: the folder {folder} does not exist{nearest(wanted, shipped)}"
        )
    beside = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES)
    recipe = f"recipes/{wanted}"
    close = nearest(name.name, [*beside, *shipped])
    guess = f"; did you mean '{recipe}'?" if recipe in shipped else close
    raise ConfigError(
        f"no config file {name}{guess} (YAML files in {folder}: {beside or 'none'}; "
        f"shipped configs: {list(shipped) or 'none'})"
    )


def load_config(paths: Sequence[Path], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Merge YAML files from left to right, apply `a.b=c` overrides, validate the result."""
    if not paths:
        raise ConfigError("no config file was given; name one, such as 'quickstart'")
    files = tuple(find_config(path) for path in paths)
    raw: dict[str, object] = {}
    marks: dict[Loc, str] = {}
    for path in files:
        value, lines = read_yaml(path)
        _merge(raw, value, (), marks, lines)
    for override in overrides:
        _apply_override(raw, marks, override)

    def where(loc: Loc) -> str:
        return mark_of(marks, loc, str(files[0]))

    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise_problems(explain(error, where))
        raise
    return LoadedConfig(config, raw, files, marks)


def _merge(
    target: dict[str, object],
    source: Mapping[str, object],
    loc: Loc,
    marks: dict[Loc, str],
    lines: Mapping[Loc, str],
) -> None:
    for key, value in source.items():
        place = (*loc, key)
        known = target.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            marks[place] = lines[place]
            target[key] = merged = dict(known)
            _merge(merged, value, place, marks, lines)
            continue
        _forget(marks, place)
        target[key] = _unshared(value)
        marks.update({at: line for at, line in lines.items() if at[: len(place)] == place})


def _unshared(value: object) -> object:
    """A copy in which a YAML alias is a value of its own, so that `--set` changes one place."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _forget(marks: dict[Loc, str], place: Loc) -> None:
    for old in [at for at in marks if at[: len(place)] == place]:
        del marks[old]


def _apply_override(raw: dict[str, object], marks: dict[Loc, str], override: str) -> None:
    """Set one `a.b=c`: `c` is YAML, digits index a list, missing mappings are made."""
    name, sign, text = override.partition("=")
    keys = name.strip().split(".")
    if not sign or not all(keys):
        raise ConfigError(
            f"--set '{override}' must look like a.b=c, for instance stages.rl.steps=3"
        )
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"--set {name}: '{text}' is no YAML ({problem}); quote it") from error
    here: object = raw
    loc: Loc = ()
    for position, key in enumerate(keys):
        last = position == len(keys) - 1
        if isinstance(here, list):
            if not key.isdigit() or int(key) >= len(here):
                raise ConfigError(
                    f"--set {name}: {dotted(loc)} is a list of {len(here)}; "
                    f"'{key}' must be a number from 0 to {len(here) - 1}"
                )
            loc = (*loc, int(key))
            if last:
                here[int(key)] = value
            here = here[int(key)]
        elif isinstance(here, dict):
            loc = (*loc, key)
            if last:
                here[key] = value
            elif here.get(key) is None:
                here[key] = {}
            here = here[key]
        else:
            raise ConfigError(
                f"--set {name}: {dotted(loc)} is {here!r}, which has no '{key}'; "
                f"write --set '{dotted(loc)}={{name: {here}, {key}: ...}}' if it is a plugin"
            )
    _forget(marks, loc)
    marks[loc] = f"--set {override}"
