"""A run whose learner is on the nodes of a Ray cluster is the run of this machine, and lives on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from posttrain.core.runtime.processes import free_ports
from tests.helpers.cluster import (
    RANKS,
    Cluster,
    ended,
    rl_config,
    run_here,
    running_cluster,
    trained,
    weights,
)
from tests.helpers.pipeline import (
    prepared,
    run_command,
)

pytestmark = [
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'posttrain[ray]'"
    ),
]

STEPS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster") / "home") as cluster:
        yield cluster
        status = cluster.change("status")
        assert status.result["up"], status.text


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rl_config(tmp_path_factory.mktemp("config"), STEPS)


@pytest.fixture(scope="module")
def local(config: Path) -> dict[str, Any]:
    """The result of the same run with two ranks of this machine."""
    return run_here(config)


@pytest.mark.slow
def test_two_nodes_make_the_weights_of_one_machine(
    cluster: Cluster, config: Path, local: dict[str, Any], tmp_path: Path
) -> None:
    done = cluster.run(config, tmp_path / "home")
    assert done.code == 0, done.text
    assert done.result["stages"]["rl"]["status"] == "ran"
    assert weights(done.result) == weights(local)
    again = run_command("run", str(config), *RANKS, "--home", str(tmp_path / "home"), "--json")
    assert again.result["stages"]["rl"]["status"] == "cached", "where ranks ran changes nothing"


@pytest.mark.slow
def test_plan_and_doctor_show_the_nodes_and_whether_ranks_fit(
    cluster: Cluster, config: Path
) -> None:
    where = ("--home", str(cluster.home), "--no-calibration", "--json")
    plan = run_command("plan", str(config), *cluster.given, *where)
    assert plan.result["cluster"].endswith("2 ranks of 1 CPU each: they fit"), plan.text
    three = ("--set", "limits.learner_ranks=3", "--set", "cluster.learner.min_ranks=3")
    plan = run_command("plan", str(config), *cluster.given, *three, *where)
    assert "only 2 fit: the run would end" in plan.result["cluster"], plan.text
    doctor = run_command("doctor", "--home", str(cluster.home), "--json")
    (found,) = [f for f in doctor.result["findings"] if f["name"] == "cluster"]
    assert found["status"] == "ok" and found["detail"].count("1 CPUs") == 2
    few = ("--set", "cluster.learner.min_ranks=3")
    refused = run_command("validate", str(config), *cluster.given, *few)
    assert refused.code == 2 and "expected at most limits.learner_ranks (2)" in refused.text
    uneven = ("--set", "cluster.learner.shard_size=3")
    refused = run_command("validate", str(config), *cluster.given, *uneven)
    assert refused.code == 2 and "a divisor of limits.learner_ranks (2)" in refused.text


@pytest.mark.slow
def test_a_copy_of_the_weights_on_each_node_makes_the_same_ones(
    cluster: Cluster, config: Path, local: dict[str, Any], tmp_path: Path
) -> None:
    done = cluster.run(config, tmp_path / "home", "--set", "cluster.learner.shard_size=1")
    assert done.code == 0, done.text
    paths = [Path(trained(result)["uri"]) for result in (done.result, local)]
    model, wanted = (load_file(path / "model.safetensors") for path in paths)
    for name, weight in wanted.items():  # the gradient's norm is summed in another order
        torch.testing.assert_close(model[name], weight, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_one_rank_on_a_node_makes_the_weights_of_one_process(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    # What sampling computed is not there in another process.
    alone = ("--set", "limits.learner_ranks=1", "--set", "stages.rl.reuse_outputs=false")
    home = prepared(tmp_path / "alone")
    local = run_command("run", str(config), *alone, "--home", str(home), "--json")
    done = cluster.run(config, tmp_path / "home", *alone)
    assert local.code == done.code == 0, done.text
    assert weights(done.result) == weights(local.result)
    again = ("replay", done.result["run_id"], "--step", "2", "--home", str(tmp_path / "home"))
    replayed = run_command(*again, "--json")
    assert replayed.code == 0 and replayed.result["equal"], replayed.text


@pytest.mark.slow  # in CI: contract/test_cluster_kills.py
def test_a_run_goes_on_after_a_rank_was_killed(
    cluster: Cluster, config: Path, local: dict[str, Any], tmp_path: Path
) -> None:
    process = cluster.start(config, tmp_path / "home")
    ranks = cluster.actors()
    assert len(ranks) == 2
    ranks[1].kill()
    result = ended(process).result
    assert result["status"] == "completed", result
    assert any("a rank of the learner is gone" in text for text in result["warnings"]), result
    assert result["stages"]["rl"]["status"] == "resumed"
    assert weights(result) == weights(local), "nothing of the lost step is left"


@pytest.mark.slow
def test_ranks_end_with_a_run_that_is_killed(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    process = cluster.start(config, tmp_path / "home")
    ranks = cluster.actors()
    assert len(ranks) == 2
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


@pytest.mark.slow
def test_ranks_for_which_there_is_no_room_are_one_sentence(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    more = (
        "limits.learner_ranks=3",
        "cluster.learner.min_ranks=3",
        "cluster.ray.start_timeout_s=3",
    )
    done = cluster.run(config, tmp_path / "home", *(x for one in more for x in ("--set", one)))
    assert done.code == 4, done.text
    assert "no room for 3 ranks with 1 CPU each within 3 s" in done.text
    assert "Traceback" not in done.text


@pytest.mark.slow
def test_a_cluster_that_is_not_there_or_not_ours_is_one_sentence(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    away = ("--set", f"cluster.ray.address=127.0.0.1:{port}")
    done = cluster.run(config, tmp_path / "home", *away)
    assert done.code == 4 and f"no Ray cluster answers at 127.0.0.1:{port}" in done.text, done.text
    stranger = replace(cluster, home=tmp_path)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "token").write_text("0" * 64)
    done = stranger.run(config, tmp_path / "other")
    assert done.code == 4 and "cannot be joined" in done.text, done.text
    assert "Traceback" not in done.text


@pytest.mark.slow
def test_a_run_goes_on_with_one_rank_after_a_node_was_lost(
    cluster: Cluster, config: Path, tmp_path: Path
) -> None:
    process = cluster.start(config, tmp_path / "home")
    cluster.end_node(1)
    result = ended(process).result
    assert result["status"] == "completed", result
    assert result["stages"]["rl"]["status"] == "resumed"
    assert any("1 rank, not 2" in text for text in result["warnings"]), result["warnings"]
    assert not cluster.change("status").result["up"]
    cluster.up()
    assert cluster.change("status").result["up"], "the node that ended runs again"
