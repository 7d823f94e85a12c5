"""The environment `terminal` for a model of a few characters: all that it writes goes to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posttrain.core.contracts import Observation, Turn
from posttrain.core.types import Message, ToolCall, ToolSchema
from posttrain.plugins.environments.terminal import TerminalEnvironment


class TypedShell(TerminalEnvironment):
    """As `terminal`; each turn is `printf TEXT >> answer`, the second also ends. Source: a test."""

    name = "typed_shell"

    def schemas(self) -> tuple[ToolSchema, ...]:
        return ()

    async def step(self, state: object, turn: Turn) -> Observation:
        command = f"printf %s '{turn.text}' >> answer; wc -c < answer"
        call = ToolCall("bash", {"command": command}, "call00000")
        said = Turn("", True, Message("assistant", tool_calls=(call,)))
        found = await super().step(state, said)
        told = tuple(Message("user", message.content[:1]) for message in found.messages)
        return replace(found, messages=told)


def task_folder(folder: Path, wanted: str) -> Path:
    """A task whose tests give the share of the answer's characters that are `wanted`."""
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 60\n")
    (folder / "instruction.md").write_text(f"{wanted}\n")
    (folder / "tests" / "test.sh").write_text(
        f"n=$(tr -cd {wanted} < answer | wc -c); all=$(wc -c < answer)\n"
        'awk "BEGIN { print $n / ($all + 1) }" > /logs/verifier/reward.txt\n'
    )
    return folder
