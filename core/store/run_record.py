"""What a home keeps of each run in addition to its artifacts: its resolved config, and its results.

`HOME/runs/<run id>/` holds `config.yaml`, complete as it was run, and `run.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from posttrain.core.errors import ConfigError, ResourceError, RunError
from posttrain.core.redaction import redacted
from posttrain.core.runtime.files import WrongContent, read_json, write_text

CONFIG = "config.yaml"
RECORD = "run.json"
IMPORTS = "imports"
"""Below a home: what runs were made of that `posttrain import` read from another trainer."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run of this home: `stages` maps the name of each stage that began to its identity."""

    run_id: str
    name: str
    folder: Path
    began: str = ""
    stages: Mapping[str, str] = field(default_factory=dict)
    config_sha256: str = ""
    """Empty in a record of before it was kept."""
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        return self.folder / CONFIG

    def unchanged_config(self) -> Path:
        """The config, as the run wrote it; else `ResourceError`.

        One that was cut may still be YAML, whose missing fields would get their defaults.
        """
        advice = (
            "put it back (MLflow has a copy among the run's artifacts), or run the config again"
        )
        try:
            found = _sha256(self.config.read_bytes())
        except OSError as error:
            raise ResourceError(
                f"the config of run {self.run_id[:12]} cannot be read: {self.config}: "
                f"{error.strerror}; {advice}"
            ) from error
        if self.config_sha256 not in ("", found):
            raise ResourceError(f"{self.config} was changed after the run wrote it: {advice}")
        return self.config


class RunRecorder:
    """Writes a run's record; stages and warnings may be added from several threads."""

    def __init__(self, home: Path, run_id: str, name: str, began: str, config_yaml: str) -> None:
        self.folder = home / "runs" / run_id
        self._row: dict[str, object] = {
            "run_id": run_id,
            "name": name,
            "began": began,
            "config_sha256": _sha256(config_yaml.encode()),
        }
        self._stages: dict[str, str] = {}
        self._warnings: list[str] = []
        self._lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / CONFIG, config_yaml)
        self._write()

    def stage(self, name: str, identity: str) -> None:
        """Note the identity of a stage that begins, or whose result is reused."""
        with self._lock:
            self._stages[name] = identity
            self._write()

    def warn(self, text: str) -> None:
        """Note what the run warned of."""
        with self._lock:
            self._warnings.append(redacted(text))
            self._write()

    def _write(self) -> None:
        more = {"stages": self._stages, "warnings": self._warnings}
        text = json.dumps(self._row | more, indent=2)
        write_text(self.folder / RECORD, text)


def require_own_steps(home: Path, record: RunRecord) -> None:
    """Raise `ResourceError` for a run that was made of a dump, which has rollouts alone."""
    if (home / IMPORTS / record.run_id).is_dir():
        raise ResourceError(
            f"run {record.run_id[:12]} was imported from another trainer's dump, which has "
            "rollouts and neither steps nor checkpoints: inspect, compare, rescore and forensics "
            "read it"
        )


def find_run(home: Path, wanted: str) -> RunRecord:
    """The run whose id is, or begins with, `wanted`."""
    folders = sorted(
        (path.parent for path in (home / "runs").glob(f"*/{RECORD}")),
        key=lambda folder: (folder / RECORD).stat().st_mtime,
        reverse=True,
    )
    found = [folder for folder in folders if wanted and folder.name.startswith(wanted)]
    if len(found) == 1 or any(folder.name == wanted for folder in found):
        return _read(next((f for f in found if f.name == wanted), found[0]))
    if found:
        names = ", ".join(folder.name for folder in found[:_SHOWN])
        raise ConfigError(f"'{wanted}' begins {len(found)} run ids: {names}; give more of it")
    newest = ", ".join(folder.name for folder in folders[:_SHOWN])
    known = f"the newest of {len(folders)} are {newest}" if folders else "it has none"
    raise ConfigError(
        f"no run '{wanted}' in {home} ({known}); `posttrain run` prints the id of a run, and --home"
        " says where it was"
    )


def runs_of(home: Path) -> list[RunRecord]:
    """All runs of a home, the oldest first; those whose record cannot be read are left out."""
    found = []
    for path in (home / "runs").glob(f"*/{RECORD}"):
        with contextlib.suppress(RunError):
            found.append(_read(path.parent))
    return sorted(found, key=lambda run: (run.began, run.folder.stat().st_ctime_ns))


def _read(folder: Path) -> RunRecord:
    path = folder / RECORD
    try:
        row = read_json(path, _Row)
    except WrongContent as error:
        raise RunError(
            f"{path} is not the record that a run wrote ({error}): nothing can be read of this run"
        ) from error
    return RunRecord(
        row["run_id"],
        row["name"],
        folder,
        row["began"],
        row["stages"],
        row.get("config_sha256", ""),
        tuple(row.get("warnings", ())),
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Row(BaseModel):
    run_id: str
    name: str
    began: str
    stages: dict[str, str]
    config_sha256: str = ""
    warnings: list[str] = []
