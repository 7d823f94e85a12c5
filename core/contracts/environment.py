"""What the policy talks with during a response of several turns: environments, and their tools."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from posttrain.core.contracts.base import ConfigT, Plugin
from posttrain.core.types import Message, Problem, ToolSchema


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool says to the model; `failed` when it could not do what it was asked."""

    text: str
    failed: bool = False


class Tool(Plugin[ConfigT]):
    """Something that answers a text with a text. A field `path` of its config names a file or
    folder that is part of a stage's identity."""

    kind = "tool"
    at_once: ClassVar[int] = 1
    """Calls of one tool that may be made at the same time, from threads of one process. More than
    one for a tool that waits, as for a server, and is safe to call from several threads."""
    description: ClassVar[str] = ""
    """One sentence to the model: what it does, and what to write as its argument."""
    parameters: ClassVar[Mapping[str, Any]] = {  # Any: JSON values
        "type": "object",
        "properties": {"input": {"type": "string", "description": "the argument"}},
        "required": ["input"],
    }
    """JSON schema of the arguments of a call by JSON. A tool with other than one argument also
    overrides `call_json`."""

    @abstractmethod
    def call(self, arguments: str) -> ToolResult:
        """The answer to `arguments`, in bounded time; raises on no text, a failure is a result."""

    def schema(self) -> ToolSchema:
        """The tool as chat templates take it."""
        described = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**described, "parameters": self.parameters}}

    def call_json(self, arguments: Mapping[str, Any]) -> ToolResult:  # Any: JSON values
        """The answer to a call with JSON arguments; those that do not fit are a failure."""
        names = list(self.parameters["properties"])
        if len(names) != 1:
            raise NotImplementedError(f"tool '{self.name}' has several arguments and no call_json")
        if set(arguments) != set(names):
            given = ", ".join(sorted(arguments)) or "none"
            reported = f"error: expected the argument '{names[0]}', got {given}"
            return ToolResult(reported[:300], failed=True)
        value = arguments[names[0]]
        if not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)
        return self.call(value)


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins: its first state, and what the model is given in addition to the
    problem.
    """

    state: object
    suffix: str = ""
    """Text after the problem's own prompt."""
    system: str | None = None
    """A system message; None = the run's own."""
    tools: tuple[ToolSchema, ...] = ()
    """Tools that the prompt offers, after those of the problem."""
    messages: tuple[Message, ...] = ()
    """Messages after the problem's own, such as a first observation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy said until a stop string, or until it ended its answer (`ended`).

    `message` is the same as the renderer reads it: content, reasoning, tool calls, and in
    `malformed` calls that it could not read.
    """

    text: str
    ended: bool
    message: Message = Message("assistant")


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to a turn.

    With `done` the episode is over and the answer is not shown. The answer is `text`, which goes
    on in the policy's own turn, or `messages` of tools or the user, after which a turn of the
    assistant's begins. `counts` are added up over an episode: `calls` and `failed` for tools, and
    `metric/NAME`, shown as `env/metric/NAME`. `reward` is for this turn, None = nothing said;
    `outcome` for the whole episode, where it is not the sum of its turns'. `truncated` = the
    environment cut the episode, which did not end.
    """

    text: str
    done: bool
    state: object
    counts: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    outcome: float | None = None
    truncated: bool = False


class AnyEnvironment(Plugin[ConfigT]):
    """What `environment` of a stage names: an `Environment`, a `LiveEnvironment`, or a
    `PlayedEnvironment`."""

    kind = "environment"
    needs_task: ClassVar[str] = ""
    """Name of the task whose problems alone it can play; empty = any."""


class Environment(AnyEnvironment[ConfigT]):
    """Answers each turn of the policy with text, which enters the response but takes no loss.

    A state is a value: `step` returns the next one and changes nothing, because several branches of
    a tree go on from one state. Nothing here may be random but by what it is given.
    """

    at_once: ClassVar[int] = 1
    """Turns that `step` may answer at the same time, from threads of one process, where its tools
    allow it too."""
    reads_special_tokens: ClassVar[bool] = False
    """Whether special tokens written in its observations are those of the tokenizer. False: they
    are plain text, so that nothing a tool returns can end a turn or begin another role's."""

    gives_rewards: ClassVar[bool] = False
    """Whether turns that end with a stop string have rewards. False: the last turn that is allowed
    is not answered if it ends with one, which spares a call whose result nobody would read."""

    def setup(self, tools: Sequence[Tool[Any]]) -> None:  # noqa: B027 - most have no tools
        """Take the tools that the config's field `tools` names; called once."""

    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn, in addition to the end of the answer."""
        return ()

    @abstractmethod
    def reset(self, problem: Problem) -> Opening:
        """The beginning of an episode on `problem`."""

    @abstractmethod
    def step(self, state: object, turn: Turn) -> Observation:
        """The answer to `turn`; raises on no text."""


class LiveEnvironment(AnyEnvironment[ConfigT]):
    """Episodes whose state is held elsewhere: a session of a server, a game, a browser.

    A state is used by its own episode alone, one call at a time, and closed once. All methods are
    coroutines of one event loop, on which many episodes run at once: what blocks belongs into
    `asyncio.to_thread`. The run cuts off a call that takes too long and cancels it; then, as after
    anything that is raised, the episode has failed, is closed, and is not learned from.
    """

    deterministic: ClassVar[bool] = False
    """Whether equal seeds and equal turns give equal observations."""
    at_once: ClassVar[int] = 256
    """Episodes that may run at the same time."""

    async def start(self) -> None:  # noqa: B027 - most have nothing to start
        """Connect to what all episodes share; called once, before the first episode."""

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Tools that every prompt offers; known once it has started."""
        return ()

    @abstractmethod
    async def reset(self, problem: Problem, seed: int) -> Opening:
        """The beginning of an episode on `problem`; what is random in it follows from `seed`."""

    @abstractmethod
    async def step(self, state: object, turn: Turn) -> Observation:
        """The answer to `turn`. The next state may be the same object, changed."""

    async def score(self, state: object) -> float | None:
        """The score of an episode that is over, also where a limit on turns or tokens ended it.

        None = what its observations gave. Called once, before `close`, with the time that is left
        to the episode; what it raises makes the episode a failed one.
        """
        return None

    async def solve(self, state: object) -> bool:
        """Solve the episode, for `posttrain env check`; False = no solution is known."""
        return False

    async def close(self, state: object) -> None:  # noqa: B027 - most have nothing to close
        """Free what the episode holds; called once for each `reset` that returned."""

    async def stop(self) -> None:  # noqa: B027 - most have nothing to stop
        """Free what `start` made; called once, also after a `start` that failed."""


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Where one episode's program finds the policy: an OpenAI-compatible API of this run."""

    base_url: str
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended that a program played.

    `reward` is its score, None where rewards of the run score it; `rewards` are named parts, shown
    as `env/reward/NAME`, and so are `counts` with a name like `metric/NAME`. `failed` says why it
    is not to be learned from: a crash, or a time limit.
    """

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""


class PlayedEnvironment(AnyEnvironment[ConfigT]):
    """Episodes that a program plays, which knows the policy only as an API.

    Each request that it makes is recorded as sampled, and the requests of an episode are joined to
    one tree of turns. As in `LiveEnvironment`, coroutines of one event loop.
    """

    at_once: ClassVar[int] = 256
    """Episodes that may run at the same time."""

    async def start(self) -> None:  # noqa: B027 - most have nothing to start
        """Make what all episodes share; called once, before the first episode."""

    @abstractmethod
    async def play(self, problem: Problem, endpoint: ModelEndpoint, seed: int) -> Outcome:
        """Play one episode to its end. What is raised makes it a failed one."""

    async def stop(self) -> None:  # noqa: B027 - most have nothing to stop
        """Free what `start` made; called once, also after a `start` that failed."""
