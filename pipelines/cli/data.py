"""`posttrain data show`: what a data file is taken for, before a run reads it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.core.errors import DataError, ResourceError
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.core.data.overview import Overview, Pieces
    from posttrain.core.data.tokens import ChatTokenizer

MOST_SHOWN = 4000
"""Characters of a row that are printed."""

app = typer.Typer(no_args_is_help=True, help="Look at data files before a run reads them.")
EPILOG = (
    "Examples:\n\n"
    "  posttrain data show chats.jsonl\n\n"
    "  posttrain data show train.parquet --model ./model --rows 1\n\n"
    "  posttrain data show hub:openai/gsm8k/main#train --json\n\n"
    "Green text is what a stage learns: the assistant's messages of an sft stage, the answers of "
    "preferences; a prompt for RL has none. Without colour it stands between {+ and +}. With a "
    "model the rows are its tokens, special tokens included; without --model the quickstart's "
    "model is used where it is on this disk. Files: JSON, JSON Lines, CSV, TSV, Parquet, Arrow, "
    "Feather, also with .gz; a folder of one kind; "
    "hub:owner/name\\[/subset]\\[@revision]\\[#split]. "
    "The command exits with 3 when rows have problems.\n\n" + EPILOG_CODES
)


@app.command("show", epilog=EPILOG)
@command()
def show(
    context: CommandContext,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File, folder or hub:owner/name.")],
    model: Annotated[
        str | None, typer.Option(help="Model whose tokens are shown: a folder, a hub's id, a run.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=8, help="Tokens that a run allows (model.max_model_len).  \\[default: 1024]"
        ),
    ] = None,
    max_response: Annotated[
        int, typer.Option(min=1, help="Tokens that a prompt for RL leaves to its response.")
    ] = 16,
) -> Result:
    """Show what FILE is taken for, some rows with what is learned, lengths and problems."""
    from posttrain.core.config.sections import ModelSection
    from posttrain.core.data.overview import overview  # torch and transformers take seconds
    from posttrain.core.models.source import given_model

    section = ModelSection() if model is None else given_model("--model", model)
    tokenizer = _tokenizer(section, context, needed=model is not None)
    found = overview(file, rows, tokenizer)
    limit = max_model_len or section.max_model_len
    values = _values(found, tokenizer, limit, max_response)
    if tokenizer is not None:
        values["model"] = section.source
    _print(context, found, tokenizer, values)
    return Result(values, DataError.exit_code if found.num_problems else 0)


def _tokenizer(section: Any, context: CommandContext, *, needed: bool) -> ChatTokenizer | None:
    """The model's tokenizer if it is on this disk."""
    from posttrain.core.data.tokens import ChatTokenizer
    from posttrain.core.models.source import check_source, known_folder

    if needed:
        from posttrain.pipelines.run.model_reference import find_base

        section = find_base(section, context.home, context.store).section
        check_source(section)
    folder = known_folder(section, context.home / "models")
    if folder is not None:
        return ChatTokenizer.load(folder)
    if needed:
        raise ResourceError(
            f"no copy of the model '{section.source}' is on this disk: give the folder of a model "
            "as --model, or leave it out to count characters"
        )
    return None


def _values(
    found: Overview, tokenizer: ChatTokenizer | None, limit: int, response: int
) -> dict[str, Any]:  # Any: JSON
    from posttrain.core.data.overview import spread

    room = limit - response if found.taken.purpose == "rl" else limit
    return {
        "status": "ok" if not found.num_problems else "problems",
        "source": found.source,
        "purpose": found.taken.purpose,
        "format": found.taken.format,
        "why": found.taken.why,
        "use": found.taken.use,
        "rows": found.rows,
        "characters": spread(found.chars),
        "tokens": spread(found.tokens),
        "learned_tokens": found.learned,
        "model": None,
        "max_model_len": limit,
        "left_out": None if tokenizer is None else sum(length > room for length in found.tokens),
        "duplicates": found.duplicates,
        "duplicate": found.duplicate,
        "num_problems": found.num_problems,
        "problems": found.problems,
        "shown": [
            {
                "where": look.where,
                "answer": look.answer,
                "verifier": look.judged_by,
                "conversations": [
                    {"name": said.name, "pieces": _pieces(said, found, tokenizer)}
                    for said in look.conversations
                ],
            }
            for look in found.shown
        ],
    }


def _pieces(said: Any, found: Overview, tokenizer: ChatTokenizer | None) -> Pieces:
    from posttrain.core.data.overview import text_pieces, token_pieces

    if tokenizer is None:
        return text_pieces(said)
    return token_pieces(said, tokenizer, found.taken.purpose)


def _print(
    context: CommandContext,
    found: Overview,
    tokenizer: ChatTokenizer | None,
    values: dict[str, Any],
) -> None:
    from posttrain.core.analysis.report import printable

    say = context.say
    say(f"{found.source}: {found.taken.format}, because {found.taken.why}")
    say(f"rows: {found.rows:,}")
    for look, shown in zip(found.shown, values["shown"], strict=True):
        for said in shown["conversations"]:
            say(f"\n--- {look.where}" + (f", {said['name']}" if said["name"] else ""))
            _print_pieces(context.console(), said["pieces"])
        if found.taken.purpose == "rl":
            say(
                f"answer: {printable(look.answer)} (compared by {look.judged_by})"
                if look.judged_by != "none"
                else "no answer that a verifier reads"
            )
    say(f"\n{_lengths('characters', values['characters'])}")
    if tokenizer is not None:
        what = "prompts" if found.taken.purpose == "rl" else f"{found.learned:,} learned"
        say(f"{_lengths('tokens', values['tokens'])} ({what}; model {values['model']})")
        say(f"left out at max_model_len {values['max_model_len']}: {values['left_out']:,} rows")
    else:
        say("tokens are not counted without a model: give one with --model")
    also = f", such as {found.duplicate}" if found.duplicates else ""
    say(f"duplicates: {found.duplicates:,}{also}")
    for problem in found.problems:
        say(f"problem: {problem}", "red")
    if found.num_problems > len(found.problems):
        say(f"{found.num_problems - len(found.problems):,} more rows have problems")
    say(f"in a config: {found.taken.use}")


def _lengths(name: str, lengths: dict[str, int]) -> str:
    if not lengths:
        return f"{name}: no row could be read"
    return (
        f"{name}: min {lengths['min']:,}, median {lengths['median']:,}, 95 % {lengths['p95']:,}, "
        f"max {lengths['max']:,}"
    )


def _print_pieces(console: Console, pieces: Pieces) -> None:
    """Print learned text green and bold and the rest dim; without colour, mark it as {+text+}."""
    from rich.text import Text

    from posttrain.core.analysis.report import printable

    colour = console.is_terminal and not os.environ.get("NO_COLOR")
    line, room = Text(), MOST_SHOWN
    for text, learned in pieces:
        part = printable(text[:room])
        room -= len(text[:room])
        if colour:
            line.append(part, "bold green" if learned else "dim")
        else:
            line.append(f"{{+{part}+}}" if learned else part)
    left = sum(len(text) for text, _ in pieces) - MOST_SHOWN
    if left > 0:
        line.append(f" [... {left:,} more characters]")
    console.print(line)
