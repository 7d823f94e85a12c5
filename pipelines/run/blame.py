"""`blame`: what made a model, back to its base: data, settings, plugins, versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.config.differences import Setting, differing_settings
from posttrain.core.config.loading import load_config
from posttrain.core.config.resolve import resolve
from posttrain.core.config.sections import RegisteredName, RunName
from posttrain.core.errors import ConfigError, PosttrainError, ResourceError, RunError, nearest
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.store.ancestry import Ancestor, Family, Made
from posttrain.core.store.run_record import RunRecord, find_run
from posttrain.pipelines.run.model_reference import find_model, not_registered, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from posttrain.core.tracking.registry import RegisteredVersion


@dataclass(frozen=True, slots=True)
class DataRead:
    """A data set that a stage read, as its MLflow run has it."""

    name: str
    context: str
    sha256: str
    num_rows: int
    source: str


@dataclass(frozen=True, slots=True)
class Blamed:
    """One thing in the model's past with everything that is known of how it was made.

    `place` is the role in which the stage above read it. `stage` is empty where no stage of the
    store made it: then it is the base model, whose `source` is in a run's record.
    """

    place: str
    what: str
    digest: str
    depth: int
    stage: str = ""
    kind: str = ""
    identity: str = ""
    code: str = ""
    source: str = ""
    run_id: str = ""
    began: str = ""
    mlflow_run_id: str = ""
    prefect_flow_run_id: str = ""
    reported_above: bool = False
    data: tuple[DataRead, ...] = ()
    settings: tuple[Setting, ...] = ()
    plugins: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Blame:
    """Walks back from a model of this home. Reads only."""

    def __init__(self, home: Path, store: Path) -> None:
        self.home, self.store, self.family = home, store, Family(store)
        self.uri = tracking_uri(home)
        if not self.family.stages:
            raise ResourceError(
                f"no stage was finished in {store}: give the --home of the run, or the --store "
                "that its artifacts are in"
            )
        self._settings: dict[str, list[Setting]] = {}
        self.notes: list[str] = []

    def of(self, model: str) -> list[Blamed]:
        """The model, then what it comes from, each before its own past.

        `model` is a registered one (`name`, `name@alias`, `name/3`), a folder, MLflow's id of a
        model, the id of a run, or the start of it, or one of its stages (`RUN/STAGE`). Raises
        `ConfigError` where it is none.
        """
        past = self.family.past_of(self._digest(model))
        return list(self._walk(past, 0))

    def _digest(self, model: str) -> str:
        """sha256 of the model that is meant."""
        path = Path(model).expanduser()
        if path.is_dir():
            found = self.family.by_folder(path)
            if found is None:
                raise ResourceError(
                    f"no stage of this store made {path.resolve()}: give the --home or --store it "
                    "was made in"
                )
            return found[1]
        named = _named_run(model)
        if named is not None and (named.explicit or named.stage):
            return find_model(model, self.home, self.store).digest
        by_id = self.family.by_model_id(model)
        if by_id is not None:
            return by_id
        registered = self._registered(model)
        if registered is not None:
            return registered
        return self._of_run(model)

    def _registered(self, model: str) -> str | None:
        """Digest of a registered version; None for a bare name that no registered model has."""
        parts = re.fullmatch(r"(?![.~]+/)(models:/)?([^@/]+)(?:@([^@/]+)|/(\d+))?", model)
        if parts is None:
            return None
        prefix, name, alias, version = parts.groups()
        found = self._version(name, alias, version)
        if found is None:
            explicit = prefix or alias or version
            if not explicit and name not in self._names():
                return None
            named = RegisteredName(name, None if version else alias or "champion", version)
            raise not_registered(named, self.uri, model, "give the --home of the run that did")
        if not found.digest or not self.family.knows(found.digest):
            raise ResourceError(
                f"'{name}' version {found.version} was not made in this store: give the --home or "
                "--store of the run that made it"
            )
        return found.digest

    def _names(self) -> list[str]:
        """The registered models."""
        if self.uri is None:
            return []
        from posttrain.core.tracking import registry  # MLflow takes 2 s to import

        return registry.names(self.uri)

    def _version(
        self, name: str, alias: str | None, version: str | None
    ) -> RegisteredVersion | None:
        if self.uri is None or name not in self._names():
            return None
        from posttrain.core.tracking import registry

        if version:
            return registry.find_version(self.uri, name, version)
        tried = (
            registry.find_alias(self.uri, name, each)
            for each in ([alias] if alias else ["champion", "candidate"])
        )
        return next((each for each in tried if each is not None), None)

    def _of_run(self, model: str) -> str:
        """Digest of the last model that a run made."""
        try:
            run = find_run(self.home, model)
        except ConfigError as error:
            if self.uri is None:
                raise
            known = self._names()
            raise ConfigError(
                f"{error}. No registered model has this name either{nearest(model, known)} "
                f"(known: {known})"
            ) from error
        return find_model(f"runs:/{run.run_id}", self.home, self.store, compare=False).digest

    def _walk(self, ancestor: Ancestor, depth: int) -> Iterator[Blamed]:
        made = ancestor.made
        if made is None:
            yield self._outside(ancestor, depth)
        elif ancestor.seen:
            yield Blamed(
                ancestor.role,
                ancestor.kind,
                ancestor.digest,
                depth,
                made.stage,
                reported_above=True,
            )
        else:
            yield self._stage(ancestor, made, depth)
        for parent in ancestor.parents:
            yield from self._walk(parent, depth + 1)

    def _outside(self, ancestor: Ancestor, depth: int) -> Blamed:
        """What came from outside; the tag of a run that began with it has its source."""
        for run in self._runs():
            tags = run.data.tags
            if tags.get("posttrain.base_digest") == ancestor.digest:
                source = tags.get("posttrain.base_model", "")
                return Blamed(ancestor.role, "base model", ancestor.digest, depth, source=source)
        return Blamed(ancestor.role, ancestor.kind, ancestor.digest, depth)

    def _stage(self, ancestor: Ancestor, made: Made, depth: int) -> Blamed:
        run = self._mlflow_run(made.mlflow_run_id)
        parent = self._mlflow_run(run.data.tags.get("mlflow.parentRunId", "") if run else "")
        tags = {} if parent is None else parent.data.tags
        record = self._record(made)
        return Blamed(
            ancestor.role,
            ancestor.kind,
            ancestor.digest,
            depth,
            made.stage,
            made.kind,
            made.identity,
            made.code,
            run_id="" if record is None else record.run_id,
            began="" if record is None else record.began,
            mlflow_run_id=made.mlflow_run_id,
            prefect_flow_run_id=tags.get("prefect.flow_run_id", ""),
            data=() if run is None else tuple(_data(run)),
            settings=tuple(self._of_stage(made, record)),
            plugins=made.plugins,
            environment={
                name: tags[f"posttrain.{name}"]
                for name in ("python", "torch", "transformers", "engine", "dtype", "device")
                if f"posttrain.{name}" in tags
            },
        )

    def _record(self, made: Made) -> RunRecord | None:
        """The first run of this home that had the stage: the one that computed it."""
        records = []
        for path in self.home.glob("runs/*/run.json"):
            try:
                records.append(find_run(self.home, path.parent.name))
            except RunError as error:  # of some other run, perhaps
                if str(error) not in self.notes:
                    self.notes.append(str(error))
        had = [r for r in records if r.stages.get(made.stage) == made.identity]
        return min(had, key=lambda record: record.began, default=None)

    def _of_stage(self, made: Made, record: RunRecord | None) -> list[Setting]:
        """Settings of the run that are not their defaults and that this stage's identity has."""
        if record is None:
            self.notes.append(
                f"no run of this home has computed stage '{made.stage}', so its settings are not "
                "compared with their defaults"
            )
            return []
        if record.run_id not in self._settings:
            self._settings[record.run_id] = self._differing(record)
        own = f"stages.{made.stage}."
        return [
            setting
            for setting in self._settings[record.run_id]
            if setting.place.startswith(own) or _decides(setting.place, made)
        ]

    def _differing(self, record: RunRecord) -> list[Setting]:
        try:
            manager = PluginManager()
            loaded = load_config([record.unchanged_config()], manager=manager)
            return differing_settings(resolve(loaded, manager), manager)
        except PosttrainError as error:
            self.notes.append(f"the settings of run {record.run_id[:12]} cannot be read: {error}")
            return []

    def _mlflow_run(self, run_id: str) -> Run | None:
        if self.uri is None or not run_id:
            return None
        from mlflow.exceptions import MlflowException

        from posttrain.core.tracking import mlflow_store

        try:
            return mlflow_store.connect(self.uri).get_run(run_id)
        except MlflowException:
            return None  # of another tracking server

    def _runs(self) -> list[Run]:
        if self.uri is None:
            return []
        from posttrain.core.tracking import mlflow_store

        client = mlflow_store.connect(self.uri)
        experiments = [e.experiment_id for e in client.search_experiments()]
        found = client.search_runs(experiments, "tags.`posttrain.base_digest` != ''")
        return list(found)


