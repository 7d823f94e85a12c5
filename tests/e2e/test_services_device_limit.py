"""Prefect's limit on a device's tag: the stages of two runs take turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.pipeline import tiny_config, write_config
from tests.helpers.services import Services

TAG = "posttrain-cpu"


@pytest.fixture
def one_at_a_time(services: Services) -> Iterator[None]:
    """What `prefect concurrency-limit create posttrain-cpu 1` does."""
    limit = {"tag": TAG, "concurrency_limit": 1}
    services.ask("POST", "/concurrency_limits/", limit)
    try:
        yield
    finally:
        services.ask("DELETE", f"/concurrency_limits/tag/{TAG}")


def stage_runs(services: Services, flow_run_id: str) -> list[dict[str, Any]]:
    """The task runs of a flow run's stages."""
    wanted = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
    found = services.ask("POST", "/task_runs/filter", wanted)
    return [run for run in found if TAG in run["tags"]]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("one_at_a_time")
def test_stages_of_two_runs_take_turns_under_a_limit_of_one(
    services: Services, tmp_path: Path
) -> None:
    made = tiny_config(make_tiny_model(tmp_path / "model"))
    sft = made["stages"]["sft"] | {"steps": 600}
    config = write_config(tmp_path / "run.yaml", made | {"stages": {"sft": sft}})
    started = [
        services.start(
            *("run", str(config), "--home", str(tmp_path / f"home-{seed}"), "--json"),
            *("--set", f"seed={seed}"),
        )
        for seed in (1, 2)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text
    flows = [json.loads(text.strip().splitlines()[-1])["prefect_flow_run_id"] for text in said]
    first, second = sorted(
        (run for flow in flows for run in stage_runs(services, flow)),
        key=lambda run: run["start_time"],
    )
    assert first["end_time"] <= second["start_time"]
    states = services.ask("GET", f"/task_run_states/?task_run_id={second['id']}")
    ready = min(state["timestamp"] for state in states)
    assert ready < first["end_time"], "it would have run next to the first"
