"""What a request to a vLLM server costs the run's process, by how many are in flight.

    python tests/bench/server_requests.py [--requests 4096] [--in-flight 64 256 1024] [--delay 0.3]

The server answers everything after a delay, from a process of its own, so what is left is the
client: `serve_all`, as `vllm_server` samples with it. Processor time is that of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time

from posttrain.core.cluster.servers import HttpServer
from posttrain.core.rollout.replicas import Limits, LoopThread, Replica, serve_all
from posttrain.core.runtime.processes import free_ports

BODY = b'{"choices": [%s 1]}' % (b"1, " * 1500)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
LENGTH = b"content-length: "
HEAD_ENDS = b"\r\n\r\n"


class Late(asyncio.Protocol):
    """A connection on which every request is answered after `delay` seconds."""

    def __init__(self, delay: float) -> None:
        self.delay, self.got = delay, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data
        while (end := self.got.find(HEAD_ENDS)) >= 0:
            head = self.got[:end].lower()
            length = int(head.split(LENGTH)[1].split(b"\r\n")[0]) if LENGTH in head else 0
            if len(self.got) < (whole := end + len(HEAD_ENDS) + length):
                return
            self.got = self.got[whole:]
            loop = asyncio.get_running_loop()
            loop.call_later(self.delay, self.transport.write, ANSWER % (len(BODY), BODY))


async def serve(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Late(delay), "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--delay", type=float, default=0.3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve, options.delay))
        return
    (port,) = free_ports(1)
    command = [sys.executable, __file__, "--serve", str(port), "--delay", str(options.delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline()
            for in_flight in options.in_flight:
                wall, processor = measured(port, options.requests, in_flight)
                each = 1000 * processor / options.requests
                print(
                    f"{in_flight:5d} in flight: {wall:6.2f} s, {each:.2f} ms of the process each",
                    flush=True,
                )
        finally:
            server.kill()


def measured(port: int, count: int, in_flight: int) -> tuple[float, float]:
    """Seconds of wall and of processor time for all requests, once the connections are open."""
    loop = LoopThread(timeout_s=60.0, connections=in_flight + 4)
    replicas = [Replica(HttpServer(f"http://127.0.0.1:{port}", loop.client))]
    body = {"prompt": list(range(300)), "max_tokens": 64}
    try:
        for number in (in_flight, count):
            began, wall = os.times(), time.perf_counter()
            requests = [body | {"seed": seed} for seed in range(number)]
            loop.run(serve_all(replicas, "/v1/completions", requests, Limits(in_flight, 0)))
            ended, wall = os.times(), time.perf_counter() - wall
    finally:
        loop.close()
    return wall, ended.user + ended.system - began.user - began.system


if __name__ == "__main__":
    main()
