"""What a text names as a model: a folder, a hub's id, a registered model, what a run made.

Every command and every config's `model.source` takes the same forms. `find_model` finds the folder
and what is known of it; `find_base` does so for a config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import ModelSection, RegisteredName, RunName
from posttrain.core.data.cursor import PinnedModel
from posttrain.core.errors import ConfigError, PosttrainError, ResourceError, nearest
from posttrain.core.runtime.files import whole_folder
from posttrain.core.store import urls
from posttrain.core.store.ancestry import Family, Made
from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.manifests import combine_digests, tree_digests
from posttrain.core.store.run_record import RunRecord, find_run

if TYPE_CHECKING:
    from posttrain.core.tracking.registry import RegisteredVersion

ADAPTER_FILE = "adapter_config.json"
MODELS = ("model", "reward_model")
_SERVER = "MLFLOW_TRACKING_URI"
FORMS = (
    "a folder, a hub's id such as HuggingFaceTB/SmolLM2-135M-Instruct, models:/NAME@ALIAS, "
    "models:/NAME/VERSION, the id of a run (RUN) or RUN/STAGE"
)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on this disk and what is known of how it was made.

    `given` is the text that named it, `path` its Hugging Face folder, `digest` sha256 of the model,
    `origin` where it comes from in words. Of a model that a stage of this home or store made
    `stage`, `identity` and MLflow's ids are known, and `run` where a run of this home had that
    stage.
    """

    given: str
    path: Path
    digest: str
    origin: str
    kind: str = "model"
    stage: str = ""
    identity: str = ""
    mlflow_run_id: str = ""
    mlflow_model_id: str = ""
    run: RunRecord | None = None

    @property
    def run_id(self) -> str:
        """The id of the posttrain run (MLflow's parent run); empty if none is known."""
        return "" if self.run is None else self.run.run_id

    def config(self) -> RunConfig | None:
        """The complete config of the run that made it; None where no run is known.

        Plugins are not looked up. Raises `PosttrainError` for a config that cannot be read.
        """
        if self.run is None:
            return None
        from posttrain.core.config.loading import load_config

        return load_config([self.run.unchanged_config()]).config


def context_length(folder: Path, most: int) -> int:
    """Tokens that the model in `folder` can attend to, by its config; at most `most`.

    A config that says none, or fewer than the 8 that a config of a run needs, gives `most`.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    inner = config.get("text_config")
    found = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    return min(found, most) if isinstance(found, int) and found >= 8 else most


def tracking_uri(home: Path) -> str | None:
    """Where MLflow's data are; None where there is no database in this home yet."""
    own = _database(home)
    return run_tracking_uri(home) if os.environ.get(_SERVER) or own.is_file() else None


def run_tracking_uri(home: Path) -> str:
    """Where a run in this home puts MLflow's data."""
    return os.environ.get(_SERVER) or f"sqlite:///{_database(home)}"


def _database(home: Path) -> Path:
    return home.resolve() / "mlflow" / "mlflow.db"


def find_model(
    given: str,
    home: Path,
    store: Path | None = None,
    *,
    revision: str | None = None,
    compare: bool = True,
) -> FoundModel:
    """The model that `given` names: `FORMS`, also NAME@ALIAS, runs:/RUN/STAGE and MLflow's run ids.

    A folder goes before a run of this home, a run before a hub's id. Of a run without a stage it is
    the last model that it made. A model of a hub is downloaded. Raises `ConfigError` for a text
    that names nothing, and `ResourceError` for a model that is not here or not what was written.
    Without `compare` a finished stage's files are not read: who compares them names what differs.
    """
    search = _Search(given, home, store or home / "artifacts", compare)
    path = Path(given).expanduser()
    if path.is_dir():
        return search.of_folder(path)
    registered, run = _parsed(given)
    if registered is not None:
        found = _registered(
            registered,
            tracking_uri(home),
            given,
            "give the --home of the run that did",
            compare=compare,
        )
        known = search.of_folder(found.path)
        reported = _reported(registered, found.version)
        return replace(known, digest=found.digest, origin=reported, mlflow_model_id=found.model_id)
    if run is not None:
        made = search.of_run(run)
        if made is not None:
            return made
    return search.from_outside(revision)


