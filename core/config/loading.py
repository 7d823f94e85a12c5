"""YAML files and `--set` overrides to a checked `RunConfig`, with readable errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

import posttrain.core
from posttrain.core.config.explaining import StageClasses, explain, raise_problems, short
from posttrain.core.config.positions import (
    OVERRIDE,
    Loc,
    check_plain,
    dotted,
    read_value,
    read_yaml,
)
from posttrain.core.config.positions import where as mark_of
from posttrain.core.config.schema import BUILT_IN, RunConfig, stage_classes
from posttrain.core.errors import ConfigError, PosttrainError, nearest, shortlist
from posttrain.core.runtime.plugin_files import PluginFiles

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager

SUFFIXES = (".yaml", ".yml")
MAPPING = "the config"
"""Where a value stands that came from no file."""
_SETTING = re.compile(rf"(?<![\w./-])(?:{'|'.join(RunConfig.model_fields)})(?:\.[\w-]+)+")
"""A place in a configuration, in a sentence."""
_PLACED = re.compile(rf"({OVERRIDE}|{MAPPING}: |\S+:\d+: )")
"""How a sentence begins that says where the problem is."""


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
        default = str(self.files[0]) if self.files else MAPPING
        return mark_of(self.marks, _indexed(parts, self.raw), default)

    def problem(self, loc: str | Loc, text: str) -> str:
        """A line about this place: `file.yaml:12: stages.rl.steps: TEXT`."""
        return f"{self.where(loc)}: {loc if isinstance(loc, str) else dotted(loc)}: {text}"

    @contextmanager
    def located(self) -> Iterator[None]:
        """Errors of checks that name a setting without its place get the `file:line` in front."""
        try:
            yield
        except PosttrainError as error:
            text = str(error)
            named = [] if _PLACED.match(text) else _SETTING.findall(text)
            written = [place for place in named if self._holds(place)]
            if not written:
                raise
            raise type(error)(f"{self.where(written[0])}: {text}") from error

    def _holds(self, place: str) -> bool:
        """Whether the section of a setting is written, so that its line helps."""
        parts = _indexed(tuple(place.split(".")), self.raw)
        shortest = 2 if parts[0] == "stages" else 1
        return any(parts[:end] in self.marks for end in range(shortest, len(parts) + 1))

    def wrote(self, loc: Loc) -> bool:
        """Whether a file or `--set` holds this place, or the list that it is an entry of."""
        lists = (loc[:end] for end, part in enumerate(loc) if isinstance(part, int))
        return loc in self.marks or any(place in self.marks for place in lists)


def _indexed(parts: Loc, raw: object) -> Loc:
    """`parts` with the digits that index a list turned into numbers."""
    found: list[str | int] = []
    for part in parts:
        if isinstance(raw, list) and _is_index(str(part)):
            part = int(part)
            raw = raw[part] if part < len(raw) else None
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
        found.append(part)
    return tuple(found)


_END = "...\n"
"""What YAML writes after a bare value."""


def override_of(path: str, value: object) -> str:
    """`a.b=c` as `--set` takes it; the value keeps its type: `1e-05` is a text in YAML 1.1.

    Raises `TypeError` or `ValueError` for what JSON cannot hold.
    """
    plain = json.loads(json.dumps(str(value) if isinstance(value, Path) else value))
    text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"))
    return f"{path}={text.removesuffix(_END).strip()}"


def _is_index(part: str) -> bool:
    """Whether `part` is a list's index: `²` is a digit of Unicode too, and no number to `int`."""
    return part.isascii() and part.isdigit() and len(part) < 10


def shipped_folder() -> Path:
    # In a checkout and in an installed wheel alike it lies next to the folder of `core`.
    return Path(posttrain.core.__file__).parents[1] / "configs"


