"""What a model's folder says of its origin: digests of its files and of all that it comes from.

It is JSON without settings or paths, so it can be published with the model. It is not signed: it
shows that files are those it was written for, and whoever can rewrite the files can rewrite it. A
copy of its own digest, kept elsewhere, closes that gap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from posttrain.core.errors import ResourceError
from posttrain.core.runtime.files import WrongContent, read_json, write_text
from posttrain.core.store.ancestry import Family, Made
from posttrain.core.store.manifests import (
    ATTESTATION,
    MANIFEST,
    digests_below,
    file_digest,
    read_files,
)

Outcome = Literal["equal", "differs", "not checked"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: `what`, `how` it was compared, and what came of it.

    `detail` says what differs, or why it was not checked.
    """

    what: str
    how: str
    outcome: Outcome
    detail: str = ""


class AttestedStage(BaseModel):
    """A stage of the model's past; `manifest` is the sha256 of its manifest."""

    model_config = ConfigDict(extra="forbid")

    stage: str
    kind: str
    identity: str
    manifest: str
    code: str
    data: str
    inputs: dict[str, str]
    plugins: dict[str, str]
    artifacts: dict[str, str]


class AttestedModel(BaseModel):
    """`files` are those of the model in the store, of which `digest` is the sum."""

    model_config = ConfigDict(extra="forbid")

    digest: str
    kind: str
    stage: str
    identity: str
    files: dict[str, str]


class Verification(BaseModel):
    """A verification that was made, with every check; `seed` drew the steps."""

    model_config = ConfigDict(extra="forbid")

    when: str
    code: str
    machine: dict[str, str]
    seed: int
    steps: dict[str, list[int]]
    reached: dict[str, str]
    checks: list[dict[str, str]]

    def counts(self) -> str:
        """How many checks came out how, in words."""
        found = [check["outcome"] for check in self.checks]
        return ", ".join(f"{found.count(name)} {name}" for name in get_args(Outcome))


class Attestation(BaseModel):
    """`stages` begin with the one that made the model; `files` are those of an exported folder."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["posttrain attestation"] = "posttrain attestation"
    version: Literal[1] = 1
    model: AttestedModel
    stages: list[AttestedStage]
    outside: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    verification: Verification | None = None

    def with_files(self, folder: Path) -> Attestation:
        """With the digest of each file of an exported folder but the attestation itself."""
        found = sorted(p for p in folder.iterdir() if p.is_file() and p.name != ATTESTATION)
        return self.model_copy(update={"files": {p.name: file_digest(p) for p in found}})

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")


def kept_at(home: Path, digest: str) -> Path:
    """Where a home keeps the newest verification of a model."""
    return home / "attestations" / f"{digest[:16]}.json"


def read_attestation(path: Path) -> Attestation:
    """Raises `ResourceError` for any other file."""
    try:
        return Attestation.model_validate(read_json(path, Attestation))
    except (WrongContent, ValueError) as error:
        raise ResourceError(
            f"{path} is not an attestation that `posttrain export` wrote ({error}): download the "
            "folder again, or export the model again"
        ) from error


def attest(family: Family, digest: str) -> Attestation:
    """What the store's manifests say of the model with this digest, which it must know."""
    past = family.past_of(digest)
    if past.made is None:
        raise ResourceError(f"no stage of this store made the model with digest {digest[:12]}")
    made = [one.made for one in past.walk() if one.made is not None and not one.seen]
    outside = {one.role: one.digest for one in past.walk() if one.made is None}
    model = AttestedModel(
        digest=digest,
        kind=past.kind,
        stage=past.made.stage,
        identity=past.made.identity,
        files=digests_below(read_files(past.made.folder) or {}, past.made.artifacts[digest]["uri"]),
    )
    stages = list({one.identity: _stage(one) for one in made}.values())
    return Attestation(model=model, stages=stages, outside=outside)


def _stage(made: Made) -> AttestedStage:
    return AttestedStage(
        stage=made.stage,
        kind=made.kind,
        identity=made.identity,
        manifest=file_digest(made.folder / MANIFEST),
        code=made.code,
        data=json.loads(made.parts.get("task_data", '""')),
        inputs=made.inputs,
        plugins=made.plugins,
        artifacts={digest: row["kind"] for digest, row in made.artifacts.items()},
    )


def rows(checks: Sequence[Check]) -> list[dict[str, str]]:
    """The checks as JSON."""
    return [asdict(check) for check in checks]