def _parsed(given: str) -> tuple[RegisteredName | None, RunName | None]:
    """The forms that a home or MLflow knows; raises `ConfigError` for a wrong one."""
    name, at_sign, _ = given.partition("@")
    short = at_sign and "/" not in name and ":" not in name
    try:
        return RegisteredName.parse(f"models:/{given}" if short else given), RunName.parse(given)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _reported(named: RegisteredName, version: str) -> str:
    alias = f" ({named.alias})" if named.alias else ""
    return f"{named.name} version {version}{alias}"


def first_run(home: Path, made: Made) -> RunRecord | None:
    """The first run of this home that had the stage: the one that computed it."""
    had = [r for r in _records(home) if r.stages.get(made.stage) == made.identity]
    return min(had, key=lambda record: record.began, default=None)


def _records(home: Path) -> Iterator[RunRecord]:
    """The runs of this home whose records can be read."""
    for path in home.glob("runs/*/run.json"):
        try:
            yield find_run(home, path.parent.name)
        except PosttrainError:
            continue  # of some other run


def _registered(
    named: RegisteredName, uri: str | None, given: str, otherwise: str, *, compare: bool = True
) -> RegisteredVersion:
    """The registered version, its weights checked; raises `ResourceError` where there is none."""
    if uri is not None:
        from posttrain.core.tracking import registry  # MLflow takes 2 s to import

        version = _look_up(named, uri)
        if version is not None:
            if compare:
                registry.check_weights(version)
            return version
    raise not_registered(named, uri, given, otherwise)


def not_registered(
    named: RegisteredName, uri: str | None, given: str, otherwise: str
) -> ResourceError:
    """The error of every command for a registered model that is not there."""
    known: list[str] = []
    if uri is not None:
        from posttrain.core.tracking import registry

        known = registry.names(uri)
    what = f"version {named.version}" if named.version else f"alias '{named.alias}'"
    detail = f"{nearest(named.name, known)} (registered: {known or 'none'})"
    if named.name in known:
        detail = f": '{named.name}' has no {what}"
    return ResourceError(
        f"'{given}': there is no such model in MLflow{detail}; promote or register one, or "
        f"{otherwise}"
    )


def _look_up(named: RegisteredName, uri: str) -> RegisteredVersion | None:
    from posttrain.core.tracking import registry

    if named.alias is not None:
        return registry.find_alias(uri, named.name, named.alias)
    return registry.find_version(uri, named.name, str(named.version))


