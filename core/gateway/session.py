"""One episode at the gateway: its requests become tokens, and its tokens become a tree."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from posttrain.core.contracts import ModelEndpoint, Outcome
from posttrain.core.data.messages import without_nulls
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.gateway.rows import Ending, SampledCall, responses_of
from posttrain.core.gateway.tree import TokenTree
from posttrain.core.gateway.wire import NOT_SAMPLED, Answer, ChatRequest, Refused, Served
from posttrain.core.runtime.seeding import derive_seed
from posttrain.core.types import Completion, Message, SamplingParams, ToolSchema

logger = logging.getLogger(__name__)
MODEL = "policy"
SHOWN = ("altered", "undelivered")
"""Counts that each episode has, as shares of all requests are made of them."""
TOLD = ("continued", "malformed", "refused", "retries")
"""Counts that each episode has, as `env/metric/NAME` is their mean."""
BUDGET = "Budget used up."
"""What a program reads once when it has had all its calls; nobody sampled it."""
MOST_CHARACTERS = 512
"""Characters of a token, at most: longer prompts are refused before they are encoded."""
Submit = Callable[[Sequence[int], SamplingParams], Future[Completion]]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one episode may ask for."""

    max_model_len: int
    max_calls: int = 64
    open_calls: int = 8


@dataclass(frozen=True, slots=True)
class _Call:
    """An answer that later requests may go on from: where its tokens end in the tree."""

    end: int
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
    fault: Exception | None = None
    """What the engine raised."""
    lost: str = ""
    """Why a call that was made has no answer here; such an episode has failed."""
    counts: Counter[str] = field(default_factory=Counter)
    _index: dict[bytes, _Call] = field(default_factory=dict)
    _asked: Counter[bytes] = field(default_factory=Counter)
    _answered: set[bytes] = field(default_factory=set)
    _stopped: bool = False
    _delivered: set[int] = field(default_factory=set)
    _running: dict[str, asyncio.Task[Answer]] = field(default_factory=dict)
    _room: asyncio.Semaphore = field(init=False, repr=False)
    _started: int = 0

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.limits.open_calls)

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
        work = asyncio.get_running_loop().create_task(self._answer(request))
        work.add_done_callback(_seen)
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
            raise self._too_long(f"{len(ids)} tokens")
        if self._started + request.n > self.limits.max_calls:
            return self._without_budget(request, ids)
        self._tell(request)
        number, self._started = self._started, self._started + request.n
        try:
            async with self._room:
                drawn = [self._drawn(ids, room, request) for _ in range(request.n)]
                sampled = await asyncio.gather(*map(asyncio.wrap_future, drawn))
        except Exception as error:  # an engine of a plugin may raise anything
            self.fault = self.fault or error
            raise Refused(503, "engine_fault", "the engine cannot answer") from error
        if self.sealed:
            raise Refused(400, "episode_over", "this episode is over")
        choices = tuple(self._served(number + i, request, s) for i, s in enumerate(sampled))
        return Answer(number, MODEL, ids, choices)

    def _too_long(self, size: str) -> Refused:
        return Refused(
            400,
            "context_length_exceeded",
            f"the prompt has {size}, and the model takes {self.limits.max_model_len} tokens with "
            "the answer: shorten the messages",
        )

    def _without_budget(self, request: ChatRequest, ids: tuple[int, ...]) -> Answer:
        """What a program gets that has had its calls: a text to end on, then errors."""
        self.counts["refused"] += 1
        if self._stopped:
            raise Refused(
                400, "budget_used_up", f"this episode has had its {self.limits.max_calls} calls"
            )
        self._stopped = True
        nothing = Completion((), (), "stop", 0, 0, "", "")
        choice = Served(Message("assistant", BUDGET), nothing, ())
        return Answer(NOT_SAMPLED, MODEL, ids, (choice,) * request.n)

    def _tell(self, request: ChatRequest) -> None:
        """Say once in this process what is done otherwise than the program asked."""
        if request.must_call:
            _warn_once(
                "must_call",
                "a program asks by tool_choice that a tool be called: it is taken as auto, as what "
                "is forced would not be the policy's",
            )
        if request.set_by_client:
            _warn_once(
                "overridden",
                "a program asks for its own %s: the run's are used, as what is sampled by others "
                "would not be the policy's",
                ", ".join(sorted(request.set_by_client)),
            )

    def deliver(self, request: ChatRequest, answer: Answer) -> None:
        """Keep an answer that is about to be sent: the program may go on from it.

        What a program never read is not kept, and so not learned from.
        """
        if self.sealed or answer.number == NOT_SAMPLED or answer.number in self._delivered:
            return
        self._delivered.add(answer.number)
        for place, choice in enumerate(answer.choices):
            number, sampled = answer.number + place, choice.sampled
            start, end = self.tree.add(number, answer.prompt_ids, sampled)
            self.calls.append(SampledCall(number, start, end, sampled))
            if request.prompt is None:
                call = _Call(end, sampled.finish_reason == "stop")
                for form in (choice.message, replace(choice.message, reasoning="")):
                    asked, chain = _chains((*request.messages, form), request.tools)[-2:]
                    self._answered.add(asked)
                    self._index[chain] = call

    def _drawn(self, ids: tuple[int, ...], room: int, request: ChatRequest) -> Future[Completion]:
        """Ask the engine; the seed depends on the prompt, and how often it came before here."""
        digest = hashlib.sha256(array("q", ids).tobytes()).digest()
        before = self._asked[digest]
        self._asked[digest] += 1
        most = min(self.params.max_tokens, room, request.max_tokens or room)
        params = replace(
            self.params,
            num_generations=1,
            max_tokens=most,
            stop_strings=request.stop,
            seed=derive_seed(self.seed, "call", before, digest.hex()),
        )
        return self.submit(ids, params)

    # -- messages to tokens -----------------------------------------------------------------

    def _prompt(self, request: ChatRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, tuple):
            size = len(self.tokenizer.tokenizer)
            wrong = next((token for token in request.prompt if not 0 <= token < size), None)
            if wrong is not None:
                raise Refused(
                    400, "invalid_prompt", f"prompt: {wrong} is not a token id, 0 to {size - 1}"
                )
            return request.prompt
        said = request.prompt or "".join(message.content for message in request.messages)
        if len(said) > MOST_CHARACTERS * self.limits.max_model_len:
            raise self._too_long(f"{len(said)} characters")
        if request.prompt is not None:
            return self.tokenizer.encode_text(request.prompt, special=False)
        try:
            return self._chat_prompt(request.messages, request.tools)
        except DataError as error:
            raise Refused(400, "invalid_messages", str(error)) from error

    def _chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[int, ...]:
        chains = _chains(messages, tools)
        known = [i + 1 for i, chain in enumerate(chains) if chain in self._index]
        self._count_altered(messages, chains)
        if not known or known[-1] == len(messages) or messages[-1].role == "assistant":
            return self.tokenizer.encode_chat(messages, tools)  # a last answer is continued
        size = known[-1]
        found = self._index[chains[size - 1]]
        before = self.tree.tokens(found.end)
        try:
            added = self.tokenizer.extend(
                messages[size:], tools, ended=found.ended, last=before[-1] if before else None
            )
        except DataError:  # messages that the format has no place for after an answer
            return self.tokenizer.encode_chat(messages, tools)
        self.counts["continued"] += 1
        return (*before, *added)

    def _count_altered(self, messages: Sequence[Message], chains: Sequence[bytes]) -> None:
        """Count a request that gives an answer back in other words than it was served."""
        for place in range(1, len(messages)):
            changed = messages[place].role == "assistant" and chains[place] not in self._index
            if changed and chains[place - 1] in self._answered:
                self.counts["altered"] += 1
                _warn_once(
                    "altered",
                    "a program gives answers back in other words than it read them (first: message "
                    "%d of a request, %.60r): these words are not learned from, and the answer as "
                    "it was sampled is a branch of its own",
                    place,
                    messages[place].content,
                )
                return

    def _served(self, number: int, request: ChatRequest, sampled: Completion) -> Served:
        ids = sampled.token_ids
        texts = tuple(map(self.tokenizer.token_text, ids))
        whole = self.tokenizer.decode_response(ids)
        if sampled.finish_reason == "stop_string":
            places = [at for stop in request.stop if (at := whole.find(stop)) >= 0]
            whole = whole[: min(places, default=len(whole))]
        message = Message("assistant", whole)
        if request.prompt is None and sampled.finish_reason != "stop_string":
            read = self.tokenizer.parse_response(ids, request.tools)
            if not read.malformed:
                named = (
                    # In the form of the strictest templates: nine letters and digits.
                    call if call.id else replace(call, id=f"call{number:03d}{place:02d}")
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
            raise Refused(404, "no_such_call", f"call {call} is unknown in this episode")

    def seal(self, outcome: Outcome, *, with_discarded: bool = False) -> list[Completion]:
        """End the episode; its responses, none where nothing was sampled."""
        self.sealed = True
        for work in self._running.values():
            work.cancel()
        reward = self.reward if outcome.reward is None else outcome.reward
        if reward is None and self.rewards:
            reward = sum(self.rewards.values())
        calls = [replace(c, reward=self.rewards.get(c.number)) for c in self.calls]
        counts = {name: float(self.counts[name]) for name in SHOWN}
        counts |= {f"metric/{name}": float(self.counts[name]) for name in TOLD}
        counts |= {"turns": float(len(calls)), "tokens_repeated": float(self.tree.repeats)}
        counts |= {f"reward/{name}": value for name, value in outcome.rewards.items()}
        ending = Ending(reward, outcome.failed or self.lost, {**counts, **outcome.counts})
        return responses_of(self.tree, calls, ending, with_discarded=with_discarded)


_warned: set[str] = set()


def _warn_once(kind: str, text: str, *values: object) -> None:
    """A warning of which the first is enough."""
    if kind not in _warned:
        _warned.add(kind)
        logger.warning(text, *values)


def _seen(work: asyncio.Task[Answer]) -> None:
    """Take the error of a call that nobody waits for any more."""
    if not work.cancelled():
        work.exception()


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
            [(call.name, without_nulls(call.arguments)) for call in message.tool_calls],
        )
        running.update(json.dumps(canonical, sort_keys=True).encode())
        found.append(running.digest())
    return found
