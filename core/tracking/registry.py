"""Registered models: versions by digest, the champion's alias, and its way back.

An alias is moved last. What a move means is in the tags of the version before the alias moves: the
version that was the champion, and the evidence. A process that dies in between is put right by
doing the same again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import of_shape
from posttrain.core.store.manifests import model_digest, tree_digests
from posttrain.core.tracking import mlflow_store as store

TAG_DIGEST = "digest"
TAG_URI = "uri"
TAG_PREVIOUS = "posttrain.previous_champion"
TAG_PROMOTION = "posttrain.promotion"
TAG_ROLLED_BACK = "posttrain.rolled_back"
TAG_RESTORED = "posttrain.restored"
LOGGED = "models:/"
NONE = "none"
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A version of a registered model. `path` is where its weights lie, `digest` what they are."""

    name: str
    version: str
    digest: str
    path: Path
    model_id: str
    run_id: str
    tags: Mapping[str, str] = field(repr=False)

    @property
    def previous(self) -> str:
        """The version that was the champion before this one; empty if there was none."""
        found = self.tags.get(TAG_PREVIOUS, "")
        return "" if found == NONE else found

    @property
    def rolled_back(self) -> dict[str, str] | None:
        """Who took this version back, when, why; None if nobody did."""
        found: dict[str, str] | None = self.noted(TAG_ROLLED_BACK, dict[str, str])
        return found

    def noted(self, tag: str, kind: Any) -> Any:  # Any: JSON of a type known at run time
        """The JSON of a tag, None without one; raises `ResourceError` where it is not `kind`."""
        text = self.tags.get(tag, "")
        try:
            return of_shape(json.loads(text), kind) if text else None
        except (ValueError, RecursionError) as error:
            raise ResourceError(
                f"the tag '{tag}' of '{self.name}' version {self.version} is not what was written "
                f"({error}): correct or remove it in MLflow"
            ) from error


def how_to_load(folder: str) -> str:
    """What the page of a model says, in Markdown: its folder, and code that loads it."""
    ranks = Path(folder).name == "reward_model"
    auto = "AutoModelForSequenceClassification" if ranks else "AutoModelForCausalLM"
    return (
        f"Weights, config and tokenizer are in `{folder}`, a Hugging Face directory. MLflow has "
        "this entry and no copy of them, so `mlflow.*.load_model` does not apply:\n\n"
        "```python\n"
        f"from transformers import AutoTokenizer, {auto}\n\n"
        f"folder = {folder!r}\n"
        f"model = {auto}.from_pretrained(folder, trust_remote_code=False)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)\n"
        "```\n"
    )


def check_weights(found: RegisteredVersion) -> None:
    """Raise `ResourceError` unless the version's weights are on this disk, as they were made."""
    reported = f"'{found.name}' version {found.version}"
    if not found.digest:
        raise ResourceError(
            f"{reported} was not registered by posttrain: it has no tag '{TAG_DIGEST}' that says "
            "what its weights are; register the model with a stage of kind 'register' or 'promote'"
        )
    if not found.path.is_dir():
        raise ResourceError(
            f"the weights of {reported} are not on this machine: {found.path} is not a folder; "
            "use the --home that made them, or copy them there"
        )
    if model_digest(tree_digests(found.path)) != found.digest:
        raise ResourceError(
            f"the weights of {reported} in {found.path} are not those that were registered (other "
            "digest): restore them, or move the alias with `posttrain rollback`"
        )


def find_alias(uri: str, name: str, alias: str) -> RegisteredVersion | None:
    """The version that `alias` names; None where there is no such model or alias."""
    client = store.connect(uri)
    with store.explained(f"look up '{name}@{alias}'", uri):
        return _found(lambda: client.get_model_version_by_alias(name, alias))


def find_version(uri: str, name: str, version: str) -> RegisteredVersion | None:
    client = store.connect(uri)
    with store.explained(f"look up '{name}' version {version}", uri):
        return _found(lambda: client.get_model_version(name, version))


