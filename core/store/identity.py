"""The identity of a stage: a hash of everything that decides its result, and how two differ."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import posttrain.core
from posttrain.core.errors import ConfigError
from posttrain.core.store.manifests import combine_digests, file_digest, tree_digests
from posttrain.core.types import RUN_SECTIONS

if TYPE_CHECKING:
    from posttrain.core.contracts.stage import StageBase

# Where a model comes from is in its digest; the name of the place does not matter. Checkpoints
# change no result. Nor does what to do about steps on numbers that are not finite: these are never
# taken, so a stage either ends or makes the same.
_IGNORED = (
    "model.source",
    "model.until_registered",
    "model.revision",
    "model.fallback",
    "model.device",
    "inputs.",
    "checkpoint_every",
    *(
        f"{place}.{name}"
        for place in ("optimizer", "critic.optimizer", "implicit_prm.optimizer")
        for name in ("non_finite", "max_skipped")
    ),
)


def stage_parts(
    run: Mapping[str, object],
    stage: Mapping[str, object],
    of: type[StageBase],
    input_digests: Mapping[str, str],
    plugins: Sequence[tuple[str, str, str]],
    engine: str,
    task_fingerprint: str,
    outside: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The named parts of a stage's identity.

    `run` and `stage` are the resolved config as JSON-like mappings, `of` is the class of the
    stage's config, `input_digests` maps roles to digests, `plugins` are (kind, name, origin), the
    origin being package, version and, for one that is not built in, the digest of its source.
    `engine` is the engine that `auto` chose, `task_fingerprint` the digest of the task's data if
    the stage reads them, `outside` maps the stage's fields that name a file or folder to digests of
    what is in it.
    """
    shared = {key: run[key] for key in of.sections}
    if "engine" in shared:
        shared["engine"] = engine
    if task_fingerprint:
        shared["task_data"] = task_fingerprint
    left_out = {"kind", *of.without_effect}
    own = {k: v for k, v in stage.items() if k not in left_out}
    # A stage's own `evaluation: null` stands for the run's.
    settings = {**shared, **{k: v for k, v in own.items() if v is not None or k not in shared}}
    parts = {k: json.dumps(v, sort_keys=True, default=str) for k, v in flat(settings)}
    parts = {k: v for k, v in parts.items() if not k.startswith(_IGNORED)}
    outside = outside or {}
    parts = {k: v for k, v in parts.items() if k not in outside}  # where it lies does not matter
    parts |= {f"file {field}": digest for field, digest in outside.items()}
    parts |= {f"input {role}": digest for role, digest in input_digests.items()}
    parts |= {f"plugin {kind} {name}": origin for kind, name, origin in plugins}
    if not of.outlives_code:
        parts["posttrain"] = f"{importlib.metadata.version('posttrain')}+{source_digest()[:12]}"
    return parts


def outside_digests(paths: Mapping[str, str]) -> dict[str, str]:
    """Digest of each file or folder, by the field that names it; raises `ConfigError` if absent."""
    found = {}
    for field, name in paths.items():
        path = Path(name).expanduser()
        if path.is_file():
            found[field] = file_digest(path)
        elif path.is_dir():
            found[field] = combine_digests(tree_digests(path))
        else:
            raise ConfigError(
                f"{field}: there is no file or folder '{path}'; correct the path, which is "
                "relative to the folder the command was started in"
            )
    return found


def identity_of(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(parts.items()))).encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """sha256 over posttrain's own source: editing the code recomputes what it made."""
    root = Path(posttrain.core.__file__).parent
    folders = {
        "core": root,
        "pipelines": root.parent / "pipelines",
        "plugins": root.parent / "plugins",
    }
    return combine_digests(
        {
            f"{name}/{path.relative_to(folder).as_posix()}": file_digest(path)
            for name, folder in folders.items()
            for path in sorted(folder.rglob("*.py"))
            if not path.relative_to(folder).as_posix().startswith(("cli/", "api/"))
        }
    )


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested settings by their place: ("optimizer.learning_rate", 1e-5)."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


