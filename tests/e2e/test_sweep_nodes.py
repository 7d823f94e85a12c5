"""`posttrain sweep --ray`: branches on two nodes of a real Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.test_sweep import VARIANTS, begun, record_of, sweep_config, wait_until
from tests.helpers.cluster import Cluster, running_cluster
from tests.helpers.pipeline import (
    environment,
    prepared,
    run_command,
    start_command,
    write_config,
)
from tests.helpers.sweeps import made

pytestmark = [
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'posttrain[ray]'"
    ),
]


@pytest.mark.slow
def test_nodes_make_what_one_process_makes_and_shared_stages_run_once(tmp_path: Path) -> None:
    path = sweep_config(tmp_path, VARIANTS, evaluate_every=0)
    home, local = prepared(tmp_path / "there"), prepared(tmp_path / "here")
    with running_cluster(tmp_path / "cluster") as cluster:
        where = ("--ray", cluster.address, "--home", str(home), "--json")
        done = run_command("sweep", str(path), *where, variables=cluster.variables)
        assert done.code == 0 and "Traceback" not in done.text, done.text
        again = called(path, home, cluster)
    assert again == sorted([r["variant"], r["seed"], r["run_id"]] for r in done.result["runs"])
    runs = {(run["variant"], run["seed"]): run for run in done.result["runs"]}
    computed = Counter(stage for run in runs.values() for stage in run["computed"])
    assert (computed["sft"], computed["rl"]) == (2, 4)  # SFT once a seed
    one = run_command("sweep", str(path), "--home", str(local), "--json", "--seeds", "1")
    assert one.code == 0, one.text
    for run in one.result["runs"]:
        there = runs[run["variant"], run["seed"]]["run_id"]
        assert made(home, there) == made(local, run["run_id"])


def called(path: Path, home: Path, cluster: Cluster) -> list[list[object]]:
    """The same sweep from Python: variant, seed and id of the runs that its report has."""
    program = (
        "import json, sys, posttrain\n"
        "report = posttrain.sweep(sys.argv[1], home=sys.argv[2], ray=sys.argv[3], progress=False)\n"
        "runs = report.values['runs']\n"
        "found = sorted([run['variant'], run['seed'], run['run_id']] for run in runs)\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(home), cluster.address],
        env=environment() | dict(cluster.variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_branches_whose_ranks_are_on_the_same_cluster(tmp_path: Path) -> None:
    """`--ray config`: the section `cluster` names it, and has the branches' learners too."""
    path = sweep_config(tmp_path, VARIANTS | {"seeds": [0]}, evaluate_every=0)
    home, local = prepared(tmp_path / "there"), prepared(tmp_path / "here")
    with running_cluster(tmp_path / "cluster") as cluster:
        made_of = yaml.safe_load(path.read_text())
        made_of["cluster"] = {"ray": {"address": cluster.address}}
        there = write_config(tmp_path / "there.yaml", made_of)
        command = ("sweep", str(there), "--ray", "config", "--home", str(home), "--json")
        done = run_command(*command, variables=cluster.variables)
        assert done.code == 0 and "Traceback" not in done.text, done.text
        assert not branches(cluster.processes())
    one = run_command("sweep", str(path), "--home", str(local), "--json")
    assert one.code == 0, one.text
    for ours, wanted in zip(done.result["runs"], one.result["runs"], strict=True):
        assert (ours["variant"], ours["value"]) == (wanted["variant"], wanted["value"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_an_interrupted_sweep_leaves_nothing_on_the_nodes_and_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = sweep_config(tmp_path, VARIANTS | {"seeds": [0]}, steps=8, checkpoint_every=1)
    home = prepared(tmp_path / "home")
    with running_cluster(tmp_path / "cluster") as cluster:
        command = ("sweep", str(path), "--ray", cluster.address, "--home", str(home))
        process = start_command(*command, "--parallel", "1", "--plain", variables=cluster.variables)
        wait_until(begun(home), process)
        workers = branches(cluster.processes())
        assert workers
        os.kill(process.pid, number)
        assert process.wait(timeout=90) == (-9 if number == signal.SIGKILL else 130)
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
        first = next(iter(record_of(home).branches.values()))
        again = run_command(*command, "--json", variables=cluster.variables)
        assert again.code == 0, again.text
        assert again.result["runs"][0]["run_id"] == first.run_id
        assert not branches(cluster.processes())


@pytest.mark.slow
def test_a_node_that_is_lost_fails_its_branch_and_no_other(tmp_path: Path) -> None:
    variants = VARIANTS | {"seeds": [0, 1]}
    path = sweep_config(tmp_path, variants, steps=8, checkpoint_every=1)
    home = prepared(tmp_path / "home")
    with running_cluster(tmp_path / "cluster") as cluster:
        command = ("sweep", str(path), "--ray", cluster.address, "--home", str(home))
        more = run_command(*command, "--parallel", "3", variables=cluster.variables)
        assert more.code == 4 and "room for 2 branches with 1 CPU each" in more.text
        process = start_command(*command, "--json", variables=cluster.variables)

        def both_at_work() -> bool:
            try:
                found = record_of(home).branches.values()
            except OSError:
                return False
            return sum(one.status == "running" and 1 in one.right for one in found) > 1

        wait_until(both_at_work, process)
        cluster.end_node(1)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 1, out
        failed = [b for b in record_of(home).branches.values() if b.status == "failed"]
        assert len(failed) == 1 and "was lost" in failed[0].reason, failed
        again = run_command(*command, "--parallel", "1", "--json", variables=cluster.variables)
        assert again.code == 0, again.text


def branches(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run branches."""
    return [p for p in processes if "posttrain.pipelines.sweep.worker" in " ".join(p.cmdline())]
