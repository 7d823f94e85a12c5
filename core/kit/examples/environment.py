"""An environment: the model may ask for a hint."""

from __future__ import annotations

from pydantic import Field

from posttrain.core.contracts import Environment, Observation, Opening, PluginConfig, Turn
from posttrain.core.types import Problem

ASK = "<hint/>"


class ExampleConfig(PluginConfig):
    """Settings of `example`."""

    max_hints: int = Field(default=2, ge=1, le=100, description="hints of an episode, at most")


class Example(Environment[ExampleConfig]):
    """observation = the length of the answer, after each `<hint/>`. Source: an example.

    The state is a value, (length, hints given): `step` returns the next one and changes nothing.
    """

    name = "example"
    Config = ExampleConfig

    def stop_strings(self) -> tuple[str, ...]:
        """A turn ends with its request for a hint."""
        return (ASK,)

    def reset(self, problem: Problem) -> Opening:
        """The beginning: what the prompt says of hints, and the first state."""
        return Opening((len(problem.answer), 0), suffix=f"\nWrite {ASK} for a hint.")

    def step(self, state: object, turn: Turn) -> Observation:
        """The hint; the end where the model ended its answer, or no hint is left."""
        assert isinstance(state, tuple)
        length, given = state
        if turn.ended or given >= self.config.max_hints:
            return Observation("", done=True, state=state)
        text = f"\nThe answer has {length} characters.\n"
        return Observation(text, done=False, state=(length, given + 1), counts={"calls": 1.0})
