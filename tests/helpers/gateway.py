"""Sessions of the gateway without a server: the policy says what a test writes."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from posttrain.core.contracts import Outcome
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.gateway.session import Session, SessionLimits
from posttrain.core.gateway.wire import Answer, digest_of, read_chat
from posttrain.core.types import Completion, SamplingParams
from tests.helpers.templates import family_tokenizer

Json = dict[str, Any]  # Any: JSON values
END = "<|im_end|>"


class Script:
    """Answers each request with the next of `lines`; one that ends with `...` is cut off there.

    Log-probs are -1, -2, ... over all tokens, so that each is known by its own.
    """

    def __init__(self, tokenizer: ChatTokenizer, lines: Sequence[str]) -> None:
        self.tokenizer, self.lines = tokenizer, list(lines)
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.given: list[tuple[int, ...]] = []
        self.held: list[Callable[[], None]] = []
        self.hold = False
        self._drawn = 0

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Future[Completion]:
        line = self.lines[len(self.asked) % len(self.lines)]
        self.asked.append((tuple(prompt_ids), params))
        cut = line.endswith("...")
        text = line.removesuffix("...") if cut else line + END
        ids = self.tokenizer.encode_text(text, special=True)
        self.given.append(ids)
        logprobs = tuple(-1.0 - self._drawn - i for i in range(len(ids)))
        self._drawn += len(ids)
        stopped = any(line.endswith(stop) for stop in params.stop_strings)
        if stopped:
            ids, logprobs = ids[:-1], logprobs[:-1]
        reason = "length" if cut else "stop_string" if stopped else "stop"
        found = Completion(ids, logprobs, reason, 0, params.seed, "script", "0")
        answer: Future[Completion] = Future()
        if self.hold:
            self.held.append(lambda: answer.set_result(found))
        else:
            answer.set_result(found)
        return answer


@functools.cache
def chat_tokenizer(family: str = "qwen3") -> ChatTokenizer:
    return ChatTokenizer(family_tokenizer(family), None)


class Program:
    """Asks as a program would, and reads what it is served as JSON."""

    def __init__(
        self, lines: Sequence[str], *, family: str = "qwen3", seed: int = 1, **limits: int
    ) -> None:
        self.tokenizer = chat_tokenizer(family)
        self.script = Script(self.tokenizer, lines)
        self.session = Session(
            self.script.submit,
            self.tokenizer,
            SamplingParams(max_tokens=200),
            SessionLimits(**{"max_model_len": 2000, **limits}),
            seed,
        )

    async def ask(self, *messages: Json, retried: bool = False, **fields: Any) -> Answer:
        """The answer, which has reached the program."""
        body = {"messages": list(messages), **fields}
        request = read_chat(body, digest_of("chat", json.dumps(body).encode()))
        answer = await self.session.answer(request, retried=retried)
        self.session.deliver(request, answer)
        return answer

    def seal(self, outcome: Outcome | None = None, **options: bool) -> list[Completion]:
        return self.session.seal(outcome or Outcome(), **options)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(answer: Answer, place: int = 0) -> Json:
    """The answer as a program gives it back."""
    message = answer.choices[place].message
    made: Json = {"role": "assistant", "content": message.content or None}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in message.tool_calls
        ]
    return made


def played(program: Callable[[], Any]) -> Any:
    """The result of a coroutine function, run to its end."""
    return asyncio.run(program())
