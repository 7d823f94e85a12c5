"""A model that answers chats token by token, with the renderer and system prompt of its run."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.config.schema import RunConfig
from posttrain.core.config.sections import ModelSection
from posttrain.core.contracts import DrawnToken, EngineSetup, Renderer, RolloutEngine
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ConfigError, DataError, PosttrainError, reading_model
from posttrain.core.models.device import ModelRuntime
from posttrain.core.models.quiet import quiet_libraries
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.types import Message, SamplingParams, ToolSchema
from posttrain.pipelines.run.model_reference import FoundModel, context_length

ENGINE = "transformers"
LONGEST = 32768
"""Tokens of prompt and answer, where neither the user nor the model says less."""
MOST_AT_ONCE = 16
COLDEST = 1e-5
"""Temperatures below it are greedy, as for vLLM."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character that is not complete yet are decoded to."""

OnText = Callable[[int, str], None]
"""Called with the number of an answer and the text that was just added to it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said. `message` has reasoning and tool calls apart from the text.

    `text` is the same as the model wrote it, without its end; `finish` is `stop`, `length` or, for
    a request that was stopped, `cancelled`: that has no log-probs. `seconds` is the time of the
    whole request.
    """

    text: str
    message: Message
    finish: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    seconds: float

    def to_json(self) -> dict[str, object]:
        """What `--json` shows of it."""
        return {
            "text": self.text,
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "tokens": len(self.token_ids),
            "seconds": round(self.seconds, 3),
        }


class Cancelled(Exception):
    """Raised by whoever listens to tokens, to end a request; the answers so far are kept."""


@dataclass
class _Heard:
    """The text of one answer while its tokens come in."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    shown: int = 0


def chat_section(found: FoundModel) -> ModelSection:
    """How the run that made the model held it: renderer, system prompt, precision.

    The defaults of a config for a model that no run of this home made.
    """
    config = _run_config(found)
    return ModelSection() if config is None else config.model


def _run_config(found: FoundModel) -> RunConfig | None:
    try:
        return found.config()
    except PosttrainError:
        return None  # of a plugin or a version that is not here any more


def unread_config(found: FoundModel) -> str:
    """A note that the run's config cannot be read, and what is used instead; empty if it can."""
    try:
        found.config()
    except PosttrainError as error:
        return (
            f"note: the config of the run cannot be read, so its system prompt and renderer are "
            f"not used, but the defaults: {error}"
        )
    return ""


def architectures(found: FoundModel) -> list[str]:
    """The classes that the model's config names; raises `ResourceError` for one not of JSON."""
    expected = "expected a JSON object"
    with reading_model(f"model directory '{found.path}' has no usable config.json", expected):
        config = json.loads((found.path / "config.json").read_text("utf-8"))
        return [str(name) for name in config.get("architectures") or ()]


def check_talks(found: FoundModel) -> None:
    """Raise `ConfigError` for a reward model, which writes no text."""
    classes = architectures(found)
    if found.kind == "reward_model" or any(n.endswith("Classification") for n in classes):
        raise ConfigError(
            f"'{found.given}' is a reward model ({found.origin}): it scores texts and writes none; "
            "name a stage that trains a policy, as RUN/STAGE"
        )


