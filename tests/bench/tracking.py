"""What tracking takes of a step's critical path, and how long runs stay usable; one JSON line.

First, steps with 100 metrics, a table of 64 samples made from a real batch, their evidence and, on
every tenth, two traces, on SQLite: the time until the caller has its thread back, and the processor
time of all threads. Then a run of `--steps` steps (10,000) and how long an MLflow server takes for
what its page of the run asks: the run itself, and the points of 20 charts, as many as one shows.

    python tests/bench/tracking.py [--steps 10000] [--keys 20]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

from posttrain.core.analysis.evidence import EvidenceKeeper, StepEvidence  # noqa: E402
from posttrain.core.batch import RolloutBatch  # noqa: E402
from posttrain.core.data.tokens import response_batch  # noqa: E402
from posttrain.core.tracking.metric_names import METRICS  # noqa: E402
from posttrain.core.tracking.mlflow_run import traced_responses  # noqa: E402
from posttrain.core.tracking.mlflow_store import prepare_database  # noqa: E402
from posttrain.core.tracking.mlflow_tracker import PipelineTracker  # noqa: E402
from posttrain.core.tracking.tables import sample_rows  # noqa: E402
from posttrain.core.types import Problem  # noqa: E402

NAMES = [name for name in METRICS if not name.startswith(("eval/", "rm/", "sft/"))][:100]
CHARTS = 20
PAUSE_S = 0.2  # a real step leaves the writers far more time than this


def open_tracker(home: Path) -> PipelineTracker:
    return PipelineTracker.start(
        uri=prepare_database(home),
        experiment="tracking",
        run_name="tracking",
        config_yaml="",
        params={},
        tags={},
        journal=home / "runs",
    )


def make_batch() -> RolloutBatch:
    """8 prompts of 40 tokens with 8 responses of 32 tokens each, scored."""
    problem = Problem("k", "What is 23+45? Answer with the number only.", "68", "23+45=68")
    batch = response_batch(
        prompts=[[5] * 40] * 64,
        responses=[torch.randint(5, 49000, (32,)).tolist() for _ in range(64)],
        group_ids=[row // 8 for row in range(64)],
        pad_token_id=0,
        problems=[problem] * 64,
        texts=["23 + 45 = 68, because 20 + 40 = 60 and 3 + 5 = 8"] * 64,
    )
    filled = batch.with_columns(
        advantages=torch.randn(batch.mask.shape),
        rewards=torch.rand(64),
        scored=torch.ones(64, dtype=torch.bool),
        acc=torch.rand(64),
        reward_components=torch.rand(64, 1),
        old_logprobs=-torch.rand(batch.mask.shape),
    )
    return replace(filled, transcripts=())


def critical_path(home: Path, steps: int) -> dict[str, float]:
    """Milliseconds a step's caller waits, by what is handed over."""
    tracker = open_tracker(home)
    stage, keeper = tracker.stage("rl", "rl", {}), EvidenceKeeper(home / "evidence", 256e6)
    batch, parts = make_batch(), ("metrics", "samples", "traces", "evidence")
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    known = {token: "word" for token in batch.response_ids.unique().tolist()}  # as tokenizers do
    nothing, spent = torch.zeros(batch.mask.shape), cpu_seconds()
    for step in range(1, steps + 1):
        marks = [time.perf_counter()]
        stage.log_step(step, {name: 0.5 + step for name in NAMES})
        marks.append(time.perf_counter())
        stage.log_table("samples", step, sample_rows(batch, ["accuracy"]))
        marks.append(time.perf_counter())
        if step == 1 or step % 10 == 0:  # as often as a run does
            stage.log_traces(traced_responses(batch, step, ["accuracy"], 2))
        marks.append(time.perf_counter())
        texts = {token: known[token] for token in batch.response_ids.unique().tolist()}
        evidence = StepEvidence(step, batch, nothing, nothing, torch.zeros(64), token_texts=texts)
        keeper.put(evidence)
        marks.append(time.perf_counter())
        for name, begin, end in zip(seconds, marks, marks[1:], strict=False):
            seconds[name].append(1000 * (end - begin))
        time.sleep(PAUSE_S)
    keeper.close()
    tracker.finish("FINISHED")
    total = [sum(values) for values in zip(*seconds.values(), strict=True)][2:]
    return {
        **{f"{name}_ms": round(statistics.median(v[2:]), 2) for name, v in seconds.items()},
        "traces_max_ms": round(max(seconds["traces"][2:]), 2),
        "median_ms": round(statistics.median(total), 2),
        "p90_ms": round(sorted(total)[int(0.9 * len(total))], 2),
        "cpu_ms_all_threads": round(1000 * (cpu_seconds() - spent) / steps, 1),
    }


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def long_run(home: Path, steps: int, keys: int) -> dict[str, float]:
    """Writes a long run, and asks a server for it."""
    tracker, names = open_tracker(home), NAMES[:keys]
    stage, began = tracker.stage("rl", "rl", {}), time.perf_counter()
    for step in range(1, steps + 1):
        stage.log_step(step, {name: 0.5 + step for name in names})
        if step % 500 == 0:
            stage.flush()
    tracker.finish("FINISHED")
    written = time.perf_counter() - began
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    server += ["--backend-store-uri", tracker.uri, "--workers", "1"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(server, stdout=log, stderr=log)
    try:
        wait_for(f"{address}/health", process)
        api = f"{address}/ajax-api/2.0/mlflow"
        ask(f"{api}/runs/get?run_id={stage.run_id}")  # the server's own start is not counted
        opened = ask(f"{api}/runs/get?run_id={stage.run_id}")
        bulk = f"{api}/metrics/get-history-bulk-interval?run_ids={stage.run_id}&max_results=320"
        charts = [
            ask(f"{bulk}&metric_key={urllib.parse.quote_plus(name)}") for name in names[:CHARTS]
        ]
    finally:
        process.terminate()
        process.wait(30)
    return {
        "steps": steps,
        "keys": keys,
        "written_ms_per_step": round(1000 * written / steps, 1),
        "database_mb": round((home / "mlflow" / "mlflow.db").stat().st_size / 1e6, 1),
        "open_run_s": round(opened, 3),
        "charts_s": round(sum(charts), 2),
        "slowest_chart_s": round(max(charts), 3),
    }


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(240):
        try:
            ask(address)
        except OSError:
            if process.poll() is not None:
                raise SystemExit("the MLflow server ended") from None
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the MLflow server did not answer")


def ask(address: str) -> float:
    """Seconds that an answer takes; `OSError` where there is none, or an error."""
    began = time.perf_counter()
    with urllib.request.urlopen(address, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000, help="of the long run")
    parser.add_argument("--keys", type=int, default=20, help="metrics of the long run")
    options = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "tracking"}
    with tempfile.TemporaryDirectory() as folder:
        found["critical_path"] = critical_path(Path(folder), steps=30)
    with tempfile.TemporaryDirectory() as folder:
        found["long_run"] = long_run(Path(folder), options.steps, options.keys)
    found["load"] = round(os.getloadavg()[0], 2)
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