def find_digest(uri: str, name: str, digest: str) -> RegisteredVersion | None:
    client = store.connect(uri)
    with store.explained(f"search versions of '{name}'", uri):
        found = [v for v in _versions(client, name) if v.tags.get(TAG_DIGEST) == digest]
    return _told(max(found, key=lambda v: int(v.version))) if found else None


def add_version(client: MlflowClient, model_id: str, name: str, tags: Mapping[str, str]) -> str:
    """Make the model a version of `name`, once: by its id or its digest it keeps the one it has."""
    source = f"models:/{model_id}"
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    digest = tags.get(TAG_DIGEST)
    known = [
        v
        for v in _versions(client, name)
        if v.source == source or (digest and v.tags.get(TAG_DIGEST) == digest)
    ]
    if not known:
        run_id = client.get_logged_model(model_id).source_run_id
        made = client.create_model_version(
            name,
            source,
            run_id=run_id,
            model_id=model_id,
            tags=dict(tags),
            description=how_to_load(tags[TAG_URI]) if TAG_URI in tags else None,
        )
        version = str(made.version)
    else:
        version = str(known[0].version)
        for key, value in tags.items():
            store.upsert(partial(client.set_model_version_tag, name, version, key, value))
    _show_on_model(client, model_id, name, version)
    return version


def _show_on_model(client: MlflowClient, model_id: str, name: str, version: str) -> None:
    """Let the model's page say which versions it is: MLflow reads that from a tag of the model."""
    entry = {"name": name, "version": version}
    known: list[object] = []
    with contextlib.suppress(ValueError, RecursionError):  # it is only for MLflow's own page
        text = client.get_logged_model(model_id).tags.get(MLFLOW_MODEL_VERSIONS, "[]")
        known = of_shape(json.loads(text), list[object])
    if entry not in known:
        reported = json.dumps([*known, entry])
        client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: reported})


def register_champion(uri: str, model_id: str, name: str, tags: Mapping[str, str]) -> str:
    """The model as a version of `name`, its alias not moved yet; returns the version."""
    client = store.connect(uri)
    with store.explained(f"register models:/{model_id} as '{name}'", uri):
        return add_version(client, model_id, name, tags)


def move_alias(uri: str, name: str, alias: str, version: str) -> None:
    client = store.connect(uri)
    with store.explained(f"move '{name}@{alias}' to version {version}", uri):
        store.upsert(partial(client.set_registered_model_alias, name, alias, version))


def tag_version(uri: str, name: str, version: str, tags: Mapping[str, str]) -> None:
    """Set tags of a version; an empty value removes the tag."""
    client = store.connect(uri)
    with store.explained(f"tag '{name}' version {version}", uri):
        known = client.get_model_version(name, version).tags
        for key, value in tags.items():
            if value:
                store.upsert(partial(client.set_model_version_tag, name, version, key, value))
            elif key in known:
                client.delete_model_version_tag(name, version, key)


def names(uri: str) -> list[str]:
    client = store.connect(uri)
    with store.explained("list registered models", uri):
        return [model.name for model in client.search_registered_models()]


def _versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    quoted = name.replace("'", "\\'")
    return list(client.search_model_versions(f"name = '{quoted}'"))


def _found(look_up: Callable[[], ModelVersion]) -> RegisteredVersion | None:
    try:
        return _told(look_up())
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
        return None


def _told(found: ModelVersion) -> RegisteredVersion:
    # A version read by its alias has no model id, but its source is `models:/m-...`.
    source = str(found.source or "")
    by_source = source.removeprefix(LOGGED) if source.startswith(f"{LOGGED}m-") else ""
    return RegisteredVersion(
        name=str(found.name),
        version=str(found.version),
        digest=found.tags.get(TAG_DIGEST, ""),
        path=Path(found.tags.get(TAG_URI, "")),
        model_id=str(found.model_id or by_source),
        run_id=str(found.run_id or ""),
        tags=dict(found.tags),
    )
