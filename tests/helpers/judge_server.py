"""A small OpenAI-compatible endpoint on 127.0.0.1 that does as the texts it is sent say.

Words in the last message: `says:TEXT` (underscores are blanks) is the reply, else a score of 7;
`fails:429:2` answers that status to the first two attempts; `status:400` to all; `garbage`, `html`,
`endless`, `hangup` and `slow` are what they say; `varies` answers 2, 8, 4, ... in turn.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.helpers.listener import Listener


@dataclass
class JudgeServer:
    """What came in, and how many requests were in work at one time."""

    url: str = ""
    key: str | None = None
    hold: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    times: list[float] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    most_busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def judge_server(key: str | None = None, hold: float = 0.0) -> Iterator[JudgeServer]:
    """A running server; `hold` seconds pass before each reply.

    Over 60 lines because the handler, which shares its state, is inside.
    """
    state = JudgeServer(key=key, hold=hold)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append({"GET": self.path})
            self.reply(200, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = body["messages"][-1]["content"]
            with state.lock:
                state.requests.append(body)
                state.times.append(time.monotonic())
                state.attempts[text] += 1
                turn = len(state.requests)
                attempt = state.attempts[text]
                state.busy += 1
                state.most_busy = max(state.most_busy, state.busy)
            time.sleep(state.hold)
            with state.lock:
                state.busy -= 1
            try:
                self.answer(text, turn, attempt)
            except OSError:
                pass  # the client has gone

        def answer(self, text: str, turn: int, attempt: int) -> None:
            sent = self.headers.get("Authorization")
            if self.path != "/v1/chat/completions":
                self.reply(404, b"no such page")
            elif state.key is not None and sent != f"Bearer {state.key}":
                self.reply(401, f"bad key in {sent}".encode())
            elif fails := re.search(r"fails:(\d+):(\d+)", text):
                failed = attempt <= int(fails[2])
                self.reply(int(fails[1]), b"busy") if failed else self.chat("Score: 7")
            elif status := re.search(r"status:(\d+)", text):
                self.reply(int(status[1]), f"no, {sent}".encode())
            elif "garbage" in text:
                self.reply(200, b"\x00\xff{")
            elif "html" in text:
                self.reply(200, b"<html>it works</html>")
            elif "endless" in text:
                self.reply(200, b" " * (3 << 20))
            elif "hangup" in text:
                self.connection.close()
            elif "slow" in text:
                self.drip()
            elif "varies" in text:
                self.chat(f"Score: {(2, 8, 4)[turn % 3]}")
            else:
                says = re.search(r"says:(\S*)", text)
                self.chat(says[1].replace("_", " ") if says else "Score: 7")

        def chat(self, content: str) -> None:
            choice = {"message": {"role": "assistant", "content": content}}
            answer = {"choices": [choice], "usage": {"total_tokens": 10}}
            self.reply(200, json.dumps(answer).encode())

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def drip(self) -> None:
            """One byte at a time, each in good time, all of them never."""
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)

        def log_message(self, format: str, *args: object) -> None: ...

    server = Listener(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
