"""The identity of a stage: a hash of everything that decides its result, with named parts."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import posttrain.core
from posttrain.core.artifacts import combine_digests, file_digest, tree_digests
from posttrain.core.errors import ConfigError

# Sections of the run's config that decide results, by stage kind, beside the stage's own section.
_SHARED_SECTIONS: dict[str, tuple[str, ...]] = {
    "evaluate": ("seed", "task", "engine", "model", "evaluation"),
    "sft": ("seed", "task", "model"),
    "reward_model": ("seed", "task", "engine", "model"),
    "preference": ("seed", "task", "engine", "model"),
    "rl": ("seed", "task", "engine", "model", "evaluation"),
    "register": ("name",),
    "transform": ("seed", "task", "engine", "model", "evaluation"),
    "approve": (),
    "promote": ("seed", "task", "engine", "model"),
    "new_data": (),
}
SHARED = frozenset(name for names in _SHARED_SECTIONS.values() for name in names)
"""Sections of the run whose fields are parts of identities."""
# Where a model comes from is in its digest; the name of the place does not matter.
_IGNORED = (
    "model.source",
    "model.until_registered",
    "model.revision",
    "model.fallback",
    "model.device",
    "inputs.",
)
# What of a stage does not decide its result, by kind: how long an answer is waited for, how many
# rows would have been enough or too many when the rows themselves are known.
_IGNORED_OF: dict[str, tuple[str, ...]] = {
    "approve": ("samples", "timeout_hours", "on_timeout"),
    "new_data": ("min_rows", "max_rows"),
}


def stage_parts(
    run: Mapping[str, object],
    stage: Mapping[str, object],
    input_digests: Mapping[str, str],
    plugins: Sequence[tuple[str, str, str, str]],
    engine: str,
    task_fingerprint: str,
    outside: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The named parts of a stage's identity.

    `run` and `stage` are the resolved config as JSON-like mappings, `input_digests` maps roles to
    digests, `plugins` are (kind, name, package, version), `engine` is the engine that `auto` chose,
    `task_fingerprint` the digest of outside data the task reads, `outside` maps the stage's fields
    that name a file or folder to digests of what is in it.
    """
    kind = str(stage["kind"])
    shared = {key: run[key] for key in _SHARED_SECTIONS[kind]}
    if "engine" in shared:
        shared["engine"] = engine
    # Supervised learning on a data set reads no row of the task itself.
    reads_task = "task" in shared and not (kind == "sft" and "dataset" in input_digests)
    if reads_task and task_fingerprint:
        shared["task_data"] = task_fingerprint
    settings = {**shared, **{k: v for k, v in stage.items() if k != "kind"}}
    parts = {k: json.dumps(v, sort_keys=True, default=str) for k, v in flat(settings)}
    ignored = (*_IGNORED, *_IGNORED_OF.get(kind, ()))
    parts = {k: v for k, v in parts.items() if not k.startswith(ignored)}
    outside = outside or {}
    parts = {k: v for k, v in parts.items() if k not in outside}  # where it lies does not matter
    parts |= {f"file {field}": digest for field, digest in outside.items()}
    parts |= {f"input {role}": digest for role, digest in input_digests.items()}
    parts |= {f"plugin {kind} {name}": f"{pkg} {ver}" for kind, name, pkg, ver in plugins}
    if kind != "approve":  # a person's answer is about the model, whatever code asked for it
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
            if not path.relative_to(folder).as_posix().startswith("cli/")
        }
    )


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested settings by their place: ("optimizer.learning_rate", 1e-5)."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
