"""The environment `gymnasium`, with games of Gymnasium and a text game of this file."""

from __future__ import annotations

import asyncio
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text

from posttrain.core.contracts import Observation, Turn
from posttrain.core.errors import ConfigError
from posttrain.core.types import Message
from posttrain.plugins.environments.gymnasium import GymnasiumConfig, GymnasiumEnvironment
from tests.helpers.live_turns import called, during, played, problem, said, texts

LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "action_names": ["left", "down", "right", "up"],
}
TAXI = {
    "id": "Taxi-v4",
    "action_names": ["south", "north", "east", "west", "pick up", "drop off"],
}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]


class Guess(gymnasium.Env[str, str]):
    """A number is to be guessed within five turns."""

    observation_space = Text(100)
    action_space = Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.number, self.turns = int(self.np_random.integers(1, 100)), 0
        return "Guess a number from 1 to 99. <|im_end|>", {}

    def step(self, action: str) -> Any:
        self.turns += 1
        guess = int(action) if action.isdigit() else 0
        said = "right" if guess == self.number else "more" if guess < self.number else "less"
        return said, float(said == "right"), said == "right", self.turns == 5, {}


gymnasium.register("Guess-v0", entry_point=Guess)


def environment(**fields: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(GymnasiumConfig.model_validate(fields))


def answers(turns: list[Turn], seed: int = 7, **fields: Any) -> tuple[str, list[Observation]]:
    return during(environment(**fields), lambda e: played(e, turns, problem(seed)))


def test_a_game_is_won_by_actions_that_are_named() -> None:
    opening, found = answers([said(f"I think: {name}.") for name in TO_THE_GOAL], **LAKE)
    assert opening == (
        "\n\nEnd your answer with one of these actions: left, down, right, up.\n\n"
        "0\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    assert "\x1b" not in "".join(texts(found))
    assert texts(found)[0].startswith("4\n  (Down)\nSFFF\n[F]HFH")
    assert [f.reward for f in found] == [0.0] * 5 + [1.0]
    assert [f.done for f in found] == [False] * 5 + [True]
    assert all(f.counts == {"calls": 1.0, "failed": 0.0} for f in found)


def test_the_end_and_the_cut_of_a_game_are_told_apart() -> None:
    hole = answers([said("right"), said("down")], **LAKE)[1][-1]
    assert hole.done and not hole.truncated and hole.reward == 0.0
    limited = {**LAKE, "kwargs": {"is_slippery": False, "max_episode_steps": 2}}
    cut = answers([said("left")] * 3, **limited)[1]
    assert len(cut) == 2 and cut[-1].truncated and not cut[-1].done


@pytest.mark.parametrize("text", ["", "up up and away", "jump", "drown", "\x00", "a" * 100_000])
def test_what_is_no_action_is_answered_and_counted_and_changes_nothing(text: str) -> None:
    turns = [said("down"), said(text), said("down")]
    _, found = answers(turns, **LAKE, illegal_reward=-0.5)
    assert found[1].counts == {"calls": 1.0, "failed": 1.0} and found[1].reward == -0.5
    assert "left, down, right, up" in texts(found)[1] and not found[1].done
    assert texts(found)[2].startswith("8\n")


def test_only_the_actions_that_the_game_allows_are_shown_and_taken() -> None:
    opening, found = answers([said("pick up"), said("south")], **TAXI)
    assert opening.endswith("End your answer with one of these actions: south, north.")
    assert opening.count("End your answer") == 1
    assert texts(found)[0].startswith("'pick up' is not possible now.")
    assert [f.reward for f in found] == [0.0, -1.0]
    assert texts(found)[1].endswith("these actions: north, pick up.")


def test_the_seed_of_a_problem_decides_where_all_its_episodes_begin() -> None:
    turns = [said("hit"), said("stick")]
    played_twice = [answers(turns, 3, id="Blackjack-v1", action_names=["stick", "hit"])] * 2
    assert played_twice[0] == played_twice[1]
    begun = {answers([], seed, id="Blackjack-v1")[0] for seed in range(8)}
    assert len(begun) > 4
    assert "(np." not in "".join(begun)


def test_a_text_game_takes_the_whole_answer_and_is_cut_after_its_turns() -> None:
    async def guess(env: Any) -> Any:
        low, high = 1, 99
        opening = await env.reset(problem(11), 0)
        for _ in range(7):
            found = await env.step(opening.state, said(f" {(low + high) // 2}\n"))
            answer = found.messages[0].content
            if answer == "right" or found.truncated:
                break
            middle = (low + high) // 2
            low, high = (middle + 1, high) if answer == "more" else (low, middle - 1)
        await env.close(opening.state)
        return found

    found = during(environment(id="Guess-v0"), guess)
    assert (found.reward == 1.0) == found.done and found.done != found.truncated


def test_actions_as_calls_of_a_function() -> None:
    env = environment(**LAKE, actions="tool")
    turns = [called("act", action="down"), called("act", action="fly"), called("jump"), said("up")]
    _, found = during(env, lambda e: played(e, turns))
    (schema,) = env.schemas()
    assert schema["function"]["parameters"]["properties"]["action"]["enum"][1] == "down"
    assert [f.counts["failed"] for f in found] == [0.0, 1.0, 1.0, 1.0]
    first = found[0].messages[0]
    assert (first.role, first.name, first.tool_call_id) == ("tool", "act", "call00000")
    assert found[3].messages[0].role == "user"
    two = Turn("", True, Message("assistant", tool_calls=turns[0].message.tool_calls * 2))
    _, found = during(environment(**LAKE, actions="tool"), lambda e: played(e, [two]))
    assert len(found[0].messages) == 2 and found[0].messages[1].content.startswith("error: one")


def test_a_pattern_reads_the_action() -> None:
    fields = {**LAKE, "pattern": r"<move>(.*?)</move>"}
    turns = [said("<move>left</move> no, <move> Down </move> it is"), said("down")]
    _, found = answers(turns, **fields)
    assert [f.counts["failed"] for f in found] == [0.0, 1.0]


def test_names_of_observations_and_threads() -> None:
    names = [f"field {n}" for n in range(16)]
    fields = {**LAKE, "observation_names": names, "show": "observation", "threads": True}
    opening, found = answers([said("down")], **fields)
    assert opening.endswith("\n\nfield 0") and texts(found) == ["field 4"]


def test_many_games_at_once_stay_apart() -> None:
    async def many(env: Any) -> Any:
        turns = [said(name) for name in TO_THE_GOAL]
        ways = [turns[: n % 7] for n in range(200)]
        return await asyncio.gather(*(played(env, way) for way in ways))

    found = during(environment(**LAKE), many)
    won = [sum(f.reward or 0.0 for f in rewards) for _, rewards in found]
    assert won == [float(n % 7 == 6) for n in range(200)]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLak-v1: Environment `FrozenLak` doesn't exist"),
        ({"id": "FrozenLake-v1", "kwargs": {"size": 9}}, "unexpected keyword argument 'size'"),
        ({"id": "no_such_module:Game-v0"}, "no_such_module"),
        ({"id": "FrozenLake-v1", "action_names": ["a"]}, "has 4 actions and action_names names 1"),
        ({"id": "FrozenLake-v1", "observation_names": ["a"]}, "observation_names has 1 names"),
        ({"id": "Blackjack-v1", "show": "drawing"}, "does not draw as text"),
        ({"id": "Pendulum-v1"}, "only Discrete and Text"),
    ],
)
def test_what_cannot_be_played_is_refused_when_it_starts(fields: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=r"correct its fields|pip install") as raised:
        during(environment(**fields), lambda e: played(e, []))
    assert says in str(raised.value)
