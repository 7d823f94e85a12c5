"""A hub on this machine that takes one repository's files, all of them in the commit itself."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What was asked of it: repositories, files of the commit, tokens of the requests."""

    url: str = ""
    private: bool = True
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers as huggingface.co does to an upload of small files."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(size)
            hub.tokens.add(self.headers.get("authorization", ""))
            hub.paths.append(self.path)
            self._answer(self._reply(body))

        def do_GET(self) -> None:
            hub.paths.append(self.path)
            self._answer({"id": "me/tiny", "sha": "0" * 40, "siblings": [], "private": hub.private})

        def _reply(self, body: bytes) -> dict[str, Any]:
            if self.path.endswith("/repos/create"):
                hub.created.append(json.loads(body))
                return {"url": f"{hub.url}/me/tiny", "name": "me/tiny"}
            if self.path.endswith("/validate-yaml"):
                return {"errors": [], "warnings": []}
            if "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                return {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in asked
                    ]
                }
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    hub.files[value["path"]] = base64.b64decode(value["content"])
            return {
                "success": True,
                "commitUrl": f"{hub.url}/me/tiny/commit/{'1' * 40}",
                "commitOid": "1" * 40,
            }

        def _answer(self, value: dict[str, Any]) -> None:
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
