"""YAML files and `--set` overrides to a checked `RunConfig`, with readable errors."""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

import posttrain.core
from posttrain.core.config.base import Component, StageBase
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
from posttrain.core.config.sections import OtherOptimizer
from posttrain.core.errors import ConfigError, nearest, shortlist
from posttrain.core.runtime.plugin_files import PluginFiles

if TYPE_CHECKING:
    from posttrain.core.plugin_manager import PluginManager

MAX_SHOWN = 10
StageClasses = Mapping[str, type[StageBase]]
"""The config class of each stage kind."""

# What pydantic puts into a place where values of two forms may stand.
UNION_TAGS = ("one", "many", "a number", "a schedule")
_FORM = re.compile(r"(function-(before|after|wrap|plain)|literal|nullable|list|tuple|dict)\[")
"""How a part begins by which pydantic names a form of value that has no tag."""


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one `ConfigError` for all `problems` (a line each, ten at most); none is fine."""
    if not problems:
        return
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(unique[0])
    lines = [f"  {line}" for line in unique[:MAX_SHOWN]]
    if len(unique) > MAX_SHOWN:
        lines.append(f"  and {len(unique) - MAX_SHOWN} more")
    raise ConfigError("\n".join([f"{len(unique)} problems in the configuration:", *lines]))


def explain(
    error: ValidationError,
    where: Callable[[Loc], str],
    root: type[BaseModel] = RunConfig,
    prefix: Loc = (),
    title: str = "a run",
    kinds: StageClasses = BUILT_IN,
) -> list[str]:
    """One line for each problem in `error`, which came from validating a `root` at `prefix`.

    `kinds` are the stage kinds that were known.
    """
    lines = []
    details = _of_one_form(error.errors(include_url=False))
    for detail in details:
        kind, message = detail["type"], detail["msg"]
        inner = _schema_free(tuple(detail["loc"]), root)
        if kind == "too_short" and any(
            len(d["loc"]) > len(detail["loc"]) and d["loc"][: len(detail["loc"])] == detail["loc"]
            for d in details
        ):
            continue  # a list whose items are wrong is reported as empty as well
        if root is RunConfig and detail["loc"][:2] == ("engine", "Component"):
            continue  # the other half of the union says it already
        loc = (*prefix, *inner)
        owner = dotted(loc[:-1]) if len(inner) > 1 else title
        if kind == "missing":
            sentence = f"is missing: {owner} needs '{loc[-1]}'"
        elif kind == "extra_forbidden":
            model = _model_at(tuple(detail["loc"])[:-1], root, kinds)
            known = list(model.model_fields) if model else []
            elsewhere = _elsewhere(str(loc[-1]), tuple(detail["loc"])[:-1], model, root, kinds)
            sentence = unknown_field(str(loc[-1]), detail["input"], known, owner, elsewhere)
        elif kind == "stage_without_kind":
            sentence = f"has no kind; add 'kind: ...', one of {list(kinds)}"
        elif kind == "stage_of_no_kind":
            given = detail["ctx"]["kind"]
            loc = (*loc, "kind")
            sentence = (
                f"no stage is of kind {_short(given)}{nearest(str(given), kinds)} "
                f"(allowed: {list(kinds)})"
            )
        else:
            sentence = _wrong_value(kind, message, root, detail, kinds)
        lines.append(f"{where(loc)}: {dotted(loc) or 'the file'}: {sentence}")
    return list(dict.fromkeys(lines))


def _of_one_form(details: Sequence[Any]) -> list[Any]:  # Any: pydantic's own error records
    """The problems without those of other forms that a value could have had.

    Of the forms that a place takes (a name or a list) the one counts that explains most: the one
    whose problem lies deepest, and of equals the last.
    """
    found: dict[Loc, Any] = {}  # by where forms part; the problems of the form that counts
    for number, detail in enumerate(details):
        loc = tuple(detail["loc"])
        at = next((i for i, part in enumerate(loc) if _is_form(part)), None)
        place = (*loc, number) if at is None else loc[:at]
        form = None if at is None else loc[at]
        kept = found.get(place)
        if kept is None or (form != kept[0] and len(loc) >= len(kept[1][0]["loc"])):
            found[place] = (form, [detail])
        elif form == kept[0]:
            kept[1].append(detail)
    return [detail for _, kept in found.values() for detail in kept]


def _is_form(part: str | int) -> bool:
    return isinstance(part, str) and _FORM.match(part) is not None


def unknown_field(
    name: str, value: object, known: Iterable[str], owner: str, elsewhere: str = ""
) -> str:
    """The sentence for a field that does not exist, with the nearest that does.

    `elsewhere` is the place of a field of that name in another section.
    """
    names = sorted(known)
    allowed = f"(allowed: {shortlist(name, names)})" if names else "(it has no fields)"
    hint = f"; did you mean '{elsewhere}'?" if elsewhere else nearest(name, names)
    return f"unknown field of {owner}, got {_short(value)}{hint} {allowed}"


# What other tools call a field of ours.
OTHER_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "max_new_tokens": "max_response_length",
    "max_tokens": "max_response_length",
    "max_completion_length": "max_response_length",
    "grad_clip": "max_grad_norm",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "warmup": "warmup_steps",
    "group_size": "num_generations",
    "per_device_train_batch_size": "micro_batch_size",
    "model_name": "source",
    "model_name_or_path": "source",
    "r": "rank",
    "lora_r": "rank",
    "lora_alpha": "alpha",
    "max_seq_length": "max_model_len",
    "max_length": "max_model_len",
    "reward": "rewards",
    "system": "system_prompt",
}


# Where fields of plugins are that people write on a stage; the first whose section it has.
PLUGIN_FIELDS = {
    "beta": ("preference_loss.beta", "kl.controller.coef"),
    "kl_coef": ("kl.controller.coef",),
    "kl_beta": ("kl.controller.coef",),
    "clip_low": ("policy_loss.clip_low",),
    "clip_high": ("policy_loss.clip_high",),
    "clip_eps": ("policy_loss.clip_high",),
    "label_smoothing": ("preference_loss.label_smoothing",),
    "gamma": ("advantage.gamma",),
}


def _elsewhere(
    name: str,
    owner: Loc,
    model: type[BaseModel] | None,
    root: type[BaseModel],
    kinds: StageClasses,
) -> str:
    """Where a field `name` is, or one that is meant by it: below its owner, above, or in the root.

    As a person writes it: relative to the owner if it is below, else from the root. Empty if it is
    nowhere, or if the owner has a field that is spelt nearly so. `owner` is pydantic's place.
    """
    if model is None or difflib.get_close_matches(name, model.model_fields, 1, cutoff=0.85):
        return ""
    wanted = tuple(dict.fromkeys((name, OTHER_NAMES.get(name, name))))
    held = (at for at in PLUGIN_FIELDS.get(name, ()) if at.split(".")[0] in model.model_fields)
    places = [*held, *(dotted(path) for path in _below(model) if path[-1] in wanted)]
    for end in range(len(owner) - 1, -1, -1):
        above = _model_at(owner[:end], root, kinds)
        fields = () if above is None else above.model_fields
        places += [dotted((*_schema_free(owner[:end], root), w)) for w in wanted if w in fields]
    if root is RunConfig:
        places += [dotted(path) for path in _below(RunConfig) if path[-1] in wanted]
        stages = kinds.values()
        inside = (path for stage in stages for path in _below(stage) if path[-1] in wanted)
        places += [dotted(("stages", "<stage>", *path)) for path in inside]
    return places[0] if places else ""


def _below(model: type[BaseModel]) -> Iterator[Loc]:
    """The places of fields in the sections of `model`, three levels deep, the nearest first."""
    level: list[tuple[Loc, type[BaseModel]]] = [((), model)]
    for _ in range(3):
        deeper: list[tuple[Loc, type[BaseModel]]] = []
        for place, section in level:
            for name, info in section.model_fields.items():
                if name != "name" or section is model:
                    yield (*place, name)
                inner = _models(info.annotation)
                if len(inner) == 1:
                    deeper.append(((*place, name), inner[0]))
        level = deeper


def _wrong_value(
    kind: str,
    message: str,
    root: type[BaseModel],
    detail: Mapping[str, Any],
    kinds: StageClasses,
) -> str:
    value = detail["input"]  # Any in the signature: pydantic's own error record
    loc = tuple(detail["loc"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        model = _model_at(loc, root, kinds)
        if model is not None and issubclass(model, Component):
            return f"must be a plugin name or {{name: ..., <its fields>}}, got {_short(value)}"
        return f"must be a mapping of fields, got {_short(value)}"
    if root is RunConfig and loc[:1] == ("engine",):
        return f"must be 'auto' or the name of a rollout engine, got {_short(value)}"
    if kind == "string_pattern_mismatch":
        pattern = (detail.get("ctx") or {}).get("pattern", "")
        if pattern == "^[a-z][a-z0-9_]*$":
            return (
                "a stage name must be lower-case letters, digits and '_', starting with a letter, "
                f"got {_short(value)}"
            )
    if kind == "too_short":
        least = (detail.get("ctx") or {}).get("min_length")
        return f"must have at least {least} item(s), got {_short(value)}"
    if kind == "literal_error" and isinstance(value, str):
        allowed = [part for part in str(detail.get("ctx", {}).get("expected", "")).split("'")]
        message += f"{nearest(value, [a for a in allowed[1::2]])}"
    if kind == "tuple_type":
        return f"must be a list, got {_short(value)}"
    for start in ("Input should be ", "String should ", "Value error, "):
        if message.startswith(start):
            verb = {"Input should be ": "must be ", "String should ": "must "}.get(start, "")
            message = verb + message.removeprefix(start)
    return f"{message} (got {_short(value)})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _schema_free(loc: Loc, root: type[BaseModel]) -> Loc:
    """`loc` without the parts that are added for unions, kinds of stages and keys."""
    if root is RunConfig and loc[:1] == ("stages",) and len(loc) > 2 and loc[2] != "[key]":
        loc = (*loc[:2], *loc[3:])
    if root is RunConfig and loc[:1] == ("engine",):
        return ("engine",)
    loc = tuple(part for part in loc if part not in UNION_TAGS and not _is_form(part))
    return loc[:-1] if loc and loc[-1] == "[key]" else loc


def _model_at(loc: Loc, root: type[BaseModel], kinds: StageClasses) -> type[BaseModel] | None:
    """The model whose fields live at pydantic's `loc`, which names the kind of a stage."""
    current: Any = root  # Any: type annotations have no common type
    for part in loc:
        models = _models(current)
        if part in UNION_TAGS or _is_form(part) or (models and isinstance(part, int)):
            continue  # one component, or an item of a list of them
        if models == [StageBase]:  # `loc` names its kind
            current = kinds.get(str(part))
        elif models:
            field = models[0].model_fields.get(str(part))
            current = field.annotation if field else None
        else:
            current = _item(current)
    models = _models(current)
    return models[0] if models else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        found = [model for arg in get_args(annotation) for model in _models(arg)]
        return [model for model in found if model is not OtherOptimizer]  # its plugin has fields
    return []


def _item(annotation: Any) -> Any:
    """What a mapping or tuple annotation holds."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    return arguments[0] if get_origin(annotation) is tuple else None


SUFFIXES = (".yaml", ".yml")
MAPPING = "the config"
"""Where a value stands that came from no file."""


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

    def wrote(self, loc: Loc) -> bool:
        """Whether a file or `--set` holds exactly this place."""
        return loc in self.marks


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
            f"--set {_short(override)} must look like a.b=c, for instance stages.rl.steps=3"
        )
    try:
        value = local.localised(read_value(text), (Path.cwd(), folder))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--set {name[:100]}: {_short(text)} is not YAML ({problem}); quote it"
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
                f"--set {name[:100]}: {dotted(loc)} is {_short(here)}, which has no '{key}'; "
                f"write --set '{dotted(loc)}={{name: {str(here)[:60]}, {key}: ...}}' if it is a "
                "plugin"
            )
    _forget(marks, loc)
    marks[loc] = shown
    _open_model(raw, marks)
