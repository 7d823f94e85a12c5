"""What every command shares: the common options, one context, and errors as one sentence.

`@command` declares `--home`, `--store`, `--json` and `--debug` once. A command is a function of a
`CommandContext` and its own options that returns its `Result`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import os
import select
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from posttrain.core.errors import ConfigError, PosttrainError, ResourceError
from posttrain.core.redaction import redact_error, redacted
from posttrain.core.store import urls
from posttrain.pipelines.cli import complete
from posttrain.pipelines.run.checks import (
    DEFAULT_HOME,
    HOME_VARIABLE,
    STORE_VARIABLE,
    default_home,
    folders,
)

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INTERRUPTED = 130


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM: it ends a command as Ctrl-C does, so that what it started stops too."""
    raise KeyboardInterrupt


def say_aside(text: str) -> None:
    """A line of progress on stderr: standard output is for the shell to evaluate."""
    print(text, file=sys.stderr, flush=True)


_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.ELOOP}
_NO_ACCESS |= {errno.EEXIST}  # a file where a folder is to be made
_NO_TEXT = "surrogates not allowed"
"""The reason of Python's error for bytes of an argument that are no UTF-8."""
_NO_HOME = "Could not determine home directory"
"""The start of the error that `Path.expanduser` raises for `~NAME` of an unknown user."""
EPILOG_CODES = (
    "Exit codes: 0 done, 1 failed, 2 bad config, 3 bad data, 4 missing resource, 5 waits for "
    "approval, 6 rejected."
)

HomeOption = Annotated[
    Path,
    typer.Option(
        "--home", envvar=HOME_VARIABLE, help="Folder for artifacts, metrics and the databases."
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar=STORE_VARIABLE,
        help="Folder or URL (s3://BUCKET/PREFIX) of finished stages, which several homes may "
        "share.  "
        "\\[default: HOME/artifacts]",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result as one JSON object on stdout; all other output goes to stderr.",
    ),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
ConfigsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG...",
        help="YAML files, merged from left to right, or the name of a shipped one "
        "(quickstart, recipes/dapo).",
        show_default=False,
        autocompletion=complete.configs,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Override one value, for instance stages.rl.steps=3."
    ),
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="One line per step instead of a live display.")
]
MAX_LINE = 1200
LOG_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""


@dataclass(frozen=True, slots=True)
class CommandContext:
    """What the common options say; `home` and `store` are absolute paths.

    With a URL, `store` is the folder of this machine that its stages are fetched into."""

    home: Path
    store: Path
    as_json: bool = False
    debug: bool = False
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    """The command's own standard output: inside a command with `--json`, print goes to stderr."""

    def options(self) -> list[str]:
        """The options that another command needs to use the same home and store."""
        home = [] if self.home == DEFAULT_HOME.resolve() else ["--home", str(self.home)]
        own = self.store == self.home / "artifacts"
        return home if own else [*home, "--store", urls.shown(self.store)]

    def console(self) -> Console:
        """Where people read: standard output, or stderr when that one belongs to JSON."""
        return text_console(self.as_json)

    def say(self, text: str, style: str | None = None) -> None:
        """A line for people, in which nothing is markup."""
        self.console().print(text, markup=False, style=style)

    def print_json(self, values: object) -> None:
        """With `--json`, one line of JSON on standard output; else nothing."""
        if self.as_json:
            print(redacted(json.dumps(values, default=str)), file=self.stdout, flush=True)


@dataclass(frozen=True, slots=True)
class Result:
    """What `--json` prints when a command has ended, and the command's exit code."""

    values: Mapping[str, object]
    exit_code: int = 0


Command = Callable[..., Result | None]  # of a CommandContext and the command's own options


def command(
    *,
    home: bool = True,
    store: bool = False,
    as_json: bool = True,
    interrupted: str = "interrupted",
    reads_mlflow: bool = False,
) -> Callable[[Command], Callable[..., None]]:
    """Give a command the common options, and run it inside a `Boundary`.

    Typer reads the signature that is made here: the command's own options, then the common ones.
    `home=False` is for a command with a `--home` of its own. A command that reads MLflow sends
    first what earlier runs of the home could not.
    """
    shared = [
        _option("home", HomeOption, DEFAULT_HOME) if home else None,
        _option("store", StoreOption, None) if store else None,
        _option("as_json", JsonOption, False) if as_json else None,
        _option("debug", DebugOption, False),
    ]
    options = [option for option in shared if option is not None]

    def decorate(function: Command) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:  # Any: options of any type
            common = {option.name: given.pop(option.name) for option in options}
            shown = {name: common.get(name, False) for name in ("as_json", "debug")}
            with Boundary(**shown):  # it does not know the home yet
                places = folders(common.get("home") or default_home(), common.get("store"))
            context = CommandContext(*places, **shown)
            with Boundary(**shown, log_home=context.home, interrupted=interrupted):
                # What libraries print stays apart from the JSON.
                apart = contextlib.redirect_stdout(sys.stderr)
                with apart if context.as_json else contextlib.nullcontext():
                    if reads_mlflow:
                        for sentence in send_what_waits(context.home):
                            print(sentence, file=sys.stderr)
                    result = function(context, **given)
                if result is not None:
                    context.print_json(result.values)
                    if result.exit_code:
                        raise typer.Exit(result.exit_code)

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [*(option.replace(kind=option.KEYWORD_ONLY) for option in own), *options]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in parameters}
        return run

    return decorate


