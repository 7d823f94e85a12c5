"""Conversations at a terminal with one model, or with two side by side."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from posttrain.core.analysis.report import printable
from posttrain.core.errors import ConfigError, DataError, PosttrainError, ResourceError
from posttrain.core.types import Message, SamplingParams
from posttrain.pipelines.using.speaker import Answer, Speaker

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

HELP = (
    "/reset begins a new conversation, /system TEXT also sets the system prompt (without TEXT the "
    "model's own), /save FILE appends the conversation as a row of messages, /quit or Ctrl-D ends; "
    "Ctrl-C stops an answer"
)


@dataclass
class Conversation:
    """What one model was asked and said. Tokens that were sampled are never rendered again."""

    label: str
    speaker: Speaker
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages, self.answers, self._tokens = [], [], []

    def ask(self, text: str, params: SamplingParams, on_text: Callable[[str], None]) -> Answer:
        """The model's answer to the user's next message; `on_text` gets it piece by piece.

        Raises `DataError`, with nothing changed, where the context has no room for it.
        """
        said, tokenizer = Message("user", text), self.speaker.tokenizer
        added = [said]
        if self.answers:
            # A stop string ends an answer too, and leaves the turn open.
            last = next(iter(self.answers[-1].token_ids[-1:]), None)
            ended = last in tokenizer.end_token_ids
            prompt = [*self._tokens, *tokenizer.extend([said], ended=ended, last=last)]
        else:
            if self.system is not None:
                added.insert(0, Message("system", self.system))
            prompt = list(tokenizer.encode_chat(added))
        (answer,) = self.speaker.complete(prompt, params, lambda _, piece: on_text(piece))
        self.messages += [*added, answer.message]
        self.answers.append(answer)
        self._tokens = [*prompt, *answer.token_ids]
        return answer

    def state(self) -> tuple[list[Message], list[Answer], list[int]]:
        """A copy of what was said so far: messages, answers, tokens."""
        return list(self.messages), list(self.answers), list(self._tokens)

    def row(self) -> dict[str, object]:
        """The conversation as a row of a data file."""
        from posttrain.core.data.messages import message_to_json

        return {"messages": [message_to_json(message) for message in self.messages]}


class Chat:
    """One or two conversations that are asked the same."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        params: SamplingParams,
        console: Console,
        *,
        side_by_side: bool,
    ) -> None:
        self.conversations, self.params, self.console = list(conversations), params, console
        self.side_by_side = side_by_side and len(conversations) > 1

    def ask(self, text: str) -> list[Answer]:
        """Ask every model, and show its answer while it is written.

        Where one of them cannot be asked, no conversation keeps the turn: all go on from the same.
        """
        before = [one.state() for one in self.conversations]
        try:
            return self._ask_in_columns(text) if self.side_by_side else self._ask_in_turn(text)
        except PosttrainError:
            for one, state in zip(self.conversations, before, strict=True):
                one.messages, one.answers, one._tokens = state
            raise

    def _ask_in_turn(self, text: str) -> list[Answer]:
        answers = []
        for one in self.conversations:
            if len(self.conversations) > 1:
                self._print(f"[{one.label}]", style="bold")
            answers.append(one.ask(text, self.params, lambda piece: self._print(piece, end="")))
            self._print("")
            if note := ending(answers[-1]):
                self._say(note)
        return answers

    def _ask_in_columns(self, text: str) -> list[Answer]:
        from rich.live import Live

        shown = ["" for _ in self.conversations]
        answers = []
        with Live(self._columns(shown), console=self.console, transient=True) as live:
            for number, one in enumerate(self.conversations):

                def add(piece: str, number: int = number) -> None:
                    shown[number] += printable(piece)
                    live.update(self._columns(shown))

                answers.append(one.ask(text, self.params, add))
                shown[number] += f" {ending(answers[-1])}".rstrip()
        # What is longer than the screen is shown whole only now.
        self.console.print(self._columns(shown))
        return answers

    def _columns(self, texts: Sequence[str]) -> RenderableType:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.MINIMAL, expand=True)
        for one in self.conversations:
            table.add_column(one.label, ratio=1, overflow="fold")
        table.add_row(*(Text(text) for text in texts))
        return table

    def command(self, line: str) -> bool:
        """Do what a line that begins with `/` says; False where it ends the chat."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("quit", "exit"):
            return False
        if name == "reset":
            self._reset()
        elif name == "system":
            for one in self.conversations:
                one.system = rest or None
            self._reset()
        elif name == "save":
            self._say(save(self.conversations, rest))
        elif name == "help":
            self._say(HELP)
        else:
            self._say(f"unknown command '/{name}': {HELP}")
        return True

    def _reset(self) -> None:
        for one in self.conversations:
            one.reset()
        self._say("a new conversation")

    def _say(self, text: str) -> None:
        """A word to the person, not a part of any answer."""
        from rich.console import Console

        Console(stderr=True).print(text, markup=False, highlight=False, style="dim")

    def _print(self, text: str, end: str = "\n", style: str | None = None) -> None:
        text = printable(text)
        self.console.print(
            text, end=end, style=style, markup=False, highlight=False, soft_wrap=True
        )
        self.console.file.flush()


def ending(answer: Answer) -> str:
    """What is to be said of how an answer ended; empty for one that ended by itself."""
    if answer.finish == "stop":
        return "" if answer.text.strip() else "[an empty answer]"
    return {"length": "[cut at the length limit]", "cancelled": "[stopped]"}[answer.finish]


def save(conversations: Sequence[Conversation], name: str) -> str:
    """Append the conversations to a JSON Lines file; returns what was done, in words."""
    if not name:
        return "/save needs a file: /save chats.jsonl"
    spoken = [one for one in conversations if one.messages]
    if not spoken:
        return "nothing was said yet: nothing is saved"
    path = Path(name).expanduser()
    rows = "".join(json.dumps(one.row(), ensure_ascii=False) + "\n" for one in spoken)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(rows)
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    of = f", of {' and '.join(one.label for one in spoken)}" if len(spoken) > 1 else ""
    return f"{len(spoken)} conversation(s) appended to {path}{of}"


def talk(chat: Chat, lines: TextIO | None) -> None:
    """Ask what a person types, or each of `lines`, until the end of the input or `/quit`.

    A line that cannot be asked is reported, and the conversation stays as it is; from `lines` it
    ends the command with its error.
    """
    for line in _typed() if lines is None else (line.rstrip("\n") for line in lines):
        if not line.strip():
            continue
        if line.startswith("/"):
            if not chat.command(line):
                return
            continue
        try:
            chat.ask(line)
        except (DataError, ConfigError, ResourceError) as error:
            if lines is not None:
                raise
            print(f"error: {error}", file=sys.stderr)


def _typed() -> Iterator[str]:
    """Lines that a person types, with the editing keys that readline has."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() uses it
    while True:
        try:
            yield input("you> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def one_shot(text: str) -> str:
    """The prompt of `--prompt`; of `-` all of standard input."""
    if text != "-":
        return text
    read = sys.stdin.read()
    if not read.strip():
        raise DataError("--prompt - reads the prompt from standard input, which is empty")
    return read


def result(chat: Chat) -> dict[str, object]:
    """What `--json` prints: every model, what was said, and the last answers."""
    return {
        "models": [
            {
                "label": one.label,
                "model": one.speaker.found.given,
                "origin": one.speaker.found.origin,
                "digest": one.speaker.found.digest,
                "run_id": one.speaker.found.run_id,
                "stage": one.speaker.found.stage,
                **one.row(),
                "answers": [answer.to_json() for answer in one.answers],
            }
            for one in chat.conversations
        ]
    }
