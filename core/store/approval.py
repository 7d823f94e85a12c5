"""What a gate asks a person, and what it keeps of the answer."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from posttrain.core.errors import DataError, PosttrainError
from posttrain.core.runtime.files import WrongContent, read_json, write_text

Given = Literal["terminal", "command line", "prefect", "timeout"]
ALL_GATES = "all"
"""The name under which one answer is for every gate of a run."""
APPROVAL_FILE = "approval.json"
MAX_REASON = 2000
"""Characters of a reason that are kept: MLflow limits tags."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A person's decision: who, when (ISO 8601, UTC), why, and by what way it was given."""

    approved: bool
    by: str
    reason: str
    at: str
    given: Given

    @classmethod
    def now(cls, approved: bool, by: str, reason: str, given: Given) -> Answer:
        return cls(approved, by, " ".join(reason.split())[:MAX_REASON], utc_now(), given)

    def described(self) -> str:
        """`approved by ada@host at 2026-01-02T03:04:05+00:00: reads well`."""
        verb = "approved" if self.approved else "rejected"
        why = f": {self.reason}" if self.reason else ""
        return f"{verb} by {self.by} at {self.at}{why}"


class ApprovalNeeded(PosttrainError):
    """A person has to answer before the run goes on; what was computed stays.

    `request` is what is asked, where the error was raised by a gate.
    """

    exit_code = 5
    status = "waiting"
    request: ApprovalRequest | None = None


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What is asked at the gate `stage`: `markdown` shows the evidence.

    `key` is the gate's identity: of this model, these evaluations, this question. `asked_at` is
    when it was first asked; `timeout_s` how long from then on an answer is waited for.
    """

    stage: str
    key: str
    question: str
    markdown: str
    asked_at: str
    timeout_s: float | None
    on_timeout: Literal["reject", "approve"]

    def expired(self) -> Answer | None:
        """The answer that no answer in time means; None while there is time."""
        if self.timeout_s is None:
            return None
        ends = datetime.fromisoformat(self.asked_at) + timedelta(seconds=self.timeout_s)
        if datetime.now(UTC) < ends:
            return None
        why = f"no answer within {self.timeout_s / 3600:g} h of {self.asked_at}"
        return Answer.now(self.on_timeout == "approve", "nobody", why, "timeout")

    def needed(self) -> ApprovalNeeded:
        """The error that ends a run which may not ask; it carries this request as `request`."""
        error = ApprovalNeeded(
            f"stage '{self.stage}' waits for approval: {self.question} Everything before it is kept"
        )
        error.request = self
        return error


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_person() -> str:
    """`user@host` of whoever runs this process; `POSTTRAIN_USER` goes before."""
    named = os.environ.get("POSTTRAIN_USER")
    if named:
        return named
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number that has no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def approvals(home: Path) -> Path:
    """Where a home keeps what its gates asked."""
    return home / "approvals"


def first_asked(folder: Path, stage: str, key: str) -> str:
    """When this was first asked; now, and kept, if it never was."""
    note = _read_note(folder, stage, key)
    if note is None:
        note = {"asked_at": utc_now()}
        _write_note(folder, stage, key, note)
    return str(note["asked_at"])


def kept_answer(folder: Path, stage: str, key: str) -> Answer | None:
    """The answer that was given while no process waited for it; None if none was."""
    note = _read_note(folder, stage, key)
    given = None if note is None else note.get("answer")
    return None if given is None else Answer(**given)


def keep_answer(folder: Path, stage: str, key: str, answer: Answer) -> None:
    """Keep it until the gate's stage, which is what it is for, has it in its artifact."""
    asked = first_asked(folder, stage, key)
    _write_note(folder, stage, key, {"asked_at": asked, "answer": asdict(answer)})


class _Answer(BaseModel):
    approved: bool
    by: str
    reason: str
    at: str
    given: Given


class _OnlyAnswer(_Answer):
    model_config = ConfigDict(extra="forbid")


class _Note(BaseModel):
    asked_at: str
    answer: _OnlyAnswer | None = None


def _note_path(folder: Path, stage: str, key: str) -> Path:
    return folder / f"{stage}-{key}.json"


def _read_note(folder: Path, stage: str, key: str) -> dict[str, Any] | None:  # Any: JSON
    path = _note_path(folder, stage, key)
    if not path.exists():
        return None
    try:
        note: dict[str, Any] = read_json(path, _Note)
        datetime.fromisoformat(note["asked_at"])
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}): remove it, and the gate asks again"
        ) from error
    return note


def _write_note(folder: Path, stage: str, key: str, note: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(_note_path(folder, stage, key), json.dumps(note))


def read_answer(folder: Path) -> Answer:
    try:
        values = read_json(folder / APPROVAL_FILE, _Answer)
    except WrongContent as error:
        raise DataError(
            f"{folder / APPROVAL_FILE} is not the answer of a gate ({error}): remove "
            f"{folder.parent}, and the gate asks again"
        ) from error
    return Answer(**{name: values[name] for name in Answer.__dataclass_fields__})


def write_answer(folder: Path, answer: Answer, evidence: dict[str, object]) -> Path:
    path = folder / APPROVAL_FILE
    path.write_text(json.dumps(asdict(answer) | evidence, indent=2))
    return path