def send_what_waits(home: Path, *, quiet: bool = True) -> list[str]:
    """Send to MLflow what runs of this home could not; a sentence for each run."""
    runs = home / "runs"
    if not any(runs.glob("*/mlflow-waiting")):
        return []
    from posttrain.core.tracking.outage import send_waiting  # MLflow takes 2 s to import

    return send_waiting(runs, quiet=quiet)


def _option(name: str, annotation: object, default: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


@dataclass(frozen=True, kw_only=True)
class Boundary(contextlib.AbstractContextManager[None]):
    """Turns what goes wrong in a command into one sentence on stderr and an exit code.

    A user's mistake never shows a traceback unless `debug`. For any other exception the traceback
    goes to a file under `log_home` if that folder exists; else the message names `--debug`.
    """

    as_json: bool = False
    debug: bool = False
    log_home: Path | None = None
    interrupted: str = "interrupted"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, typer.Abort) and isinstance(error.__context__, EOFError):
            message = (
                "a question had no answer, since standard input ended: answer by options, or take "
                "the defaults with --yes"
            )
            self._stop(message, ConfigError.exit_code)
        if error is None or isinstance(error, typer.Exit | typer.Abort | typer.BadParameter):
            return
        if self.debug and not isinstance(error, SystemExit | KeyboardInterrupt):
            redact_error(error)
            traceback.print_exception(error)
        if isinstance(error, PosttrainError):
            self._stop(str(error), error.exit_code, error.status)
        elif isinstance(error, KeyboardInterrupt):
            self._stop(self.interrupted, EXIT_INTERRUPTED)
        elif isinstance(error, BrokenPipeError) and _nobody_reads():
            # `| head` has read enough. What is still kept for it goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(1)
        elif isinstance(error, FileNotFoundError) and _has_no_folder():
            message = "the working directory was removed: change to one that is there"
            self._stop(message, ResourceError.exit_code)
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" at {error.filename}" if error.filename else ""
            message = f"the disk is full{where}; free some space or choose another --home"
            self._stop(message, ResourceError.exit_code)
        elif isinstance(error, OSError) and error.errno in _NO_ACCESS and error.filename:
            message = (
                f"cannot use {error.filename}: {error.strerror}; correct its permissions or move "
                "it away, or choose another --home"
            )
            self._stop(message, ResourceError.exit_code)
        elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            name = str(error.filename or "")
            message = f"no file can have a name as long as '{name[:60]}...'; correct the path"
            self._stop(message, ResourceError.exit_code)
        elif isinstance(error, UnicodeEncodeError) and error.reason == _NO_TEXT:
            message = (
                f"an argument or the name of a file is not UTF-8 text ({error.object[:60]!r}), and "
                "cannot be written into one; correct it"
            )
            self._stop(message, ConfigError.exit_code)
        elif isinstance(error, RuntimeError) and str(error).startswith(_NO_HOME):
            message = (
                "a path begins with '~' and a name that no user of this machine has; correct it"
            )
            self._stop(message, ConfigError.exit_code)
        elif isinstance(error, Exception):
            self._stop(self._bug(error), 1)

    def _bug(self, error: Exception) -> str:
        redact_error(error)
        first = (str(error).splitlines() or ["no message"])[0]
        sentence = f"unexpected {type(error).__name__}: {first}"
        if self.log_home is None or not self.log_home.is_dir():
            return f"{sentence}; run again with --debug for the traceback"
        log = (
            self.log_home
            / "logs"
            / f"error-{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}.txt"
        )
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(redacted("".join(traceback.format_exception(error))))
        except OSError as problem:
            return f"{sentence}; the traceback could not be written ({problem}): use --debug"
        return f"{sentence}; the full traceback is in {log}"

    def _stop(self, message: str, code: int, status: str = "error") -> None:
        message = "\n".join(map(readable, message.split("\n")))
        print(f"{status}: {message}", file=sys.stderr)
        if self.as_json:
            with contextlib.suppress(OSError):  # standard output may be what is full
                print_json({"status": status, "exit_code": code, "error": message})
        raise typer.Exit(code)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has ended."""
    polled = select.poll()
    polled.register(1, 0)
    return any(event & select.POLLERR for _, event in polled.poll(0))


def _has_no_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def readable(line: str) -> str:
    """The line with its middle left out if a value of the user's makes it longer than a screen."""
    if len(line) <= MAX_LINE:
        return line
    return f"{line[: MAX_LINE // 2]} [...] {line[-MAX_LINE // 2 :]}"


def print_json(value: object) -> None:
    """One line of JSON on standard output."""
    print(redacted(json.dumps(value, default=str)), flush=True)


def text_console(as_json: bool) -> Console:
    """Where people read: standard output, or stderr when that one belongs to JSON."""
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console
