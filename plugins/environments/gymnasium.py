"""Gymnasium: games and control tasks with observations as text and actions by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, model_validator

from posttrain.core.contracts import LiveEnvironment, Observation, Opening, PluginConfig, Turn
from posttrain.core.contracts.base import RegularExpression
from posttrain.core.errors import ConfigError
from posttrain.core.rollout.external import episode_seed, require
from posttrain.core.rollout.tool_use import reply
from posttrain.core.types import Problem, ToolSchema

if TYPE_CHECKING:
    import gymnasium

Value = TypeVar("Value")
STYLED = re.compile(r"\x1b\[([0-9;]*)m([^\x1b\n]*)\x1b\[0?m")
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BACKGROUND = re.compile(r"(?:^|;)(?:7|4[0-7]|10[0-7])(?:;|$)")
ACT = "act"


class GymnasiumConfig(PluginConfig):
    """Settings of `gymnasium`."""

    id: str = Field(
        default="FrozenLake-v1",
        min_length=1,
        description="id of a registered environment; MODULE:ID imports the module that registers",
    )
    kwargs: dict[str, Any] = Field(  # Any: JSON values
        default={}, description="arguments of the environment, such as {is_slippery: false}"
    )
    action_names: tuple[str, ...] = Field(
        default=(), description="the actions 0, 1, ... by name; empty = their numbers"
    )
    observation_names: tuple[str, ...] = Field(
        default=(), description="the observations 0, 1, ... by name; empty = their numbers"
    )
    actions: Literal["text", "tool"] = Field(
        default="text", description="text: read from the answer; tool: calls of a function `act`"
    )
    pattern: RegularExpression | None = Field(
        default=None,
        description="regular expression whose last match in the answer, its group 1 if it has one, "
        "is the action; null = the end of the answer, of text actions all of it",
    )
    show: Literal["both", "observation", "drawing"] = Field(
        default="both", description="what the model sees, where the environment draws in text"
    )
    highlight: str = Field(
        default="[{text}]",
        description="how the drawing shows text on a coloured background, such as where one stands",
    )
    instructions: str | None = Field(
        default=None,
        description="instructions that end the prompt; {actions} is the list. null = a short text",
    )
    illegal_reward: float = Field(
        default=0.0, description="reward of a turn without an allowed action"
    )
    max_chars: int = Field(default=4000, ge=1, description="characters of an observation, at most")
    threads: bool = Field(
        default=False, description="step in threads: for environments that take over a millisecond"
    )

    @model_validator(mode="after")
    def _can_be_read(self) -> GymnasiumConfig:
        names = [name.casefold() for name in self.action_names]
        if len(set(names)) < len(names):
            raise ValueError("two actions have one name; name them differently")
        if "{text}" not in self.highlight:
            raise ValueError("highlight has no {text}: what is highlighted would not be shown")
        return self


@dataclass(slots=True)
class Game:
    """One episode's environment; `mask` says which actions are allowed, where it does."""

    env: gymnasium.Env[Any, Any]
    mask: Any = None  # Any: an array of numpy


