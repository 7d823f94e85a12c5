"""Requests to servers that fail, weight files, and processes that must not outlive their owner.

The servers here are stand-ins that answer as reported: what is tested is what becomes of requests.
Real vLLM servers are killed at work in tests/contract/test_engines.py.
Over 300 lines because one stand-in server serves every way of failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from posttrain.core.cluster.servers import HttpServer, loopback_command
from posttrain.core.errors import ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.rollout.replicas import (
    MAX_FAILURES_IN_A_ROW,
    Limits,
    LoopThread,
    Replica,
    serve_all,
    wait_until_ready,
)
from posttrain.core.rollout.vllm_model import count_loaded
from posttrain.core.rollout.vllm_server import (
    ServerOptions,
    read_completion,
    read_scores,
    server_arguments,
    server_variables,
)
from posttrain.core.rollout.weight_sync import digest_of, write_weights
from posttrain.core.runtime.processes import ServerProcess, free_ports
from posttrain.core.types import SamplingParams
from posttrain.plugins.engines.vllm_server import VllmServerConfig, VllmServerEngine
from tests.helpers.engines import make_setup
from tests.helpers.listener import Listener

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


class StandIn:
    """A server on loopback that answers POST with `answer(body)` and /health with `health`."""

    def __init__(self, answer: Answer, health: int = 200) -> None:
        self.seen: list[dict[str, Any]] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(health if self.path == "/health" else 404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.seen.append(body)
                with contextlib.suppress(ConnectionError):
                    self.reply(*answer(body))

            def reply(self, code: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Location", "/elsewhere")  # means something with a 3xx
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = Listener(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.replica: Replica

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def stand_ins(loop: LoopThread, *servers: StandIn) -> Iterator[list[Replica]]:
    for server in servers:
        server.replica = Replica(HttpServer(server.url, loop.client))
    try:
        yield [server.replica for server in servers]
    finally:
        for server in servers:
            server.close()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread(timeout_s=1.0, connections=64)
    yield thread
    thread.close()


def echo(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    time.sleep(0.01)
    return 200, {"seed": body["seed"]}


REQUESTS = [{"seed": index} for index in range(40)]
LIMITS = Limits(max_concurrency=4, max_retries=2)


def serve(loop: LoopThread, replicas: list[Replica], limits: Limits = LIMITS) -> list[int]:
    answers = loop.run(serve_all(replicas, "/v1/completions", REQUESTS, limits))
    return [answer["seed"] for answer in answers]


# --- requests -----------------------------------------------------------------------------------


def test_answers_come_in_order_and_the_load_is_shared_within_the_limit(loop: LoopThread) -> None:
    busy, most, lock = [0, 0], [0, 0], threading.Lock()

    def answer(which: int) -> Answer:
        def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            with lock:
                busy[which] += 1
                most[which] = max(most[which], busy[which])
            time.sleep(0.02)
            with lock:
                busy[which] -= 1
            return 200, {"seed": body["seed"]}

        return reply

    one, two = StandIn(answer(0)), StandIn(answer(1))
    with stand_ins(loop, one, two) as replicas:
        assert serve(loop, replicas) == list(range(40))
    assert 10 <= len(one.seen) <= 30
    assert len(one.seen) + len(two.seen) == 40
    assert max(most) <= 4


def test_a_request_goes_to_the_server_with_the_least_in_flight() -> None:
    # None is answered before all are out, so that nothing but the load can share them out.
    all_out = threading.Barrier(40)

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        all_out.wait(timeout=60)
        return 200, body

    servers = [StandIn(reply) for _ in range(2)]
    patient = contextlib.closing(LoopThread(timeout_s=60.0, connections=64))
    with patient as loop, stand_ins(loop, *servers) as replicas:
        # Room for all at either.
        serve(loop, replicas, Limits(max_concurrency=40, max_retries=2))
    assert [len(server.seen) for server in servers] == [20, 20]


def test_what_a_failing_server_was_asked_comes_from_the_other_exactly_once(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = StandIn(lambda _: (500, {"error": "engine dead"})), StandIn(echo)
    with stand_ins(loop, bad, good) as replicas:
        # One retry is enough, as it goes to the other server however free the bad one is.
        assert serve(loop, replicas, Limits(max_concurrency=4, max_retries=1)) == list(range(40))
    # It says it is healthy, so it is asked a few times more before it is given up.
    assert MAX_FAILURES_IN_A_ROW <= len(bad.seen) <= MAX_FAILURES_IN_A_ROW + 4
    assert sorted(body["seed"] for body in good.seen) == list(range(40))
    assert not bad.replica.alive
    assert "it answered 500" in caplog.text


def test_a_server_that_hangs_is_left_after_the_timeout(loop: LoopThread) -> None:
    release = threading.Event()

    def hang(_: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        release.wait(20)
        return 200, {"seed": -1}

    with stand_ins(loop, StandIn(hang), StandIn(echo)) as replicas:
        assert serve(loop, replicas) == list(range(40))
        release.set()


def test_a_request_that_healthy_servers_fail_each_time_ends_with_their_words(
    loop: LoopThread,
) -> None:
    def fail_one(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (500, {"error": "out of luck"}) if body["seed"] == 7 else echo(body)

    with stand_ins(loop, StandIn(fail_one)) as replicas:
        with pytest.raises(RunError, match="failed 3 times.*out of luck"):
            serve(loop, replicas)


@pytest.mark.parametrize("status", [400, 307], ids=["refused", "sent elsewhere"])
def test_a_refused_request_is_not_sent_again(loop: LoopThread, status: int) -> None:
    strict = StandIn(lambda body: (status, {"error": f"no such field {body['seed']}"}))
    with (
        stand_ins(loop, strict) as replicas,
        pytest.raises(RunError, match="refused .*no such field"),
    ):
        serve(loop, replicas)
    assert len(strict.seen) <= LIMITS.max_concurrency


def test_when_the_run_ends_nothing_is_still_being_asked(loop: LoopThread) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["seed"] == 2:
            return 400, {"error": "no"}
        time.sleep(0.6)
        return 200, body

    async def others() -> int:
        return len(asyncio.all_tasks()) - 1

    with stand_ins(loop, StandIn(answer)) as replicas:
        with pytest.raises(RunError, match="refused"):
            serve(loop, replicas)
        assert loop.run(others()) == 0


def test_when_all_servers_are_gone_the_error_counts_what_is_unfinished(loop: LoopThread) -> None:
    sick = [StandIn(lambda _: (500, {"error": "dead"}), health=503) for _ in range(2)]
    with stand_ins(loop, *sick) as replicas:
        with pytest.raises(RunError, match=r"no vLLM server is left \(2 .*, 40 of 40") as caught:
            serve(loop, replicas)
    assert all(replica.name in str(caught.value) for replica in replicas)


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Python's own handler: a shell's background jobs inherit that interrupts are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_an_interrupt_cancels_the_requests(loop: LoopThread) -> None:
    slow = StandIn(lambda body: (time.sleep(0.5), (200, body))[1])
    with stand_ins(loop, slow) as replicas:
        main = threading.main_thread().ident
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            serve(loop, replicas)
        time.sleep(0.7)
        assert len(slow.seen) == LIMITS.max_concurrency


def test_a_url_where_nobody_listens_is_named(loop: LoopThread) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ResourceError, match=f"{url}/health within 0.5 s: check the URL"):
        loop.run(wait_until_ready([Replica(HttpServer(url, loop.client))], 0.5))


def test_a_given_server_that_is_no_vllm_server_is_refused(loop: LoopThread, tmp_path: Path) -> None:
    setup = make_setup(make_tiny_model(tmp_path))
    server = StandIn(echo)
    with stand_ins(loop, server) as replicas:
        engine = VllmServerEngine(VllmServerConfig(urls=(replicas[0].name,), startup_timeout_s=5))
        with pytest.raises(ResourceError, match="/version could not be read .*docs/engines.md"):
            engine.start(setup)
    with pytest.raises(RunError, match="is not running"):
        engine.score([[1, 2]])


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"finish_reason": "abort", "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}},
        {"finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0]}},
        {"finish_reason": "length", "token_ids": [], "logprobs": {"token_logprobs": []}},
    ],
)
def test_an_answer_that_is_no_whole_completion_is_an_error(choice: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="not a completion with token ids"):
        read_completion({"choices": [choice]}, SamplingParams(), (1,), {})
    with pytest.raises(RunError, match="did not give the log-probs"):
        read_scores({"choices": [choice]}, [1, 2, 3])


# --- processes ----------------------------------------------------------------------------------

# A server that starts a child of its own, prints both ids and ignores a polite request to end.
STUBBORN = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ids_in(log: Path) -> list[int]:
    assert wait_for(lambda: log.is_file() and log.read_text().count("\n") >= 1)
    return [int(word) for word in log.read_text().split()]


@pytest.mark.parametrize("victim", ["owner", "guard", "server"])
def test_however_one_of_them_ends_no_process_of_a_server_is_left(
    tmp_path: Path, victim: str
) -> None:
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "from pathlib import Path\n"
            "import threading, os\n"
            "from posttrain.core.runtime.processes import ServerProcess\n"
            f"made = []\n"
            f"start = lambda: made.append(ServerProcess([sys.executable, '-c', {STUBBORN!r}], "
            f"os.environ, Path({str(log)!r})))\n"
            # As in a run: the thread that starts it ends at once, and the server must not.
            "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
            "print(made[0].pid, flush=True)\n"
            "time.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    guard = int(owner.stdout.readline())
    try:
        server, child = ids_in(log)
        time.sleep(0.3)
        assert not gone(server)
        os.kill({"owner": owner.pid, "guard": guard, "server": server}[victim], signal.SIGKILL)
        assert wait_for(lambda: gone(server))
        # The group is ended by the guard; where the guard itself was killed, the server's own
        # children end as they see fit (vLLM's by their closed pipes).
        assert victim == "guard" or wait_for(lambda: gone(child) and gone(guard))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        for pid in ids_in(log):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_server_that_ends_while_it_starts_shows_its_last_words(
    loop: LoopThread, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "print('one'); print('no such model'); raise SystemExit(3)"]
    process = ServerProcess(command, os.environ, tmp_path / "log")
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    replica = Replica(HttpServer(url, loop.client, process))
    with pytest.raises(ResourceError, match=r"(?s)ended while it started.*code 3.*no such model"):
        loop.run(wait_until_ready([replica], 30))
    process.stop()
    process.stop()


def test_a_stopped_server_is_gone_with_its_children(tmp_path: Path) -> None:
    polite = STUBBORN.replace("SIG_IGN", "SIG_DFL")
    process = ServerProcess([sys.executable, "-c", polite], os.environ, tmp_path / "log")
    server, child = ids_in(tmp_path / "log")
    process.stop()
    assert process.exit_code == 128 + signal.SIGTERM
    assert wait_for(lambda: gone(server) and gone(child))


# --- weights, command line, config --------------------------------------------------------------


def test_weight_files_hold_the_weights_in_the_asked_precision_and_replace_older_ones(
    tmp_path: Path,
) -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(3, 4, generator=draw).T, "b": torch.randn(2, generator=draw)}
    first = write_weights(tmp_path, "weights", weights, torch.float32)
    kept = load_file(next(first.folder.glob("*.safetensors")))
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights.items())
    second = write_weights(tmp_path, "weights", weights, torch.bfloat16)
    assert load_file(next(second.folder.glob("*.safetensors")))["b"].dtype == torch.bfloat16
    assert second.folder == first.folder
    assert first.digest != second.digest == digest_of(second.folder)
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]


def test_one_changed_byte_changes_the_digest_of_weight_files(tmp_path: Path) -> None:
    made = write_weights(tmp_path, "w", {"a": torch.zeros(8)}, torch.float32)
    path = next(made.folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert digest_of(made.folder) != made.digest


def test_weights_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be written.*engine\.sync_dir"):
        write_weights(tmp_path / "file", "w", {"a": torch.zeros(2)}, torch.float32)


def test_a_loaded_weight_that_is_not_the_file_s_is_found(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    state = {**model.state_dict(), "fused": torch.zeros(5)}
    made = write_weights(tmp_path, "w", state, torch.float32)
    assert count_loaded(model, made.folder) == 4
    with torch.no_grad():
        model[1].weight[1] += 1e-3
    with pytest.raises(RuntimeError, match=r"'1\.weight' is not what the file holds"):
        count_loaded(model, made.folder)


def test_a_server_listens_on_loopback_alone_and_samples_as_a_run_needs(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    options = ServerOptions(0.4, None, None, 32, 12, ("q_proj", "o_proj"), 1, ("--swap-space", "0"))
    command = loopback_command(server_arguments(setup, options), 8123)
    flags = dict(zip(command, command[1:], strict=False))
    assert (flags["--host"], flags["--port"], flags["--dtype"]) == ("127.0.0.1", "8123", "float32")
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--generation-config"] == "vllm"
    assert flags["--max-lora-rank"] == "16"
    modules = command.index("--lora-target-modules")
    assert command[modules + 1 : modules + 3] == ["q_proj", "o_proj"]
    assert flags["--kv-cache-memory-bytes"] == str(2**30)
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} < set(command)
    assert "--swap-space 0" in " ".join(command)
    assert "--trust-remote-code" not in command
    env = server_variables(setup, options)
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"urls": ("http://a:1",), "replicas": 2}, "leave out `replicas`"),
        ({"urls": ("a:1",)}, "expected URLs like"),
        ({"urls": ("http://a:1", "http://a:1")}, "given twice"),
        ({"replicas": 3, "gpus": ("0",)}, "1 gpus for 3 replicas"),
        ({"max_lora_rank": 513}, "less than or equal to 512"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmServerConfig(**fields)
    assert VllmServerEngine.name == "vllm_server"