@dataclass(frozen=True)
class _Search:
    """Looks for the model that `given` names, in a home and its store; the rest as `find_model`."""

    given: str
    home: Path
    store: Path
    compare: bool = True

    @cached_property
    def family(self) -> Family:
        """The stages of the store."""
        return Family(self.store)

    def of_folder(self, path: Path) -> FoundModel:
        """A folder, and the stage of this store that made it, if one did."""
        from posttrain.core.models.source import obtain  # with it comes huggingface_hub

        if (path / ADAPTER_FILE).is_file() and not (path / "config.json").is_file():
            return self._merged(path)
        base = obtain(ModelSection(source=str(path)), self.home / "models")
        found = self.family.by_folder(path)
        if found is None:
            return FoundModel(self.given, base.path, base.digest, base.origin)
        made, digest = found
        return self._of_stage(base.path, digest, made, first_run(self.home, made))

    def _merged(self, adapter: Path) -> FoundModel:
        """A LoRA adapter merged into its base, once, in a folder of the home."""
        from posttrain.core.models.lora import base_of_adapter_in, merge_into
        from posttrain.core.models.quiet import quiet_libraries
        from posttrain.core.models.source import directory_digest

        quiet_libraries()
        source, revision = base_of_adapter_in(adapter)
        if Path(source).expanduser().resolve() == adapter.resolve():
            raise ResourceError(
                f"the adapter at {adapter} names itself as its base model: set "
                "base_model_name_or_path in its adapter_config.json to the model that was adapted"
            )
        base = find_model(source, self.home, self.store, revision=revision)
        digest = combine_digests({"base": base.digest, **tree_digests(adapter)})
        folder = self.home / "models" / f"merged-{digest[:16]}"
        if not folder.is_dir():
            with whole_folder(folder) as partial:
                merge_into(base.path, adapter, partial)
        origin = f"adapter {adapter} on {base.origin}"
        return FoundModel(self.given, folder, directory_digest(folder), origin)

    def of_run(self, named: RunName) -> FoundModel | None:
        """What a run of this home made; None for a hub's id that no run has."""
        runs = (self.home / "runs").glob(f"{named.run}*/run.json")
        if next(runs, None) is None:
            made = self._of_mlflow_run(named)
            if made is not None or not named.explicit and named.stage is not None:
                return made
        return self._stage_of(find_run(self.home, named.run), named.stage)

    def _of_mlflow_run(self, named: RunName) -> FoundModel | None:
        """The model that the MLflow run of a stage logged."""
        if len(named.run) != 32:
            return None
        for made in reversed(self.family.stages):
            if made.mlflow_run_id == named.run:
                return self._of_artifact(made, first_run(self.home, made))
        uri = tracking_uri(self.home)
        if uri is None:
            return None
        from mlflow.exceptions import MlflowException

        from posttrain.core.tracking import mlflow_store

        try:
            tags = mlflow_store.connect(uri).get_run(named.run).data.tags
        except MlflowException:
            return None
        parent, stage = tags.get("mlflow.parentRunId", ""), tags.get(mlflow_store.TAG_STAGE)
        try:
            record = find_run(self.home, parent) if parent else None
            return None if record is None else self._stage_of(record, stage)
        except ConfigError as error:
            raise ResourceError(
                f"'{self.given}' is a run in MLflow, of another home: give the --home of that run"
            ) from error

    def _stage_of(self, record: RunRecord, stage: str | None) -> FoundModel:
        """The model of a run's stage, or the run's last model; weights before reward models."""
        made = {name: self.family.by_identity(at) for name, at in record.stages.items()}
        kinds = {
            name: {row["kind"] for row in found.artifacts.values()} & set(MODELS)
            for name, found in made.items()
            if found is not None
        }
        models = [name for name, found in kinds.items() if found]
        short = record.run_id[:12]
        listed = f"stages of the run that made one: {models or 'none'}"
        if stage is None:
            policies = [name for name in models if "model" in kinds[name]]
            if lost := self._lost(record, made, (policies or models)[-1:]):
                raise ResourceError(
                    f"'{self.given}': what stage '{lost}' of run {short} made is gone from "
                    f"{urls.shown(self.store)} or damaged: the same `posttrain run` command "
                    f"computes it again, and RUN/STAGE names an earlier model ({listed})"
                )
            if not models and all(made.values()):
                raise ConfigError(
                    f"'{self.given}': run {short} made no model: the stages that it began are "
                    f"done, and none makes one ({list(made)})"
                )
            if not models:
                raise ResourceError(
                    f"run {short} has made no model yet, or not in {urls.shown(self.store)} (it "
                    f"began with stages {list(record.stages)}): the same `posttrain run` command "
                    "goes on with it, and --store says where its stages are"
                )
            stage = (policies or models)[-1]
        if stage not in record.stages:
            raise ConfigError(
                f"'{self.given}': run {short} has no stage '{stage}'"
                f"{nearest(stage, record.stages)} ({listed})"
            )
        found = made[stage]
        if found is None:
            raise ResourceError(
                f"'{self.given}': stage '{stage}' of run {short} is not done, or not in "
                f"{urls.shown(self.store)} ({listed}); the same `posttrain run` command goes on "
                "with the run"
            )
        if not kinds[stage]:
            raise ConfigError(
                f"'{self.given}': stage '{stage}' of run {short} is of kind '{found.kind}' and "
                f"made no model ({listed})"
            )
        return self._of_artifact(found, record)

    def _lost(
        self, record: RunRecord, made: Mapping[str, Made | None], last: Sequence[str]
    ) -> str | None:
        """A stage that began after `last` and whose model was there: its folder still is, or a
        stage that read it is done. An earlier model must not be taken for it.
        """
        names = list(record.stages)
        later = names[names.index(last[0]) + 1 :] if last else names
        unread = [name for name in later if made[name] is None]
        if not unread:
            return None
        from posttrain.core.config.loading import load_config

        try:
            stages = load_config([record.config]).config.stages
        except PosttrainError:
            return None  # whoever needs the config says what is wrong with it
        done = [stage for name, stage in stages.items() if made.get(name) is not None]
        read = {source for stage in done for source in stage.inputs.values()}
        store = ArtifactStore(self.store)
        for name in reversed(unread):
            there = os.path.lexists(store.folder(name, record.stages[name]))
            if (there or name in read) and name in stages and stages[name].makes == "model":
                return name
        return None

    def _of_artifact(self, made: Made, record: RunRecord | None) -> FoundModel:
        """The model of a finished stage, every file as it was written; else `ResourceError`."""
        result, reason = ArtifactStore(self.store).lookup(
            made.stage, made.identity, compare=self.compare
        )
        if result is None:
            raise ResourceError(
                f"'{self.given}': what stage '{made.stage}' made cannot be used ({reason}): the "
                "same `posttrain run` command computes it again"
            )
        models = [item for item in result.artifacts if item.kind in MODELS]
        if not models:
            raise ConfigError(f"'{self.given}': stage '{made.stage}' made no model")
        item = min(models, key=lambda item: MODELS.index(item.kind))
        return self._of_stage(item.path, item.digest, made, record)

    def _of_stage(
        self, path: Path, digest: str, made: Made, record: RunRecord | None
    ) -> FoundModel:
        row = made.artifacts[digest]
        of_run = "" if record is None else f" of run {record.run_id[:12]}"
        return FoundModel(
            self.given,
            path,
            digest,
            f"stage '{made.stage}'{of_run}",
            kind=row["kind"],
            stage=made.stage,
            identity=made.identity,
            mlflow_run_id=made.mlflow_run_id,
            mlflow_model_id=row.get("mlflow_model_id", ""),
            run=record,
        )

    def from_outside(self, revision: str | None) -> FoundModel:
        """A model of a hub, or the bundled one."""
        from posttrain.core.models.source import check_source, obtain

        given, home = self.given, self.home
        if given.startswith((".", "/", "~")) or given.count("/") != 1:
            runs = [path.parent.name for path in (home / "runs").glob("*/run.json")]
            raise ConfigError(
                f"'{given}' is not a known model: no folder has this name"
                f"{nearest(given, _siblings(Path(given).expanduser()))}, and no run of {home} "
                f"begins with it ({len(runs)} runs); expected {FORMS}"
            )
        section = ModelSection(source=given, revision=revision)
        check_source(section)
        base = obtain(section, home / "models")
        return FoundModel(given, base.path, base.digest, base.origin)