def _named_run(model: str) -> RunName | None:
    try:
        return RunName.parse(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _decides(place: str, made: Made) -> bool:
    """Whether a setting outside the stages, such as `model.dtype`, is part of the identity.

    Where the model comes from is not: its digest is.
    """
    return place in made.parts or any(part.startswith(f"{place}.") for part in made.parts)


def data_read(client: MlflowClient, run_id: str) -> list[DataRead]:
    """The data sets that the MLflow run of a stage read."""
    return list(_data(client.get_run(run_id)))


def _data(run: Run) -> Iterator[DataRead]:
    for entry in run.inputs.dataset_inputs if run.inputs else ():
        profile: dict[str, Any] = json.loads(entry.dataset.profile or "{}")
        source: dict[str, Any] = json.loads(entry.dataset.source or "{}")
        context = next((t.value for t in entry.tags if t.key == "mlflow.data.context"), "")
        yield DataRead(
            entry.dataset.name,
            context,
            profile.get("sha256", entry.dataset.digest),
            int(profile.get("num_rows", 0)),
            source.get("uri", ""),
        )


# --- as text ---------------------------------------------------------------------------------


def lines(blamed: list[Blamed]) -> Iterator[str]:
    """The past as an indented tree, a line for each fact."""
    for item in blamed:
        pad = "   " * item.depth
        place = f"{item.place}: " if item.place else ""
        digest = item.digest[:12]
        if not item.stage:
            yield f"{pad}{place}{item.what} {digest} {item.source}".rstrip()
            continue
        if item.reported_above:
            yield f"{pad}{place}{item.what} {digest} of stage {item.stage} (see above)"
            continue
        yield f"{pad}{place}{item.what} {digest} of stage {item.stage} ({item.kind})"
        for fact in _facts(item):
            yield f"{pad}   - {fact}"


def _facts(item: Blamed) -> Iterator[str]:
    if item.run_id:
        yield f"run {item.run_id}, began {item.began}"
    if item.mlflow_run_id:
        prefect = f", Prefect {item.prefect_flow_run_id}" if item.prefect_flow_run_id else ""
        yield f"MLflow {item.mlflow_run_id}{prefect}"
    yield f"posttrain {item.code}"
    if item.environment:
        yield ", ".join(f"{name} {value}" for name, value in item.environment.items())
    for data in item.data:
        yield (
            f"data {data.name} ({data.context}): {data.num_rows} rows, sha256 {data.sha256[:12]}, "
            f"from {data.source}"
        )
    for setting in item.settings:
        before = "" if setting.default is None else f"{_short(setting.default)} -> "
        yield f"{setting.place}: {before}{_short(setting.value)}"
    by_version: dict[str, list[str]] = {}
    for name, version in item.plugins.items():
        by_version.setdefault(version, []).append(name)
    for version, names in by_version.items():
        yield f"plugins of {version}: {', '.join(names)}"


def _short(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
