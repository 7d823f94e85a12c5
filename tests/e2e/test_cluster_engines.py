"""A run whose vLLM servers and ranks are on two nodes, with a server killed at work.

Slow: vLLM starts three times. tests/contract/test_server_replicas.py and test_cluster_weights.py
have the same with servers that start in a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from posttrain.core.kit.tiny import make_tiny_model
from tests.helpers.cluster import Cluster, running_cluster
from tests.helpers.pipeline import (
    prepared,
    run_command,
    start_command,
    tiny_config,
    wait_for_step,
    write_config,
)

pytestmark = [
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("ray") is None or find_spec("vllm") is None,
        reason="Ray or vLLM is not installed (posttrain[ray], posttrain[vllm])",
    ),
]
STEPS = 60
SERVERS = ("--set", "cluster.engines.replicas=2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    made = tiny_config(make_tiny_model(folder / "model"))
    rl = made["stages"]["rl"] | {
        "inputs": {"model": "base"},
        "rewards": ["accuracy"],
        "steps": STEPS,
        "checkpoint_every": 20,
        "evaluate_every": 0,
    }
    engine = {"name": "vllm_server", "kv_cache_gb": 0.25}
    return write_config(folder / "run.yaml", made | {"stages": {"rl": rl}, "engine": engine})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("engine=transformers",), "engine is transformers: set engine: vllm_server"),
        (("engine=auto",), "engine is auto: set engine: vllm_server"),
        (("engine.urls=[http://a:1]",), "engine.urls is set: remove one of them"),
    ],
)
def test_servers_of_another_engine_or_from_two_places_are_refused(
    config: Path, options: tuple[str, ...], message: str
) -> None:
    given = (*SERVERS, *(x for option in options for x in ("--set", option)))
    done = run_command("validate", str(config), *given)
    assert done.code == 2 and message in " ".join(done.text.split()), done.text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "home", cpus=2) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_with_its_servers_on_nodes_goes_on_when_one_is_killed(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    where = ("--home", str(cluster.home), "--no-calibration", "--json")
    for count, verdict in (
        (2, "2 servers of 1 CPU each: they fit; 2 ranks of 1 CPU each: they fit"),
        (
            3,
            "2 ranks of 1 CPU each: only 1 fit, with which stages go on",
        ),
        (5, "5 servers of 1 CPU each: only 4 fit: the run would end after"),
    ):
        many = ("--set", f"cluster.engines.replicas={count}")
        plan = run_command("plan", str(config), *cluster.given, *many, *where)
        assert verdict in plan.result["cluster"], plan.text

    home = prepared(tmp_path / "home")
    given = (*cluster.given, *SERVERS, "--home", str(home), "--json")
    process = start_command("run", str(config), *given, variables=cluster.variables)
    wait_for_step(home, 3, process, seconds=600)
    servers = vllm_servers(config)
    assert len(servers) == 2
    assert all(
        connection.laddr.ip == "127.0.0.1"
        for server in servers
        for connection in server.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ), "no port is open to a network"
    servers[0].kill()
    text, _ = process.communicate(timeout=600)
    result = json.loads(text.strip().splitlines()[-1])
    assert result["status"] == "completed", text
    assert "is lost" in text, text
    metrics = result["stages"]["rl"]["metrics"]
    assert metrics["mismatch/abs_mean"] < 1e-3, "servers answer with the weights of the ranks"
    assert metrics["staleness/max"] == 0.0
    end = time.monotonic() + 30
    while vllm_servers(config) and time.monotonic() < end:
        time.sleep(0.5)
    assert not vllm_servers(config), "they end with the run"


def vllm_servers(config: Path) -> list[psutil.Process]:
    """Processes of vLLM that serve the config's model, without their guards."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(config.parent) in " ".join(command) and "-c" in command[:2]:
            found.append(process)
    return found
