"""What Prefect's pages show of a run, where its server does not answer."""

from __future__ import annotations

import uuid

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from posttrain.core.runtime.processes import free_ports
from posttrain.pipelines.run import flow_records
from posttrain.pipelines.run.flow_records import FlowProgress, tag_flow_run


def test_a_server_that_is_gone_is_told_of_once_a_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flow_records, "PROGRESS_EVERY_S", 0.0)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_ports(1)[0]}/api"}):
        tag_flow_run(str(uuid.uuid4()), ["a"])
        progress = FlowProgress()
        progress.stage_started("never_there", "rl", 4)
        progress.stage_started("lost", "rl", 4)
        progress._bars["lost"] = uuid.uuid4()  # made while the server was there
        for step in (1, 2):
            progress.step_done("never_there", step, {})
            progress.step_done("lost", step, {})
        progress.stage_finished("lost", "ran", 1.0, {})
    reported = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert [text for text in reported if "pages lack" in text] == [
        "Prefect's pages lack the run's tags",
        "Prefect's pages lack the bar of stage 'never_there'",
        "Prefect's pages lack the bar of stage 'lost'",
        "Prefect's pages lack the progress of stage 'lost' (step 1 of 4)",
    ]