SHOWN = 3
_WIDTH = 40
_PLUGIN, _INPUT, _FILE, _CODE, _DATA = "plugin ", "input ", "file ", "posttrain", "task_data"
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs; `before` and `now` are empty where only the fact is worth telling."""

    what: str
    before: str = ""
    now: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.before} -> {self.now}" if self.before else self.what


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a stage is not reused: a fact (`never computed`), or what has changed since."""

    fact: str = ""
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        if not self.changes:
            return self.fact
        reported = ", ".join(str(change) for change in self.changes[:SHOWN])
        more = len(self.changes) - SHOWN
        return f"changed: {reported}" + (f" and {more} more" if more > 0 else "")


def explain(
    stage: str,
    parts: Mapping[str, str],
    previous: Sequence[Mapping[str, str]],
    sources: Mapping[str, str],
    waits_for: Sequence[str] = (),
) -> Reason:
    """What differs from the earlier results of the stage that is most like it.

    `parts` are named parts of the identity, `previous` those of earlier results, newest first;
    `sources` maps each role to the stage that makes the input, `base` for the base model. The
    digests of inputs in `waits_for` are not known yet, since what makes them is computed first.
    """
    if not previous:
        return Reason("never computed")
    unknown = {f"{_INPUT}{role}" for role in waits_for}
    now = {name: value for name, value in parts.items() if name not in unknown}

    def changes(before: Mapping[str, str]) -> list[Change]:
        old = {name: value for name, value in before.items() if name not in unknown}
        return _changes(stage, old, now, sources)

    found = min((changes(before) for before in previous), key=len)
    running = [
        Change(f"input {role} changed because {sources[role]} runs")
        for role in sources
        if role in waits_for
    ]
    if not found and not running and "fork.step" in parts:
        return Reason(f"it begins with the first {parts['fork.step']} steps of another run")
    # Settings before what follows from them, and the program's own code last.
    code = [change for change in found if change.what.startswith(_CODE)]
    return Reason(changes=(*(c for c in found if c not in code), *running, *code))


def _changes(
    stage: str, old: Mapping[str, str], now: Mapping[str, str], sources: Mapping[str, str]
) -> list[Change]:
    before, after = _without_origin(_tree(old), _tree(now))
    own = [*_differ(before, after, f"stages.{stage}", lambda root: root not in RUN_SECTIONS)]
    shared = [*_differ(before, after, "", lambda root: root in RUN_SECTIONS)]
    facts = [name for name in dict.fromkeys((*now, *old)) if old.get(name) != now.get(name)]
    files = [
        Change(f"the content of stages.{stage}.{name.removeprefix(_FILE)} changed")
        for name in facts
        if name.startswith(_FILE)
    ]
    if _DATA in facts:
        files.append(Change("the task's data changed"))
    plugins = [_plugin(name, old, now) for name in facts if name.startswith(_PLUGIN)]
    inputs = [
        _input(name.removeprefix(_INPUT), sources) for name in facts if name.startswith(_INPUT)
    ]
    code = [_code(old.get(_CODE, ""), now.get(_CODE, ""))] if _CODE in facts else []
    # A plugin that came or went with a setting is reported by the setting.
    replaced = [change for change in plugins if change.before or not (own or shared)]
    return [*own, *shared, *files, *replaced, *inputs, *code]


