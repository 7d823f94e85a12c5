"""`posttrain init`: five questions, then a commented config for one's own data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from posttrain.core.errors import ConfigError, DataError, PosttrainError, nearest
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.schema import SCHEMA_FILE, header, schema_text, write_schema
from posttrain.pipelines.run.first_config import (
    FOR_PURPOSE,
    LENGTHS,
    METHODS,
    Plan,
    first_config,
)

if TYPE_CHECKING:
    from posttrain.core.data.overview import Overview
    from posttrain.core.plugin_manager import PluginManager

T = TypeVar("T")
CONFIG_FILE = "posttrain.yaml"
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_TASK = "arithmetic"
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
CHARS_PER_TOKEN = 3
"""For lengths without a tokenizer at hand; English has about four."""
EPILOG = (
    "Examples:\n\n"
    "  posttrain init\n\n"
    "  posttrain init support-bot --data chats.jsonl --yes\n\n"
    "  posttrain init --model ./model --data problems.jsonl --method sft+rl --yes\n\n"
    "  posttrain init --model ./small --teacher ./large --data problems.jsonl --yes\n\n"
    "  posttrain init --data gsm8k --method rl --reward math_accuracy --length long --yes\n\n"
    f"Writes {CONFIG_FILE} and {SCHEMA_FILE}, by which editors complete and check it. With --yes "
    "every question that no option answers has its default. `posttrain data show FILE` tells more "
    "about a file.\n\n" + EPILOG_CODES
)


@command()
def init(
    context: CommandContext,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for the config; made if missing.")
    ] = Path("."),
    model: Annotated[
        str | None, typer.Option(help="Base model: hub id, folder or models:/NAME@alias.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TASK",
            help="Your file, hub:owner/name, or a task such as arithmetic or gsm8k.",
            autocompletion=lambda incomplete: complete.files(incomplete, DATA_SUFFIXES),
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(METHODS)}.", autocompletion=lambda: list(METHODS)),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,field=value]", help="What rl rewards.", autocompletion=complete.plugins
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With distill: the larger model, a folder, of the same tokenizer or another.",
            autocompletion=lambda incomplete: complete.files(incomplete, ()),
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(LENGTHS)}.", autocompletion=lambda: list(LENGTHS)),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing; take the defaults.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a config that is there.")
    ] = False,
) -> Result:
    """Write a commented config for your own data, after five questions."""
    path = folder / CONFIG_FILE
    if path.exists() and not overwrite:
        if yes or not typer.confirm(f"{path} exists. Replace it?", err=True):
            raise ConfigError(
                f"{path} exists and stays as it is; name another DIR, or use --overwrite"
            )
    from posttrain.core.plugin_manager import PluginManager

    manager = PluginManager()
    ask = _Questions(context, manager, yes)
    source = ask("1. Base model (hub id or folder)", model, DEFAULT_MODEL, _a_model)
    found = ask(
        "2. Your data (a file, hub:owner/name, or a task such as arithmetic, gsm8k)",
        data,
        default_data(),
        ask.data,
    )
    usual = "distill" if teacher and "distill" in found.methods else found.methods[0]
    choices = ", ".join(f"{name} = {METHODS[name]}" for name in found.methods)
    chosen = ask(f"3. Method ({choices})", method, usual, found.fits)
    for option, given, takes in (
        ("--reward", reward, ("rl", "sft+rl")),
        ("--teacher", teacher, ("distill",)),
    ):
        if given is not None and chosen not in takes:
            raise ConfigError(f"{option} goes with method {' or '.join(takes)}, not with {chosen}")
    rewarded: dict[str, object] = {}
    taught = ""
    if "rl" in chosen:
        rewarded = ask("4. Reward", reward, found.reward, ask.reward)
    elif chosen == "distill":
        taught = ask("4. Teacher (the folder of a larger model)", teacher, "", _a_teacher)
    long = ask(f"5. How long ({', '.join(LENGTHS)})", length, "short", _a_length)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name).strip("-_.") or "posttrain"
    plan = Plan(
        name=name[:100],
        model=source,
        method=chosen,
        length=long,
        file=found.file,
        task=found.task,
        reward=rewarded,
        teacher=taught,
    )
    text = first_config(_measured(plan, found, context), header(SCHEMA_FILE))
    _write(path, text, manager)
    return _done(context, path, plan, found)


class _Questions:
    """Asks on a terminal, or takes an option or the default; every answer is read at once."""

    def __init__(self, context: CommandContext, manager: PluginManager, yes: bool) -> None:
        self.context, self.manager, self.yes = context, manager, yes

    def __call__(self, text: str, given: str | None, default: str, read: Callable[[str], T]) -> T:
        """The option's value, else the default with `--yes`, else what is typed, as `read` has it.

        A typed answer that does not fit is asked for again; any other is an error.
        """
        if given is not None or self.yes:
            return read(default if given is None else given)
        while True:
            answer = str(typer.prompt(text, default=default or None, err=self.context.as_json))
            try:
                return read(answer.strip())
            except PosttrainError as error:
                typer.echo(f"  {error}", err=True)

    def data(self, named: str) -> _Data:
        """What a file is taken for by its columns, or else the task of that name."""
        from posttrain.core.data.overview import overview

        if Path(named).exists() or named.startswith("hub:"):
            found = overview(named, 1, None)
            if found.num_problems == found.rows:
                raise DataError(found.problems[0])
            return _Data.of_file(named, found)
        spec = self.spec("--data", "task", named)
        return _Data(task=spec, methods=tuple(FOR_PURPOSE["rl"]))

    def reward(self, named: str) -> dict[str, object]:
        if not named:
            from posttrain.core.data.overview import ANSWERS

            raise ConfigError(
                "the rows have none of the fields that usually hold answers "
                f"({', '.join(ANSWERS)}): rename yours to one of them, or name a reward that needs "
                "no answer, such as llm_judge or one of your own: --reward NAME (posttrain plugins "
                "list --kind reward)"
            )
        return self.spec("--reward", "reward", named)

    def spec(self, option: str, kind: str, text: str) -> dict[str, object]:
        """`NAME,field=value` as a component whose plugin takes these fields."""
        from pydantic import ValidationError

        from posttrain.core.config.spec import parse_spec

        spec = parse_spec(option, text.strip())
        try:
            self.manager.config(kind, spec.name, spec.fields)
        except ConfigError as error:
            file = "no such file, and " if kind == "task" else ""
            raise ConfigError(f"{option}: {file}{error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "fields"
            raise ConfigError(
                f"{option} '{text}': {place}: {first['msg']}; the form is {option} "
                f"{spec.name},field=value (posttrain plugins show {spec.name})"
            ) from error
        return spec.component()


@dataclass(frozen=True, slots=True)
class _Data:
    """The data and the methods that can use them."""

    task: Mapping[str, Any]  # Any: YAML values
    methods: tuple[str, ...]
    reward: str = "accuracy"
    file: str = ""
    found: Overview | None = None

    @classmethod
    def of_file(cls, named: str, found: Overview) -> _Data:
        import yaml

        taken = found.taken
        if taken.purpose != "rl":
            return cls({}, FOR_PURPOSE[taken.purpose], file=named, found=found)
        task = yaml.safe_load(f"{{{taken.use}}}")["task"]
        if "without" in taken.format:
            return cls(task, ("rl",), "", found=found)
        return cls(task, FOR_PURPOSE["rl"], found=found)

    def fits(self, method: str) -> str:
        if method not in METHODS:
            raise ConfigError(
                f"no method '{method}'{nearest(method, METHODS)} (methods: {list(METHODS)})"
            )
        if method not in self.methods:
            what = self.found.taken if self.found else None
            assert what is not None  # a task allows all methods
            raise ConfigError(
                f"{self.found.source if self.found else ''} holds {what.format} ({what.why}), "
                f"which is data for {' or '.join(self.methods)}, not for {method}: choose that "
                "method, or other data (posttrain data show FILE)"
            )
        return method


def default_data() -> str:
    """The only data file of the working directory; else a task that needs none."""
    files = [name for name in sorted(os.listdir()) if name.endswith(DATA_SUFFIXES)]
    files = [name for name in files if name != SCHEMA_FILE]
    return files[0] if len(files) == 1 else DEFAULT_TASK


def _a_model(name: str) -> str:
    from posttrain.core.models.source import check_source, given_model

    check_source(given_model("--model", name))
    return name


def _a_teacher(name: str) -> str:
    if not (Path(name) / "config.json").is_file():
        raise ConfigError(
            f"the method distill needs the folder of a larger model; '{name}' has no config.json: "
            "--teacher DIR (a server is written into the config afterwards: `teachers`)"
        )
    return name


def _a_length(name: str) -> str:
    if name not in LENGTHS:
        raise ConfigError(f"no length '{name}'{nearest(name, LENGTHS)} (lengths: {list(LENGTHS)})")
    return name


def _measured(plan: Plan, found: _Data, context: CommandContext) -> Plan:
    """The plan with the rows and lengths of the data: in tokens if the model is on this disk."""
    if found.found is None:
        short = plan.task.get("name") in ("arithmetic", "digits")
        return replace(plan, response=16 if short else 256)
    from posttrain.core.config.sections import ModelSection
    from posttrain.core.data.overview import overview
    from posttrain.core.data.tokens import ChatTokenizer
    from posttrain.core.models.source import known_folder

    folder = known_folder(ModelSection(source=plan.model), context.home / "models")
    if folder is None:
        chars = sorted(found.found.chars)
        longest = chars[int(0.99 * (len(chars) - 1))] // CHARS_PER_TOKEN + 32
    else:
        tokenizer = ChatTokenizer.load(folder)
        tokens = sorted(overview(found.found.source, 0, tokenizer).tokens)
        longest = tokens[int(0.99 * (len(tokens) - 1))] if tokens else 0
    answers = [len(look.answer) for look in found.found.shown]
    response = 64 if answers and max(answers) < 20 and plan.task.get("match") is None else 256
    rows = found.found.rows
    taken = f"{rows} rows: {found.found.taken.format}"
    return replace(plan, rows=rows, taken=taken, longest=longest, response=response)


def _write(path: Path, text: str, manager: PluginManager) -> None:
    """Write config and schema, once the config is found to be right."""
    from posttrain.core.config.loading import load_config
    from posttrain.core.config.resolve import resolve
    from posttrain.core.runtime.files import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    try:
        write_text(partial, text)
        resolve(load_config([partial]), manager)
    finally:
        partial.unlink(missing_ok=True)
    write_schema(path.with_name(SCHEMA_FILE), schema_text())
    write_text(path, text)


def _done(context: CommandContext, path: Path, plan: Plan, found: _Data) -> Result:
    if found.found is not None:
        taken = found.found.taken
        context.say(
            f"{found.found.source}: {found.found.rows} rows, {taken.format}, because {taken.why}"
        )
        if found.found.num_problems:
            context.say(
                f"{found.found.num_problems} row(s) have problems, such as: "
                f"{found.found.problems[0]} (posttrain data show {found.found.source})"
            )
    context.say(f"wrote {path} and {path.with_name(SCHEMA_FILE)}")
    context.say("next:")
    for name, about in (
        ("validate", "check everything, model and data included"),
        ("plan", "what would run; time, memory and disk"),
        ("run", "run it; the same command continues after an interruption"),
    ):
        context.say(f"  posttrain {name} {path}   # {about}")
    return Result(
        {
            "status": "ok",
            "config": str(path),
            "schema": str(path.with_name(SCHEMA_FILE)),
            "method": plan.method,
            "next": f"posttrain validate {path}",
        }
    )
