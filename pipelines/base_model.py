"""Where a run's base model is, when the config names a registered one: settled before it begins."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core.config.registered import RegisteredName
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.config.sections import ModelSection
from posttrain.core.data.cursor import PinnedModel
from posttrain.core.errors import ResourceError, nearest


@dataclass(frozen=True, slots=True)
class Found:
    """The model section to use; `pinned` is the registered version behind it, if it is one."""

    section: ModelSection
    pinned: PinnedModel | None = None


def tracking_uri(home: Path) -> str | None:
    """Where MLflow's data are; None where there is no database in this home yet."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        return given
    database = home.resolve() / "mlflow" / "mlflow.db"
    return f"sqlite:///{database}" if database.is_file() else None


def find_base(section: ModelSection, home: Path) -> Found:
    """The section with a hub id or directory as its source. Reads only."""
    named = RegisteredName.parse(section.source)
    if named is None:
        return Found(section)
    uri = tracking_uri(home)
    known: list[str] = []
    if uri is not None:
        from posttrain.core.tracking import registry  # MLflow takes 2 s to import

        if named.alias is not None:
            version = registry.find_alias(uri, named.name, named.alias)
        else:
            version = registry.find_version(uri, named.name, str(named.version))
        if version is not None:
            registry.check_weights(version)
            told = f"{named.name} version {version.version}"
            told += f" ({named.alias})" if named.alias else ""
            pinned = PinnedModel(str(version.path), version.digest, version.model_id, told)
            return Found(at(section, pinned), pinned)
        known = registry.names(uri)
    if section.until_registered is not None:
        return Found(_with_source(section, section.until_registered))
    raise ResourceError(
        f"model.source '{section.source}': there is no such model in MLflow"
        f"{nearest(named.name, known)} (registered: {known or 'none'}); promote or register one, "
        "or set model.until_registered to the model to begin with"
    )


def at(section: ModelSection, pinned: PinnedModel) -> ModelSection:
    """The section with the folder of a registered version as its source."""
    return _with_source(section, pinned.path)


def with_model(resolved: ResolvedRun, section: ModelSection) -> ResolvedRun:
    if section == resolved.config.model:
        return resolved
    return replace(resolved, config=resolved.config.model_copy(update={"model": section}))


def _with_source(section: ModelSection, source: str) -> ModelSection:
    return section.model_copy(update={"source": source, "until_registered": None})