class Speaker:
    """A loaded model. One request at a time: others wait.

    Raises `ResourceError` for a model that cannot be loaded or sampled from.
    """

    def __init__(
        self,
        found: FoundModel,
        manager: PluginManager,
        *,
        max_model_len: int | None = None,
        dtype: str | None = None,
    ) -> None:
        check_talks(found)
        quiet_libraries()
        section = chat_section(found)
        if dtype is not None:
            section = section.model_copy(update={"dtype": dtype})
        runtime = ModelRuntime.from_config(section)
        if (config := _run_config(found)) is not None:
            manager.add_files(config.plugin_files)  # a renderer may be a file of the run's
        renderer: Renderer[Any] = manager.build(
            Renderer, section.renderer.name, section.renderer.fields()
        )
        self.found = found
        self.tokenizer = ChatTokenizer.load(found.path, section.system_prompt, renderer)
        limit = context_length(found.path, LONGEST)
        self.max_model_len = min(limit, max_model_len or limit)
        self._engine: RolloutEngine[Any] = manager.build(RolloutEngine, ENGINE, {})
        self._lock = threading.Lock()
        self._engine.start(
            EngineSetup(
                model_dir=found.path,
                dtype=runtime.dtype,
                device=runtime.device,
                max_model_len=self.max_model_len,
                max_batch_size=MOST_AT_ONCE,
                stop_token_ids=self.tokenizer.end_token_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                seed=0,
            )
        )

    def close(self) -> None:
        """Free the model."""
        self._engine.close()

    def complete(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_text: OnText | None = None,
        *,
        tools: Sequence[ToolSchema] = (),
    ) -> list[Answer]:
        """`params.num_generations` answers after the tokens of `prompt`, cut where the room ends.

        `tools` are those that the prompt offers, by whose schemas calls are read.

        `on_text` gets each piece of text once no later token can change it. It may raise
        `Cancelled`: then the answers so far are returned. Raises `DataError` where the prompt
        leaves no room.
        """
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise DataError(
                f"the conversation has {len(prompt)} tokens and the model's context "
                f"{self.max_model_len}: begin a new one, or shorten it"
            )
        # Logits divided by less than that overflow.
        temperature = params.temperature if params.temperature >= COLDEST else 0.0
        limit = min(params.max_tokens, room)
        params = replace(params, max_tokens=limit, temperature=temperature)
        heard = [_Heard() for _ in range(params.num_generations)]
        began = time.perf_counter()

        def listen(drawn: Sequence[DrawnToken]) -> None:
            for one in drawn:
                self._hear(heard[one.generation], one, params.stop_strings, on_text)

        with self._lock:
            self._engine.on_tokens = listen
            try:
                (made,) = self._engine.generate([prompt], params)
            except (Cancelled, KeyboardInterrupt):
                made = []
            finally:
                self._engine.on_tokens = None
        seconds = time.perf_counter() - began
        rows = [(c.token_ids, c.logprobs, _finish(c.finish_reason)) for c in made]
        rows = rows or [(tuple(one.ids), (), "cancelled") for one in heard]
        size, stops = len(prompt), params.stop_strings
        answers = [
            Answer(*self._read(ids, stops, tools), finish, ids, logprobs, size, seconds)
            for ids, logprobs, finish in rows
        ]
        if on_text is not None:
            with contextlib.suppress(Cancelled):
                for number, (one, answer) in enumerate(zip(heard, answers, strict=True)):
                    if rest := answer.text[one.shown :]:
                        on_text(number, rest)
        return answers

    def _hear(
        self, one: _Heard, drawn: DrawnToken, stops: Sequence[str], on_text: OnText | None
    ) -> None:
        """Tell the listener what this token added, but no text that may still become a stop."""
        one.ids.append(drawn.token)
        if on_text is None:
            return
        one.text = self.tokenizer.decode_response(one.ids)
        if one.text.endswith(UNFINISHED):
            return
        held = max(map(len, stops), default=1) - 1
        text = cut_at(one.text, stops)
        end = len(text) if len(text) < len(one.text) else len(text) - held
        if end > one.shown:
            piece, one.shown = text[one.shown : end], end
            on_text(drawn.generation, piece)

    def _read(
        self, ids: Sequence[int], stops: Sequence[str], tools: Sequence[ToolSchema]
    ) -> tuple[str, Message]:
        """Text and message of an answer."""
        said = self.tokenizer.parse_response(ids, tools)
        text = cut_at(self.tokenizer.decode_response(ids), stops)
        return text, replace(said, content=cut_at(said.content, stops))


def _finish(reason: str) -> str:
    return "stop" if reason == "stop_string" else reason


def cut_at(text: str, stops: Sequence[str]) -> str:
    """`text` before the first of `stops`."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
