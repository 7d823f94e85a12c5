"""Prefect's limit on how many stages run on a kind of device at the same time."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from posttrain.pipelines.prefect_server import own_server_runs


def device_tags(device: str) -> list[str]:
    """`posttrain-cpu` or `posttrain-cuda`, which a stage's task takes: a limit can be on it.

    With a server of the run's own only where there is such a limit. Prefect asks its server for a
    slot for each task with a tag; on SQLite the answer was 503 while the end of the stage before
    was stored, and Prefect's client asks again after 2 s.
    """
    tag = f"posttrain-{device}"
    if not own_server_runs():
        return [tag]
    with get_client(sync_client=True) as client:
        try:
            client.read_concurrency_limit_by_tag(tag)
        except ObjectNotFound:
            return []
    return [tag]