def shipped_configs() -> dict[str, Path]:
    """The configurations that come with the package, by name: `quickstart`, `recipes/dapo`."""
    folder = shipped_folder()
    kinds = ("*.yaml", "recipes/*.yaml", "ablations/*.yaml")
    found = [path for kind in kinds for path in sorted(folder.glob(kind))]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def find_config(name: Path) -> Path:
    """The file `name`, or the shipped configuration of that name."""
    if "\0" in str(name):
        raise ConfigError(f"the file name {str(name)!r} holds a NUL; correct it")
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
    extra = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES)
    recipe = f"recipes/{wanted}"
    close = nearest(name.name, [*extra, *shipped])
    guess = f"; did you mean '{recipe}'?" if recipe in shipped else close
    raise ConfigError(
        f"no config file {name}{guess} (YAML files in {folder}: "
        f"{shortlist(name.name, extra) if extra else 'none'}; shipped configs: "
        f"{shortlist(wanted, shipped) if shipped else 'none'})"
    )


def default_name(path: Path) -> str:
    """What a config without a `name` is called: its file, so that two of them stay apart."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-_.") or "posttrain"


def load_config(
    configs: Sequence[Path | Mapping[str, object]],
    overrides: Sequence[str] = (),
    manager: PluginManager | None = None,
) -> LoadedConfig:
    """Merge YAML files and mappings from left to right, apply `a.b=c` overrides, validate.

    Without a `name` the run has that of the first file; of mappings alone it is `posttrain`.
    Without a `manager` the installed plugins are loaded only where a stage is of a kind that is not
    built in.
    """
    if not configs:
        raise ConfigError("no config file was given; name one, such as 'quickstart'")
    files = tuple(find_config(each) for each in configs if isinstance(each, Path))
    waiting = iter(files)
    raw: dict[str, object] = {}
    marks: dict[Loc, str] = {}
    local = PluginFiles()
    for each in configs:
        folder = Path.cwd()
        if isinstance(each, Path):
            path = next(waiting)
            folder, (value, lines) = path.resolve().parent, read_yaml(path)
        else:
            value, lines = _of_mapping(each)
        _open_model(value, lines)
        _merge(raw, _with_short_names(value, folder, local), (), marks, lines)
    for override in overrides:
        _apply_override(
            raw, marks, override, local, files[0].resolve().parent if files else Path.cwd()
        )
    if local.paths:
        raw["plugin_files"] = {name: str(path) for name, path in local.paths.items()}
    raw.setdefault("name", default_name(files[0] if files else Path()))

    def where(loc: Loc) -> str:
        return mark_of(marks, loc, str(files[0]) if files else MAPPING)

    check_plain(raw, where)
    return LoadedConfig(validated(raw, where, manager), raw, files, marks)


def validated(
    raw: Mapping[str, object], where: Callable[[Loc], str], manager: PluginManager | None = None
) -> RunConfig:
    """The config of plain values; raises `ConfigError` with the place of each problem.

    `manager` as of `load_config`.
    """
    kinds: StageClasses = BUILT_IN
    if manager is not None or _other_kinds(raw):
        from posttrain.core.plugin_manager import PluginManager

        manager = manager or PluginManager()
        _load_local_kinds(raw, where, manager)
        kinds = stage_classes(manager)
    try:
        return RunConfig.model_validate(raw, context=kinds)
    except ValidationError as error:
        raise_problems(explain(error, where, kinds=kinds))
        raise


def _load_local_kinds(
    raw: Mapping[str, object], where: Callable[[Loc], str], manager: PluginManager
) -> None:
    """Load the stage kinds that are named by a file; the schema reports what else is wrong."""
    files, stages = raw.get("plugin_files"), raw.get("stages")
    if isinstance(files, dict) and all(isinstance(path, str) for path in files.values()):
        manager.add_files(files)
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        kind = stage.get("kind") if isinstance(stage, dict) else None
        if isinstance(kind, str) and ".py" in kind:
            try:
                manager.find("stage", kind)
            except ConfigError as error:
                place = ("stages", name, "kind")
                raise ConfigError(f"{where(place)}: {dotted(place)}: {error}") from error


def _other_kinds(raw: Mapping[str, object]) -> bool:
    """Whether a stage is of a kind that is not built in, or of a wrong one."""
    stages = raw.get("stages")
    given = stages.values() if isinstance(stages, dict) else ()
    kinds = (stage.get("kind") for stage in given if isinstance(stage, dict))
    return any(kind is not None and str(kind) not in BUILT_IN for kind in kinds)


def _with_short_names(
    value: dict[str, object], folder: Path, local: PluginFiles
) -> dict[str, object]:
    """What a file in `folder` holds, plugins in files by the short names that `local` gives."""
    given: object = value.pop("plugin_files", None) or {}
    if not isinstance(given, dict) or not all(isinstance(path, str) for path in given.values()):
        return {**value, "plugin_files": given}  # the schema says what is wrong
    local.paths.update({name: folder / Path(path).expanduser() for name, path in given.items()})
    found = local.localised(value, (folder, Path.cwd()), frozenset(given))
    assert isinstance(found, dict)
    return found


def _of_mapping(given: Mapping[str, object]) -> tuple[dict[str, object], dict[Loc, str]]:
    """The values of a mapping as YAML would have them, and the mark of each place."""
    marks: dict[Loc, str] = {}

    def plain(value: object, loc: Loc) -> object:
        if loc:
            marks[loc] = MAPPING
        if isinstance(value, Mapping):
            return {key: plain(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, (*loc, index)) for index, item in enumerate(value)]
        return str(value) if isinstance(value, Path) else value

    return {key: plain(value, (key,)) for key, value in given.items()}, marks


def _open_model(value: dict[str, object], lines: dict[Loc, str]) -> None:
    """`model: DIR` stands for `model: {source: DIR}`."""
    if isinstance(value.get("model"), str):
        value["model"] = {"source": value["model"]}
        lines[("model", "source")] = lines[("model",)]


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


def _places(value: object, loc: Loc) -> Iterator[Loc]:
    """Where the value is, and everything in it."""
    yield loc
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from _places(item, (*loc, key))


def _forget(marks: dict[Loc, str], place: Loc) -> None:
    for old in [at for at in marks if at[: len(place)] == place]:
        del marks[old]


def _apply_override(
    raw: dict[str, object],
    marks: dict[Loc, str],
    override: str,
    local: PluginFiles,
    folder: Path,
) -> None:
    """Set one `a.b=c`: `c` is YAML, digits index a list, missing mappings are made.

    A path of a plugin's file is relative to the working directory, or else to `folder`.
    """
    name, sign, text = override.partition("=")
    shown = OVERRIDE + (override if len(override) <= 100 else f"{override[:97]}...")
    keys = name.strip().split(".")
    if not sign or not all(keys):
        raise ConfigError(
            f"--set {short(override)} must look like a.b=c, for instance stages.rl.steps=3"
        )
    try:
        value = local.localised(read_value(text), (Path.cwd(), folder))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--set {name[:100]}: {short(text)} is not YAML ({problem}); quote it"
        ) from error
    here: object = raw
    loc: Loc = ()
    for position, key in enumerate(keys):
        last = position == len(keys) - 1
        if isinstance(here, list):
            if not _is_index(key) or int(key) >= len(here):
                allowed = f"'{key}' must be a number from 0 to {len(here) - 1}"
                raise ConfigError(
                    f"--set {name[:100]}: {dotted(loc)} is a list of {len(here)}; "
                    + (allowed if here else f"set {dotted(loc)} itself")
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
                marks[loc] = shown
            here = here[key]
        else:
            raise ConfigError(
                f"--set {name[:100]}: {dotted(loc)} is {short(here)}, which has no '{key}'; "
                f"write --set '{dotted(loc)}={{name: {str(here)[:60]}, {key}: ...}}' if it is a "
                "plugin"
            )
    _forget(marks, loc)
    marks.update(dict.fromkeys(_places(value, loc), shown))
    _open_model(raw, marks)
