"""Where a model comes from: a store's stages, from what they made back to what they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.store.artifacts import ArtifactStore

_INPUT, _PLUGIN = "input ", "plugin "


@dataclass(frozen=True, slots=True)
class Made:
    """A finished stage, read from its manifest; `artifacts` has each thing's row by its digest."""

    stage: str
    kind: str
    identity: str
    folder: Path
    seconds: float
    mlflow_run_id: str
    parts: Mapping[str, str] = field(repr=False)
    artifacts: Mapping[str, Mapping[str, str]] = field(repr=False)

    @property
    def inputs(self) -> dict[str, str]:
        return self._named(_INPUT)

    @property
    def plugins(self) -> dict[str, str]:
        """`KIND NAME` of each plugin, with its distribution and version."""
        return self._named(_PLUGIN)

    @property
    def code(self) -> str:
        return self.parts.get("posttrain", "")

    def _named(self, prefix: str) -> dict[str, str]:
        found = {k.removeprefix(prefix): v for k, v in self.parts.items() if k.startswith(prefix)}
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Ancestor:
    """One thing in a model's past, and the stage that made it, if one of this store did.

    `role` is what the stage above it read it as; of the model itself it is empty. `seen` says that
    it was listed before, so that its own past is not listed again.
    """

    role: str
    digest: str
    made: Made | None
    kind: str = "model"
    parents: tuple[Ancestor, ...] = ()
    seen: bool = False

    def walk(self) -> Iterator[Ancestor]:
        """Itself, then what it comes from."""
        yield self
        for parent in self.parents:
            yield from parent.walk()


class Family:
    def __init__(self, store: Path) -> None:
        # Of two stages that made the same bytes the newest is listed.
        self.stages = [
            _made(folder, found) for folder, found, _ in ArtifactStore(store).manifests()
        ]
        self._by_digest = {digest: made for made in self.stages for digest in made.artifacts}

    def by_identity(self, identity: str) -> Made | None:
        return next((made for made in self.stages if made.identity == identity), None)

    def by_folder(self, folder: Path) -> tuple[Made, str] | None:
        for made in reversed(self.stages):
            for digest, row in made.artifacts.items():
                if (made.folder / row["uri"]).resolve() == folder.resolve():
                    return made, digest
        return None

    def by_model_id(self, model_id: str) -> str | None:
        for made in self.stages:
            for digest, row in made.artifacts.items():
                if row.get("mlflow_model_id") == model_id:
                    return digest
        return None

    def knows(self, digest: str) -> bool:
        return digest in self._by_digest

    def past_of(self, digest: str) -> Ancestor:
        return self._past("", digest, set())

    def _past(self, role: str, digest: str, reported: set[str]) -> Ancestor:
        made = self._by_digest.get(digest)
        kind = "from outside"
        if made is not None:
            kind = made.artifacts[digest]["kind"]
        if digest in reported:
            return Ancestor(role, digest, made, kind, seen=True)
        reported.add(digest)
        parents = () if made is None else made.inputs.items()
        return Ancestor(
            role,
            digest,
            made,
            kind,
            tuple(self._past(name, parent, reported) for name, parent in parents),
        )


def _made(folder: Path, manifest: Mapping[str, Any]) -> Made:  # Any: JSON
    return Made(
        stage=manifest["stage"],
        kind=manifest.get("kind", ""),
        identity=manifest["identity"],
        folder=folder,
        seconds=float(manifest.get("seconds", 0.0)),
        mlflow_run_id=manifest.get("mlflow_run_id", ""),
        parts=manifest["parts"],
        artifacts={row["digest"]: row for row in manifest["artifacts"]},
    )