def _without_origin(
    before: dict[str, Any], now: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:  # Any: JSON
    """Settings of which `fork` holds the seed alone, where the stage is a fork now.

    What it shares is said when it begins.
    """
    if not now.get("fork"):
        return before, now
    earlier = before.get("fork") or {}
    return (
        {**before, "fork": {"seed": earlier.get("seed")}},
        {**now, "fork": {"seed": now["fork"]["seed"]}},
    )


def _tree(parts: Mapping[str, str]) -> dict[str, Any]:  # Any: JSON
    """The settings among `parts` as they were before they were flattened."""
    found: dict[str, Any] = {}
    for name, text in parts.items():
        if name in (_CODE, _DATA) or name.startswith((_PLUGIN, _INPUT, _FILE)):
            continue
        *path, last = name.split(".")
        here = found
        for key in path:
            inner = here.setdefault(key, {})
            here = inner if isinstance(inner, dict) else here
        here[last] = json.loads(text)
    return found


def _differ(
    before: Mapping[str, Any], now: Mapping[str, Any], place: str, wanted: Any
) -> Iterator[Change]:
    for root in dict.fromkeys((*now, *before)):
        if wanted(root):
            path = f"{place}.{root}" if place else root
            yield from _leaves(path, before.get(root, _NOTHING), now.get(root, _NOTHING))


def settings_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings in which two configs differ; fields of another plugin are no change."""
    return list(_differ(before, now, "", lambda _: True))


def _leaves(path: str, before: object, now: object) -> Iterator[Change]:
    """The smallest places below `path` that hold something else."""
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        if before.get("name") != now.get("name"):  # fields of another plugin are no change
            yield Change(path, _plain(before), _plain(now))
            return
        for key in dict.fromkeys((*now, *before)):
            yield from _leaves(f"{path}.{key}", before.get(key, _NOTHING), now.get(key, _NOTHING))
    elif isinstance(before, list) and isinstance(now, list) and _alike(before, now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _leaves(f"{path}.{index}", one, other)
    else:
        yield Change(path, _plain(before), _plain(now))


def _alike(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists hold the same plugins, or both none, so that places can be compared."""
    names = [
        [item.get("name") if isinstance(item, dict) else None for item in items]
        for items in (before, now)
    ]
    return names[0] == names[1] and any(name is not None for name in names[0])


def _plain(value: object) -> str:
    """A value as people write it in YAML, in one short line."""
    if value is _NOTHING:
        return "not there"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        name, rest = value.get("name"), {k: v for k, v in value.items() if k != "name"}
        if name is not None:
            return str(name)
        return _cut("{" + ", ".join(f"{key}: {_plain(item)}" for key, item in rest.items()) + "}")
    if isinstance(value, list):
        return _cut("[" + ", ".join(_plain(item) for item in value) + "]")
    return _cut(str(value)) if str(value).strip() else "''"


def _number(value: float) -> str:
    text = f"{value:.12g}"
    mantissa, sign, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if sign else mantissa


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _plugin(name: str, old: Mapping[str, str], now: Mapping[str, str]) -> Change:
    kind, _, plugin = name.removeprefix(_PLUGIN).partition(" ")
    what = f"{kind} plugin {plugin}"
    before, after = old.get(name), now.get(name)
    if before is None or after is None:
        return Change(f"{what} is {'not used any more' if after is None else 'used now'}")
    (package, version, _), (other, newer, _) = _origin(before), _origin(after)
    if package != other:
        return Change(what, f"of {package} {version}", f"of {other} {newer}")
    if version != newer:
        return Change(what, version, newer)
    return Change(f"the source of {what} changed")


def _origin(text: str) -> tuple[str, str, str]:
    """Package, version and source digest of a plugin; what is not there is empty."""
    package, version, source, *_ = [*text.split(" "), "", ""]
    return package, version, source


def _input(role: str, sources: Mapping[str, str]) -> Change:
    source = sources.get(role)
    if source is None:
        return Change(f"input {role} is not read any more")
    if source == "base":
        return Change(f"input {role} changed: another base model")
    return Change(f"input {role} changed: {source} made another one")


def _code(before: str, now: str) -> Change:
    old, new = before.partition("+")[0], now.partition("+")[0]
    return Change("posttrain's own code changed") if old == new else Change("posttrain", old, new)
