"""A Prefect server that does not answer changes nothing about what a flow's body did."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import prefect.context
import pytest
from prefect.exceptions import CancelledRun, ObjectNotFound

from posttrain.core.errors import RunError
from posttrain.pipelines.rl import prefect_away
from posttrain.pipelines.rl.prefect_away import Body, call_flow, was_away
from posttrain.pipelines.run import flow

REFUSED = httpx.ConnectError("All connection attempts failed")


def answered(status: int) -> httpx.HTTPStatusError:
    """What Prefect's client raises for an answer with this status."""
    response = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1/api/x"))
    try:
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        return error
    raise AssertionError(status)


def deleted() -> ObjectNotFound:
    """What it raises where somebody has deleted the run."""
    error = ObjectNotFound(answered(404))
    error.__cause__ = error.http_exc
    return error


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prefect_away, "_reported", [])
    before = prefect.context.GLOBAL_SETTINGS_CONTEXT
    yield
    prefect.context.GLOBAL_SETTINGS_CONTEXT = before


class Lost:
    """A flow whose requests fail before its body, or after it."""

    def __init__(self, body: Body, when: str, error: BaseException | None, lost: Exception) -> None:
        self.body, self.when, self.error, self.lost = body, when, error, lost
        self.calls = 0

    def fn(self) -> None:
        with self.body.running():
            self.calls += 1
            if self.error is not None:
                raise self.error

    def __call__(self) -> None:
        if self.when == "before":
            raise self.lost
        try:
            self.fn()
        except BaseException:
            raise self.lost from None
        if self.when == "after":
            raise self.lost


def _called(
    when: str,
    error: BaseException | None = None,
    *,
    lost: Exception = REFUSED,
    optional: bool = True,
) -> Any:
    body = Body()
    made = Lost(body, when, error, lost)
    call_flow(made, body, optional=optional)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("lost", [REFUSED, answered(503), answered(401), answered(429), deleted()])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_body_runs_once(when: str, lost: Exception) -> None:
    assert _called(when, lost=lost).calls == 1
    assert was_away()


def test_what_a_proxy_answers_in_place_of_the_server_changes_nothing_that_was_done() -> None:
    assert _called("after", lost=json.JSONDecodeError("Expecting value", "<html>", 0)).calls == 1
    assert was_away()


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (REFUSED, "does not answer (All connection attempts failed)"),
        (answered(502), "does not answer (Server error '502 Bad Gateway'"),
        (answered(401), "refuses what the run reports (Client error '401 Unauthorized'"),
        (deleted(), "refuses what the run reports (Client error '404 Not Found'"),
    ],
)
def test_the_reason_is_said_once(
    lost: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        _called("after", lost=lost)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"Prefect's server {said}")


def test_the_state_that_the_body_returned_is_raised() -> None:
    with pytest.raises(CancelledRun):
        _called("after", lost=CancelledRun("waits for an answer"))
    assert not was_away()


def test_a_flow_that_must_be_known_does_not_begin() -> None:
    with pytest.raises(httpx.ConnectError):
        _called("before", optional=False)


@pytest.mark.parametrize("error", [RunError("the loss is NaN"), KeyboardInterrupt()])
def test_the_error_of_the_body_is_raised(error: BaseException) -> None:
    for lost in (REFUSED, deleted()):
        with pytest.raises(type(error)) as found:
            _called("after", error, lost=lost)
        assert found.value is error


def test_what_is_not_prefect_s_is_raised() -> None:
    def broken() -> None:
        raise ValueError("a")

    with pytest.raises(ValueError, match="a"):
        call_flow(broken, Body(), optional=True)  # type: ignore[arg-type]
    assert not was_away()


def test_an_error_of_the_body_keeps_what_is_behind_it() -> None:
    def failed() -> None:
        with body.running():
            raise error from answered(401)

    body, error = Body(), RunError("the judge refuses")
    with pytest.raises(RunError) as found:
        call_flow(failed, body, optional=True)  # type: ignore[arg-type]
    assert found.value is error and isinstance(error.__cause__, httpx.HTTPStatusError)
    assert not was_away()


def test_a_stage_needs_no_tag_that_the_server_does_not_give_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Client(contextlib.nullcontext[Any]):
        def __enter__(self) -> Any:
            return self

        def read_concurrency_limit_by_tag(self, tag: str) -> None:
            raise answered(401)

    monkeypatch.setattr(flow, "get_client", lambda sync_client: Client())
    assert flow.device_tags("cpu") == []
    assert was_away()
