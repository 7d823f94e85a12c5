"""`posttrain chat`: talk to a model, or to two side by side."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

if TYPE_CHECKING:
    from posttrain.pipelines.run.model_reference import FoundModel

EPILOG = (
    "Examples:\n\n"
    "  posttrain chat 3f2a9c\n\n"
    "  posttrain chat 3f2a9c/sft --compare base --prompt '12 + 30 = ?'\n\n"
    "  posttrain chat models:/quickstart@candidate --system 'Be brief.' --temperature 0\n\n"
    "  printf 'Hello\\nAnd now?\\n' | posttrain chat ./my-model\n\n"
    "In the chat: /reset, /system TEXT, /save FILE (a row of messages, which `posttrain data show` "
    "and sft stages read), /help, /quit. Each line that is piped in is a turn; --prompt - reads "
    "all of it as one. Answers go to standard output, all else to stderr. The same seed, "
    "conversation and settings give the same answer. Renderer, system prompt and precision are "
    "those of the run that made the model.\n\n" + EPILOG_CODES
)
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run's id or its start (its last model), RUN/STAGE, a folder, a hub's id, "
        "models:/NAME@ALIAS or models:/NAME/VERSION.",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Literal["auto", "bfloat16", "float32"] | None,
    typer.Option("--dtype", help="Precision.  \\[default: that of the run]", show_default=False),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=8,
        help="Tokens of a whole conversation, at most.  \\[default: the model's context]",
        show_default=False,
    ),
]


@command(store=True)
def chat(
    context: CommandContext,
    model: ModelArgument,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A second model that is asked the same; base = the base model of the run.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Ask this alone, and end; - reads it from standard input.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="System prompt.  \\[default: that of the run, or of the model]"),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 = greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="0 = off.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: DtypeOption = None,
    max_model_len: MaxModelLenOption = None,
) -> Result:
    """Talk to a model: what a run made, a registered one, a folder, or a model of a hub."""
    from posttrain.core.types import SamplingParams
    from posttrain.pipelines.run.model_reference import base_of, find_model

    for option, value in (("--temperature", temperature), ("--top-p", top_p)):
        if not math.isfinite(value):
            raise ConfigError(f"{option} is {value}, expected a finite number")
    if top_p == 0:
        raise ConfigError("--top-p is 0, expected above 0 and at most 1; --temperature 0 is greedy")
    if any(not text for text in stop or ()):
        raise ConfigError("--stop is empty, expected the text that ends an answer")
    "".join([prompt or "", system or "", *(stop or ())]).encode()  # raises for bytes that are none
    found = [find_model(model, context.home, context.store)]
    if compare == "base":
        found.append(base_of(found[0], context.home, context.store))
    elif compare is not None:
        found.append(find_model(compare, context.home, context.store))
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.pipelines.using.chat import HELP, Chat, Conversation, one_shot, result, talk
    from posttrain.pipelines.using.speaker import Speaker, check_talks, unread_config

    for one in found:
        check_talks(one)
    text = None if prompt is None else one_shot(prompt)
    manager, labels = PluginManager(), _labels(found, compare)
    conversations = []
    for one, label in zip(found, labels, strict=True):
        print(f"{label}: {one.origin}, digest {one.digest[:12]}", file=sys.stderr, flush=True)
        if note := unread_config(one):
            print(note, file=sys.stderr, flush=True)
        speaker = Speaker(one, manager, max_model_len=max_model_len, dtype=dtype)
        conversations.append(Conversation(label, speaker, system))
    console = context.console()
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_strings=tuple(stop or ()),
    )
    asked = Chat(conversations, params, console, side_by_side=console.is_terminal)
    if text is not None:
        asked.ask(text)
    elif sys.stdin.isatty():
        print(HELP, file=sys.stderr)
        talk(asked, None)
    else:
        talk(asked, sys.stdin)
    return Result(result(asked))


def _labels(found: list[FoundModel], compare: str | None) -> list[str]:
    """A short name of each model, all different."""
    labels = [f"{m.run_id[:8]}/{m.stage}" if m.run_id else short_name(m) for m in found]
    if compare == "base":
        labels[1] = "base"
    return labels if len(set(labels)) == len(labels) else [model.given for model in found]


def short_name(found: FoundModel) -> str:
    """As it was given; of a folder its last part."""
    return Path(found.given).name if Path(found.given).expanduser().is_dir() else found.given
