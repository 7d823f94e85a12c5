"""Messages of a flow run to its sweep, through a real Prefect server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from posttrain.pipelines.deploy import branch_flow
from posttrain.pipelines.deploy.branch_flow import PREFIX, Mailbox


@flow
def nothing() -> None:
    """A flow, for a run to belong to."""


@pytest.fixture
def run_id(prefect_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[UUID]:
    """A flow run on the server; its messages are signs of life twice a second."""
    for name, seconds in (("SEND_S", 0.1), ("SIGN_S", 0.5), ("UNREAD_S", 3.0)):
        monkeypatch.setattr(branch_flow, name, seconds)
    with (
        temporary_settings({PREFECT_API_URL: prefect_url}),
        get_client(sync_client=True) as client,
    ):
        yield client.create_flow_run(nothing, state=Running()).id


def read(run_id: UUID) -> list[dict[str, Any]]:
    """The messages that are there, which are there no more then."""
    found: list[dict[str, Any]] = []
    with get_client(sync_client=True) as client:
        items = client.filter_flow_run_input(run_id, PREFIX, 50, set())
        for item in sorted(items, key=lambda one: one.key):
            found += json.loads(item.value)
            client.delete_flow_run_input(run_id, item.key)
    return found


def test_messages_arrive_in_order_and_of_steps_that_wait_the_last(run_id: UUID) -> None:
    stop = threading.Event()
    with Mailbox(run_id, stop) as mailbox:
        mailbox.send("opened", run_id="r")
        mailbox.send("step", step=1)
        mailbox.send("step", step=2)
        mailbox.send("ended", status="finished")
    found = [(one["event"], one.get("step")) for one in read(run_id)]
    assert found == [("opened", None), ("step", 2), ("ended", None)]
    assert not stop.is_set()


@pytest.mark.slow
def test_a_run_whose_messages_are_read_goes_on_and_another_is_stopped(run_id: UUID) -> None:
    stop = threading.Event()
    with Mailbox(run_id, stop) as mailbox:
        until = time.monotonic() + 6
        while time.monotonic() < until:
            read(run_id)
            time.sleep(0.2)
        assert not stop.is_set(), "the sweep has read all"
        assert stop.wait(20), "nobody reads any more"
    assert mailbox.is_unread


def test_a_run_that_was_deleted_is_stopped(run_id: UUID) -> None:
    stop = threading.Event()
    with Mailbox(run_id, stop) as mailbox:
        with get_client(sync_client=True) as client:
            client.delete_flow_run(run_id)
        assert stop.wait(20)
    assert mailbox.is_unread