def base_of(found: FoundModel, home: Path, store: Path | None = None) -> FoundModel:
    """The model that the run of `found` began with; raises `ConfigError` where no run is known."""
    config = found.config()
    if config is None:
        raise ConfigError(
            f"the base of '{found.given}' is not known, since no run of {home} made it: name the "
            "model to compare with, or give the --home of its run"
        )
    return find_model(config.model.source, home, store, revision=config.model.revision)


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []


# --- the base model of a config ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The model section to use; `pinned` is the version or stage behind it, if it is one."""

    section: ModelSection
    pinned: PinnedModel | None = None


def find_base(section: ModelSection, home: Path, store: Path | None = None) -> Found:
    """The section with a hub id or directory as its source. Reads only, downloads nothing."""
    if Path(section.source).expanduser().is_dir():
        return Found(section)
    named = RegisteredName.parse(section.source)
    if named is not None:
        return _registered_base(section, named, home)
    run = RunName.parse(section.source)
    search = _Search(section.source, home, store or home / "artifacts")
    found = None if run is None else search.of_run(run)
    if found is None:
        return Found(section)
    if found.kind != "model":
        raise ConfigError(
            f"model.source '{section.source}': {found.origin} made a {found.kind}, which writes no "
            "text; name a stage that trains a policy"
        )
    pinned = PinnedModel(str(found.path), found.digest, found.mlflow_model_id, found.origin)
    return Found(at(section, pinned.path), pinned)


def _registered_base(section: ModelSection, named: RegisteredName, home: Path) -> Found:
    uri = tracking_uri(home)
    if section.until_registered is not None and (uri is None or _look_up(named, uri) is None):
        return Found(at(section, section.until_registered))
    version = _registered(
        named,
        uri,
        f"model.source {section.source}",
        "set model.until_registered to the model to begin with",
    )
    reported = _reported(named, version.version)
    pinned = PinnedModel(str(version.path), version.digest, version.model_id, reported)
    return Found(at(section, pinned.path), pinned)


def at(section: ModelSection, source: str) -> ModelSection:
    """The section with a folder or a hub id as its source."""
    return section.model_copy(update={"source": source, "until_registered": None})