class GymnasiumEnvironment(LiveEnvironment[GymnasiumConfig]):
    """o', r, terminated, truncated = env.step(a), a the action that the turn names.

    The prompt ends with the first observation; later ones are messages of the user, with
    `actions: tool` the results of calls of `act`. A turn that names no allowed action is answered
    by what is allowed, counts as failed, and the game does not move. The seed is the problem's
    (task `episodes`), so that all episodes of a problem begin in one state. Source: Gymnasium,
    arXiv:2407.17032.
    """

    name = "gymnasium"
    Config = GymnasiumConfig
    deterministic = True

    def __init__(self, config: GymnasiumConfig) -> None:
        super().__init__(config)
        self._names: tuple[str, ...] = ()
        self._first, self._draws = 0, False

    async def start(self) -> None:
        """Make one environment, and read its actions. Raises `ConfigError` for one without text."""
        require("gymnasium", self.name, "gymnasium")
        from gymnasium.spaces import Discrete, Text

        env = await asyncio.to_thread(self._made)
        self._draws = "ansi" in env.metadata.get("render_modes", ())
        space, seen = env.action_space, env.observation_space
        env.close()
        if not isinstance(space, Discrete | Text):
            raise self._wrong(f"its actions are {space}, and only Discrete and Text can be written")
        if self.config.show == "drawing" and not self._draws:
            raise self._wrong("it does not draw as text: set show: observation")
        if isinstance(space, Discrete):
            numbers = range(int(space.start), int(space.start) + int(space.n))
            self._names, self._first = self.config.action_names, int(space.start)
            self._names = self._names or tuple(map(str, numbers))
            if len(self._names) != len(numbers):
                given = len(self._names)
                raise self._wrong(f"it has {len(numbers)} actions and action_names names {given}")
        named = len(self.config.observation_names)
        if named and not (isinstance(seen, Discrete) and named == int(seen.n)):
            raise self._wrong(f"observation_names has {named} names, and it observes {seen}")

    def schemas(self) -> tuple[ToolSchema, ...]:
        """The function `act`, where actions are its calls."""
        if self.config.actions == "text":
            return ()
        action = {"type": "string", **({"enum": list(self._names)} if self._names else {})}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        about = {"name": ACT, "description": "takes an action", "parameters": parameters}
        return ({"type": "function", "function": about},)

    async def reset(self, problem: Problem, seed: int) -> Opening:
        """A game of the problem's own seed, and what one sees first."""
        game = Game(await self._run(self._made))
        seen, info = await self._run(lambda: game.env.reset(seed=episode_seed(problem)))
        text = self.config.instructions
        if text is None:
            text = "{actions}" if self.config.actions == "text" else ""
        shown = await self._seen(game, seen, info)
        asked = "" if game.mask is not None else self._asked()  # else `shown` ends with it
        parts = (text.replace("{actions}", asked).strip(), shown)
        return Opening(game, suffix="\n\n" + "\n\n".join(part for part in parts if part))

    async def step(self, state: object, turn: Turn) -> Observation:
        """What follows the action that `turn` names."""
        assert isinstance(state, Game)
        counts = {"calls": 1.0, "failed": 0.0}
        action, wrong = self._action(turn)
        if not wrong and self._names and state.mask is not None:
            allowed = state.mask[action - self._first]
            wrong = "" if allowed else f"'{self._names[action - self._first]}' is not possible now."
        if wrong:
            counts["failed"] = 1.0
            text = f"{wrong} {self._asked(state.mask)}"
            reward = self.config.illegal_reward
            return Observation("", False, state, counts, reply(turn.message, text), reward)
        step = await self._run(lambda: state.env.step(action))
        seen, reward, terminated, truncated, info = step
        text = await self._seen(state, seen, info)
        return Observation(
            "",
            bool(terminated),
            state,
            counts,
            reply(turn.message, text),
            float(reward),
            truncated=bool(truncated) and not terminated,
        )

    async def close(self, state: object) -> None:
        """Close the episode's environment."""
        assert isinstance(state, Game)
        await self._run(state.env.close)

    async def _run(self, call: Callable[[], Value]) -> Value:
        return await asyncio.to_thread(call) if self.config.threads else call()

    def _made(self) -> gymnasium.Env[Any, Any]:
        import gymnasium

        draws = {"render_mode": "ansi"} if self._draws and self.config.show != "observation" else {}
        try:
            return gymnasium.make(
                self.config.id, disable_env_checker=True, **{**draws, **self.config.kwargs}
            )
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
            raise self._wrong(reason) from error

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(f"environment 'gymnasium': {self.config.id}: {why}; correct its fields")

    def _asked(self, mask: Any = None) -> str:  # Any: an array of numpy, or None
        """What a turn has to name; of several actions those that are possible."""
        if not self._names:
            return "Answer with an action." if self.config.actions == "text" else "Call `act`."
        allowed = [name for i, name in enumerate(self._names) if mask is None or mask[i]]
        verb = "End your answer with" if self.config.actions == "text" else "Call `act` with"
        return f"{verb} one of these actions: {', '.join(allowed)}."

    def _action(self, turn: Turn) -> tuple[Any, str]:  # Any: a number or a text
        """The action of a turn, or why there is none."""
        if self.config.actions == "tool":
            call = turn.message.tool_calls[0] if turn.message.tool_calls else None
            given: Mapping[str, Any] = {} if call is None or call.name != ACT else call.arguments
            if set(given) != {"action"}:
                return None, "A call of `act` with the argument `action` is expected."
            text = str(given["action"])
        else:
            text = turn.message.content
            if self.config.pattern is not None:
                found = list(re.finditer(self.config.pattern, text, re.DOTALL))
                if not found:
                    return None, "No action was found in the answer."
                text = (found[-1][1] or "") if found[-1].re.groups else found[-1][0]
        if not self._names:
            return text.strip(), ""
        exact = self.config.actions == "tool" or self.config.pattern is not None
        number = named_last(text, self._names, exact=exact)
        return (None, "That is not an action.") if number is None else (self._first + number, "")

    async def _seen(self, game: Game, seen: Any, info: Mapping[str, Any]) -> str:  # Any: Gymnasium
        """The observation as text, the drawing, and the possible actions where some are not."""
        game.mask = info.get("action_mask")
        parts = []
        if self.config.show != "drawing":
            names = self.config.observation_names
            first = int(getattr(game.env.observation_space, "start", 0) or 0)
            text = names[int(seen) - first] if names else seen if isinstance(seen, str) else None
            parts.append(repr_of(seen) if text is None else text)
        if self._draws and self.config.show != "observation":
            parts.append(self._plain(str(await self._run(game.env.render))).strip("\n"))
        text = "\n".join(parts)[: self.config.max_chars]
        possible = game.mask is not None and self._names
        return f"{text}\n{self._asked(game.mask)}" if possible else text

    def _plain(self, text: str) -> str:
        """The drawing without codes of the terminal."""

        def shown(found: re.Match[str]) -> str:
            on = BACKGROUND.search(found[1])
            return self.config.highlight.replace("{text}", found[2]) if on else found[2]

        return CODE.sub("", STYLED.sub(shown, text))


def named_last(text: str, names: Sequence[str], *, exact: bool) -> int | None:
    """Which of `names` the text ends with, punctuation and case aside; with `exact` it is all."""
    for said in (text.strip().casefold(), re.sub(r"[\W_]+$", "", text).casefold()):
        ends = [
            (len(name), number)
            for number, name in enumerate(map(str.casefold, names))
            if said == name or (not exact and re.search(rf"(?:^|\W){re.escape(name)}$", said))
        ]
        if ends:
            return max(ends)[1]
    return None


def repr_of(value: Any) -> str:  # Any: an observation of any space
    """An observation in Python's notation, numbers of numpy as plain ones."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {repr_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(repr_of, value)) + ")"
    return repr(value.tolist()) if hasattr(value, "tolist") else repr(value)
