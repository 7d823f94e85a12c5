"""Answers of gates: beforehand, in time or not, and for which stage."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.store.approval import (
    Answer,
    ApprovalRequest,
    first_asked,
    read_answer,
    this_person,
    utc_now,
    write_answer,
)
from posttrain.pipelines.api.calls import given_answers
from posttrain.pipelines.cli.run import answering_command
from posttrain.pipelines.run.gates import Gates

YES = Answer(True, "ada@host", "fine", "2026-01-01T00:00:00+00:00", "command line")


def request(hours_ago: float, timeout_s: float | None, on_timeout: str) -> ApprovalRequest:
    asked = (datetime.now(UTC) - timedelta(hours=hours_ago)).isoformat(timespec="seconds")
    return ApprovalRequest("gate", "k", "Go on?", "page", asked, timeout_s, on_timeout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hours_ago", "timeout_s", "on_timeout", "approved"),
    [
        (1.0, 7200.0, "reject", None),
        (3.0, 7200.0, "reject", False),
        (3.0, 7200.0, "approve", True),
        (9e4, None, "reject", None),
    ],
)
def test_no_answer_in_time_is_the_answer_that_the_config_says(
    hours_ago: float, timeout_s: float | None, on_timeout: str, approved: bool | None
) -> None:
    answer = request(hours_ago, timeout_s, on_timeout).expired()
    assert (None if answer is None else answer.approved) is approved
    if answer is not None:
        assert answer.given == "timeout" and answer.by == "nobody" and "2 h" in answer.reason


def test_the_error_carries_the_request_across_processes() -> None:
    needed = pickle.loads(pickle.dumps(request(0, None, "reject").needed()))  # noqa: S301 - ours
    assert needed.exit_code == 5 and needed.request.stage == "gate"
    assert "'gate' waits for approval" in str(needed)


def test_an_answer_is_read_back_as_it_was_given(tmp_path: Path) -> None:
    write_answer(tmp_path, YES, {"model_digest": "ab"})
    assert read_answer(tmp_path) == YES
    assert json.loads((tmp_path / "approval.json").read_text())["model_digest"] == "ab"


def test_a_gate_is_asked_once_and_a_damaged_note_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "gate-k.json").write_text('{"asked_at": "2026-01-01T00:00:00+00:00"}')
    assert first_asked(tmp_path, "gate", "k") == "2026-01-01T00:00:00+00:00"
    fresh = first_asked(tmp_path, "gate", "other")
    assert first_asked(tmp_path, "gate", "other") == fresh <= utc_now()
    (tmp_path / "gate-k.json").write_text("{")
    with pytest.raises(DataError, match=r"gate-k.json is damaged .*: remove it"):
        first_asked(tmp_path, "gate", "k")


def test_only_an_answer_for_this_very_gate_changes_one_that_was_kept(tmp_path: Path) -> None:
    no = Answer(False, "bob", "", utc_now(), "terminal")
    assert Gates(tmp_path, {"gate": YES}).overrides("gate", no)
    assert not Gates(tmp_path, {"all": YES}).overrides("gate", no)
    assert not Gates(tmp_path, {"gate": YES}).overrides("gate", YES)


def test_answers_of_the_command_line() -> None:
    found = given_answers(["a", "b"], ["c"], " because\n so ")
    assert {name: answer.approved for name, answer in found.items()} == {
        "a": True,
        "b": True,
        "c": False,
    }
    assert found["a"].reason == "because so" and found["a"].by == this_person()
    with pytest.raises(ConfigError, match="both name 'a'"):
        given_answers(["a"], ["a"], "")
    with pytest.raises(ConfigError, match="add --approve STAGE"):
        given_answers(None, None, "why")


def test_who_answers_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_USER", "ada")
    assert this_person() == "ada"


def test_the_command_that_answers_is_quoted_for_a_shell() -> None:
    reported = answering_command(
        [Path("my run.yaml")], ["task={name: a}"], Path("/h"), None, "gate"
    )
    assert reported["reject"] == (
        "posttrain run 'my run.yaml' --set 'task={name: a}' --home /h --reject gate --reason ..."
    )
    shared = answering_command([Path("a.yaml")], None, Path("/h"), "/s", "gate")
    assert "--home /h --store /s --approve gate" in shared["approve"]
