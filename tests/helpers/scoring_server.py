"""A small server on 127.0.0.1 with vLLM's `prompt_logprobs` of a tiny model's own logits.

Asked for `return_token_ids` it answers greedily with the ids, as vLLM does.

`fault` is what it does wrong: `plain` answers without them, as other servers do; `deaf` leaves out
the last token's; `busy` answers 503 once; `other` reads texts with another tokenizer. As vLLM does
unless it is asked for more, it gives 20 candidates at most.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from tests.helpers.listener import Listener
from tests.helpers.rollouts import load_tiny

LONGEST, MOST_CANDIDATES = 512, 20


@dataclass
class ScoringServer:
    """Where it is, and what it was asked."""

    url: str = ""
    fault: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    keys: set[str | None] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def scoring_server(folder: Path, fault: str = "") -> Iterator[ScoringServer]:
    """A running server of the model in `folder`.

    Over 60 lines because the handler, which shares its state, is inside.
    """
    state, model = ScoringServer(fault=fault), load_tiny(folder, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "big", "max_model_len": LONGEST}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.keys.add(self.headers["Authorization"])
            if self.path == "/tokenize":
                ids = tokenizer.encode(body["prompt"], add_special_tokens=False)
                self.reply(200, {"tokens": [i + 1 for i in ids] if state.fault == "other" else ids})
            elif self.path == "/v1/completions":
                with state.lock:
                    state.requests.append(body)
                    busy = state.fault == "busy" and len(state.requests) == 2
                if body.get("prompt_logprobs", 0) > MOST_CANDIDATES:
                    wrong = f"Requested prompt logprobs of {body['prompt_logprobs']}, max allowed"
                    self.reply(400, {"error": {"message": f"{wrong}: {MOST_CANDIDATES}"}})
                elif busy:
                    self.reply(503, {"error": "too many requests"})
                else:
                    self.reply(200, {"choices": [self.choice(body)]})
            else:
                self.reply(404, {})

        def choice(self, body: dict[str, Any]) -> dict[str, Any]:
            if state.fault == "plain":
                return {"text": "x", "logprobs": None}
            if body.get("return_token_ids"):
                return self.sampled(body)
            ids, k = body["prompt"], body["prompt_logprobs"]
            with state.lock, torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
            logprobs = torch.log_softmax(logits.double(), dim=-1)
            entries: list[dict[str, Any] | None] = [None]
            for place, token in enumerate(ids[1:]):
                best = logprobs[place].topk(k).indices.tolist() if k else []
                entries.append(
                    {str(t): {"logprob": float(logprobs[place, t])} for t in [*best, token]}
                )
            if state.fault == "deaf" and len(state.requests) > 1:
                entries[-1] = {}
            return {"text": "x", "prompt_logprobs": entries}

        def sampled(self, body: dict[str, Any]) -> dict[str, Any]:
            ids: list[int] = []
            with state.lock, torch.no_grad():
                while len(ids) < body["max_tokens"] and not {*ids[-1:]} & {*body["stop_token_ids"]}:
                    logits = model(torch.tensor([[*body["prompt"], *ids]])).logits[0, -1]
                    ids.append(int(logits.argmax()))
            ended = bool({*ids[-1:]} & {*body["stop_token_ids"]})
            return {
                "token_ids": ids,
                "logprobs": {"token_logprobs": [-0.5] * len(ids)},
                "finish_reason": "stop" if ended else "length",
            }

        def reply(self, code: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = Listener(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
