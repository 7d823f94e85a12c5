"""A server with the routes of vLLM's that the engine uses, which starts in a second.

Its tokens are digests of prompt, seed and weights, so that they show who answered with what. It
reads and checks weight files as the real one does. What it does wrong stands in files of the folder
`--faults`, named after its number: `refuse-0` (the weights), `odd-1` (answers of another model).
There it also says that it runs (`server-0`, with its process id) and what it answered (`seeds-0`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from posttrain.core.store.manifests import combine_digests, file_digest
from tests.helpers.listener import Listener

WORDS = 90


def digest_of(folder: Path) -> str:
    return combine_digests({p.name: file_digest(p) for p in sorted(folder.glob("*.safetensors"))})


class TokenServer:
    """What the server knows: its weights' digest, the adapters by name, and its faults."""

    def __init__(self, model: Path, faults: Path, delay_s: float) -> None:
        self.faults, self.delay_s = faults, delay_s
        self.weights = digest_of(model)
        self.adapters: dict[str, str] = {}
        number = 0
        while True:
            try:
                with open(faults / f"server-{number}", "x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                number += 1
            else:
                break
        self.number = number

    def does(self, fault: str) -> bool:
        return (self.faults / f"{fault}-{self.number}").exists()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions":
            return 200, self.complete(body)
        if path == "/collective_rpc":
            return 200, {"results": [self.reload(**body["kwargs"])]}
        if path == "/v1/load_lora_adapter":
            folder = Path(body["lora_path"])
            self.adapters[body["lora_name"]] = digest_of(folder)
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            return (200, "Success") if self.adapters.pop(body["lora_name"], "") else (404, {})
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        return 404, {}

    def reload(self, folder: str, digest: str) -> dict[str, Any]:
        found = digest_of(Path(folder))
        if self.does("refuse") or found != digest:
            return {"error": f"{folder} has the digest {found[:12]}, expected {digest[:12]}"}
        self.weights = found
        return {"equal": 1, "digest": found}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        held = self.weights + self.adapters.get(body["model"], "") * (body["model"] != "policy")
        key = f"{held}{' odd' * self.does('odd')}{body['prompt']}{body.get('seed')}"
        draw = hashlib.sha512(key.encode()).digest()
        if "prompt_logprobs" in body:
            rows = [{str(t): {"logprob": -draw[i % 64] / 10}} for i, t in enumerate(body["prompt"])]
            return {"choices": [{"prompt_logprobs": [None, *rows[1:]]}]}
        count = body["max_tokens"]
        time.sleep(self.delay_s)
        with open(self.faults / f"seeds-{self.number}", "a") as file:
            file.write(f"{body['seed']}\n")
        ids = [100 + draw[i % 64] % WORDS for i in range(count)]
        logprobs = {"token_logprobs": [-draw[-1 - i % 64] / 100 for i in range(count)]}
        return {"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}]}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--faults", "--host", "--port", "--delay"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    server = TokenServer(Path(given.model), Path(given.faults), float(given.delay))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = {"/health": "", "/version": {"version": "1.0"}}
            self.reply(*((200, known[self.path]) if self.path in known else (404, {})))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*server.answer(self.path, body))

        def reply(self, code: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    Listener((given.host, int(given.port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
