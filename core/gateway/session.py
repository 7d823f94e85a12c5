"""One episode at the gateway: its requests become tokens, and its tokens become a tree."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from posttrain.core.contracts import ModelEndpoint, Outcome
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError, PosttrainError
from posttrain.core.gateway.rows import Ending, SampledCall, responses_of
from posttrain.core.gateway.tree import TokenTree
from posttrain.core.gateway.wire import Answer, ChatRequest, Refused, Served
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Message, SamplingParams, ToolSchema

logger = logging.getLogger(__name__)
MODEL = "policy"
KEPT_S = 10.0
"""How long an answer waits for a client that left, and may ask again."""
Submit = Callable[[Sequence[int], SamplingParams], Future[Completion]]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one episode may ask for."""

    max_model_len: int
    max_calls: int = 64
    open_calls: int = 8


@dataclass(frozen=True, slots=True)
class _Call:
    """An answer that later requests may go on from."""

    ids: tuple[int, ...]
    ended: bool


@dataclass
class Session:
    """The requests of one episode, which have its key.

    A request goes on from the longest conversation of this episode that it begins with, message by
    message as they were served: then the tokens so far stay as they were sampled, and only what is
    new is encoded. Where there is none, all of it is encoded. So nothing sampled is ever encoded
    again where the program hands it back as it was.
    """

    submit: Submit
    tokenizer: ChatTokenizer
    params: SamplingParams
    limits: SessionLimits
    seed: int
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    tree: TokenTree = field(default_factory=TokenTree)
    calls: list[SampledCall] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    reward: float | None = None
    sealed: bool = False
    fault: PosttrainError | None = None
    counts: Counter[str] = field(default_factory=Counter)
    _index: dict[bytes, _Call] = field(default_factory=dict)
    _asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _delivered: set[int] = field(default_factory=set)
    _running: dict[str, asyncio.Task[Answer]] = field(default_factory=dict)
    _open: int = 0
    _started: int = 0

    def endpoint(self, root: str) -> ModelEndpoint:
        """What the program is given; `root` is the gateway's address."""
        return ModelEndpoint(f"{root}/e/{self.key}/v1", self.key, MODEL)

    async def answer(self, request: ChatRequest, *, retried: bool) -> Answer:
        """The answer to a request. Raises `Refused`.

        A request that a client marks as its second try, with the same body, gets the answer of the
        first, which may still be under way: nothing is sampled twice for it.
        """
        if self.sealed:
            raise Refused(400, "episode_over", "this episode is over")
        known = self._running.get(request.digest) if retried else None
        if known is not None:
            self.counts["retries"] += 1
            return await asyncio.shield(known)
        if self._open >= self.limits.open_calls:
            raise Refused(429, "too_many_open_calls", "too many calls at once", again=True)
        work = asyncio.get_running_loop().create_task(self._answer(request))
        self._running[request.digest] = work
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self.counts["undelivered"] += 1
            raise

    async def _answer(self, request: ChatRequest) -> Answer:
        ids = self._prompt(request)
        room = self.limits.max_model_len - len(ids)
        if room < 1:
            raise Refused(
                400,
                "context_length_exceeded",
                f"the prompt has {len(ids)} tokens, and the model takes "
                f"{self.limits.max_model_len} with the answer: shorten the messages",
            )
        if self._started + request.n > self.limits.max_calls:
            self.counts["refused"] += 1
            raise Refused(
                400, "budget_used_up", f"this episode has had its {self.limits.max_calls} calls"
            )
        if request.set_by_client:
            self.counts["overridden"] += 1
        number, self._started = self._started, self._started + request.n
        self._open += 1
        try:
            drawn = [self._drawn(ids, room, request) for _ in range(request.n)]
            sampled = await asyncio.gather(*map(asyncio.wrap_future, drawn))
        except PosttrainError as error:
            self.fault = self.fault or error
            raise Refused(503, "engine_fault", "the engine cannot answer") from error
        finally:
            self._open -= 1
        if self.sealed:
            raise Refused(400, "episode_over", "this episode is over")
        choices = tuple(self._served(number + i, request, s) for i, s in enumerate(sampled))
        return Answer(number, MODEL, ids, choices)

    def deliver(self, request: ChatRequest, answer: Answer) -> None:
        """Keep an answer that is about to be sent: the program may go on from it.

        What a program never read is not kept, and so not learned from.
        """
        if self.sealed or answer.number in self._delivered:
            return
        self._delivered.add(answer.number)
        for place, choice in enumerate(answer.choices):
            number, sampled = answer.number + place, choice.sampled
            start, end = self.tree.add(number, answer.prompt_ids, sampled)
            self.calls.append(SampledCall(number, start, end, sampled))
            if request.prompt is None:
                ids = (*answer.prompt_ids, *sampled.token_ids)
                call = _Call(ids, sampled.finish_reason == "stop")
                for form in (choice.message, replace(choice.message, reasoning="")):
                    chain = _chains((*request.messages, form), request.tools)[-1]
                    self._index[chain] = call

    def _drawn(self, ids: tuple[int, ...], room: int, request: ChatRequest) -> Future[Completion]:
        """Ask the engine; the seed depends on the prompt, and how often it came before here."""
        before = self._asked[ids]
        self._asked[ids] += 1
        most = min(self.params.max_tokens, room, request.max_tokens or room)
        params = replace(
            self.params,
            num_generations=1,
            max_tokens=most,
            stop_strings=request.stop,
            seed=derive_seed(self.seed, "call", before, *ids),
        )
        return self.submit(ids, params)

    # -- messages to tokens -----------------------------------------------------------------

    def _prompt(self, request: ChatRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, tuple):
            return request.prompt
        if isinstance(request.prompt, str):
            return self.tokenizer.encode_text(request.prompt, special=False)
        messages, tools = request.messages, request.tools
        chains = _chains(messages, tools)
        for size in range(len(messages) - 1, 0, -1):
            found = self._index.get(chains[size - 1])
            if found is None:
                continue
            try:
                last = found.ids[-1] if found.ids else None
                added = self.tokenizer.extend(messages[size:], tools, ended=found.ended, last=last)
            except DataError:  # such as words of the assistant's that it never said
                break
            self.counts["continued"] += 1
            return (*found.ids, *added)
        if any(message.role == "assistant" for message in messages):
            self.counts["altered"] += 1
        try:
            return self.tokenizer.encode_chat(messages, tools)
        except DataError as error:
            raise Refused(400, "invalid_messages", str(error)) from error

    def _served(self, number: int, request: ChatRequest, sampled: Completion) -> Served:
        ids = sampled.token_ids
        texts = tuple(map(self.tokenizer.token_text, ids))
        whole = self.tokenizer.decode_response(ids)
        if sampled.finish_reason == "stop_string":
            places = [at for stop in request.stop if (at := whole.find(stop)) >= 0]
            whole = whole[: min(places, default=len(whole))]
        message = Message("assistant", whole)
        if request.prompt is None and sampled.finish_reason != "stop_string":
            read = self.tokenizer.parse_response(ids)
            if not read.malformed:
                named = (
                    call if call.id else replace(call, id=f"call_{number}_{place}")
                    for place, call in enumerate(read.tool_calls)
                )
                message = replace(read, tool_calls=tuple(named))
            else:
                self.counts["malformed"] += 1
        return Served(message, sampled, texts)

    # -- the end ----------------------------------------------------------------------------

    def give_reward(self, value: float, call: int | None) -> None:
        """The program's own score of the episode, or of one of its calls."""
        if self.sealed:
            raise Refused(400, "episode_over", "this episode is over")
        if call is None:
            self.reward = value
        elif any(known.number == call for known in self.calls):
            self.rewards[call] = value
        else:
            raise Refused(404, "no_such_call", f"there is no call {call}")

    def seal(self, outcome: Outcome, *, with_discarded: bool = False) -> list[Completion]:
        """End the episode; its responses, none where nothing was sampled."""
        self.sealed = True
        for work in self._running.values():
            work.cancel()
        reward = self.reward if outcome.reward is None else outcome.reward
        if reward is None and self.rewards:
            reward = sum(self.rewards.values())
        calls = [replace(c, reward=self.rewards.get(c.number)) for c in self.calls]
        counts = {name: float(value) for name, value in self.counts.items()}
        counts |= {"turns": float(len(calls)), "tokens_repeated": float(self.tree.repeats)}
        ending = Ending(reward, outcome.failed, {**counts, **outcome.counts})
        return responses_of(self.tree, calls, ending, with_discarded=with_discarded)


def _chains(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[bytes]:
    """A digest of each beginning of a conversation, of one message, of two and so on.

    Neither the ids of calls nor how their JSON is written make a difference; tools do, as a
    template writes them into the prompt.
    """
    running = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    found = []
    for message in messages:
        canonical = (
            message.role,
            message.content,
            message.reasoning,
            message.name if message.role == "tool" else "",
            [(call.name, dict(call.arguments)) for call in message.tool_calls],
        )
        running.update(json.dumps(canonical, sort_keys=True).encode())
        found.append(running.digest())
    return found
