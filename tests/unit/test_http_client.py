"""The client of engines, judges and teachers: its cost with many in flight, keys, proxies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.cluster.servers import HttpServer
from posttrain.core.rewards.judge import Budget, ChatClient, Endpoint, Pace
from posttrain.core.rollout.replicas import Limits, Replica, serve_all
from posttrain.core.runtime.http_client import Reply, ask, make_client, proxy_for
from posttrain.core.training.teacher_server import TeacherServer
from tests.helpers.listener import Listener
from tests.helpers.rollouts import ragged_batch

SCORE = {"message": {"role": "assistant", "content": "Score: 7"}}


@contextlib.contextmanager
def server(delay: float = 0.0) -> Iterator[tuple[str, list[str | None]]]:
    """Answers after `delay` s as an engine, a judge and a teacher do; the keys it was sent."""
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            keys.append(self.headers.get("Authorization"))
            time.sleep(delay)
            entries = [None, *({} for _ in body.get("prompt", [])[1:])]
            choice = {**SCORE, "prompt_logprobs": entries}
            answer = {"choices": [choice], "seed": body.get("seed")}
            if self.path.endswith("/moved"):
                return self.reply(307, b"{}")
            return self.reply(200, json.dumps(answer).encode())

        def reply(self, code: int, data: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Location", "/v1/completions")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    listener = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}/v1", keys
    finally:
        listener.shutdown()
        listener.server_close()


def ask_engine(url: str, at_once: int, count: int) -> None:
    async def all_of_them() -> None:
        async with await make_client(60.0, at_once) as client:
            replicas = [Replica(HttpServer(url, client))]
            requests = [{"seed": seed} for seed in range(count)]
            found = await serve_all(replicas, "/completions", requests, Limits(at_once, 0))
            assert [answer["seed"] for answer in found] == list(range(count))

    asyncio.run(all_of_them())


def ask_judge(url: str, at_once: int, count: int) -> None:
    async def all_of_them() -> None:
        endpoint = Endpoint(url, "m")
        async with ChatClient(endpoint, Budget(None, None), Pace(None), at_once) as client:
            chats = [[{"role": "user", "content": str(number)}] for number in range(count)]
            found = await asyncio.gather(*(client.ask(chat) for chat in chats))
            assert [reply.text for reply in found] == ["Score: 7"] * count

    asyncio.run(all_of_them())


def ask_teacher(url: str, at_once: int, count: int) -> None:
    TeacherServer(url, "m", "t", at_once=at_once).scores(ragged_batch([3] * count, 1), 0)


ASKERS: dict[str, Callable[[str, int, int], None]] = {
    "engine": ask_engine,
    "judge": ask_judge,
    "teacher": ask_teacher,
}


@pytest.mark.parametrize("who", ASKERS)
def test_a_request_among_hundreds_costs_what_it_costs_among_few(who: str) -> None:
    """Processor time of the client's thread; one that looks at every connection takes 20 times."""

    def cost(at_once: int, count: int) -> float:
        began = time.thread_time()
        ASKERS[who](url, at_once, count)
        return (time.thread_time() - began) / count

    with server(delay=0.1) as (url, _):
        cost(2, 2)  # what is loaded and read once
        few, many = cost(8, 64), cost(256, 512)
    assert many < 5 * few, (few, many)


def test_the_key_goes_to_the_server_alone_and_is_that_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a redirect nor a line of ~/.netrc changes that."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))

    async def asked(url: str) -> list[Reply]:
        async with await make_client(5.0, 2, url=url, key="k") as client:
            return [await ask(client, f"{url}/{path}", {}) for path in ("completions", "moved")]

    with server() as (url, keys):
        assert [reply.status for reply in asyncio.run(asked(url))] == [200, 307]
    assert keys == ["Bearer k", "Bearer k"]


def test_a_proxy_is_for_hosts_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_for("https://api.example.com/v1") is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert proxy_for("https://api.example.com/v1") == "http://proxy:3128"
    assert proxy_for("http://api.example.com/v1") is None
    for url in ("https://127.0.0.1:1/v1", "https://localhost/v1", "https://a.example.org/v1", ""):
        assert proxy_for(url) is None, url
    monkeypatch.setenv("ALL_PROXY", "http://all:3128")
    assert proxy_for("http://api.example.com/v1") == "http://all:3128"


def test_requests_to_a_host_elsewhere_go_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def asked(url: str) -> Reply:
        async with await make_client(5.0, 2, url=url, key="k") as client:
            return await ask(client, f"{url}/completions", {})

    with server() as (proxy, keys):
        monkeypatch.setenv("HTTP_PROXY", proxy.removesuffix("/v1"))
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert asyncio.run(asked("http://nowhere.invalid/v1")).status == 200
    assert keys == ["Bearer k"]
