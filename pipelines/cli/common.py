"""What every command shares: its common options, and errors as one sentence and an exit code."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import PosttrainError, ResourceError

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.plugin_manager import PluginManager

EXIT_INTERRUPTED = 130
EPILOG_CODES = (
    "Exit codes: 0 done, 1 failed, 2 bad config, 3 bad data, 4 missing resource, 5 waits for "
    "approval, 6 rejected."
)

HomeOption = Annotated[
    Path,
    typer.Option(
        "--home", envvar="POSTTRAIN_HOME", help="Folder for artifacts, metrics and the databases."
    ),
]
STORE_VARIABLE = "POSTTRAIN_STORE"
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        envvar=STORE_VARIABLE,
        help="Folder of finished stages, which several homes may share.  [default: HOME/artifacts]",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Last line of standard output: one JSON object. Text: stderr."),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
ConfigsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG...",
        help="YAML files, merged from left to right, or the name of a shipped one "
        "(quickstart, recipes/dapo).",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Override one value, for instance stages.rl.steps=3."
    ),
]
LOG_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""
DEFAULT_HOME = Path(".posttrain")


def shared_store() -> Path | None:
    """What the environment names, for runs that no command line starts."""
    named = os.environ.get(STORE_VARIABLE)
    return Path(named) if named else None


def folders(home: Path, store: Path | None) -> tuple[Path, Path]:
    """Home and store as absolute paths; the store is the home's own unless another is named."""
    home = home.expanduser().resolve()
    return home, (home / "artifacts" if store is None else store.expanduser().resolve())


class Boundary(contextlib.AbstractContextManager[None]):
    """Turns what goes wrong in a command into one sentence on stderr and an exit code.

    A user's mistake never shows a traceback unless `debug`. For any other exception the traceback
    goes to a file under `log_home`, or to stderr where there is none.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        debug: bool = False,
        log_home: Path | None = None,
        interrupted: str = "interrupted",
    ) -> None:
        self.interrupted = interrupted
        self.as_json, self.debug, self.log_home = as_json, debug, log_home

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, typer.Exit | typer.Abort | typer.BadParameter):
            return
        if self.debug and not isinstance(error, SystemExit | KeyboardInterrupt):
            traceback.print_exception(error)
        if isinstance(error, PosttrainError):
            self._stop(str(error), error.exit_code, error.status)
        elif isinstance(error, KeyboardInterrupt):
            self._stop(self.interrupted, EXIT_INTERRUPTED)
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" at {error.filename}" if error.filename else ""
            message = f"the disk is full{where}; free some space or choose another --home"
            self._stop(message, ResourceError.exit_code)
        elif isinstance(error, Exception):
            self._stop(self._bug(error), 1)

    def _bug(self, error: Exception) -> str:
        first = (str(error).splitlines() or ["no message"])[0]
        sentence = f"unexpected {type(error).__name__}: {first}"
        if self.log_home is None:
            return f"{sentence}; run again with --debug for the traceback"
        log = self.log_home / "logs" / f"error-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("".join(traceback.format_exception(error)))
        except OSError as problem:
            return f"{sentence}; the traceback could not be written ({problem}): use --debug"
        return f"{sentence}; the full traceback is in {log}"

    def _stop(self, message: str, code: int, status: str = "error") -> None:
        print(f"{status}: {message}", file=sys.stderr)
        if self.as_json:
            print_json({"status": status, "exit_code": code, "error": message})
        raise typer.Exit(code)


def print_json(value: object) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, default=str), flush=True)


def text_console(as_json: bool) -> Console:
    """Where people read: standard output, or stderr when that one belongs to JSON."""
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


def resolve_configs(
    configs: Sequence[Path], overrides: Sequence[str] | None
) -> tuple[ResolvedRun, PluginManager]:
    """Load and resolve; YAML mistakes show before the slow import of the plugins."""
    from posttrain.core.config.loading import load_config
    from posttrain.core.config.resolve import resolve

    loaded = load_config(configs, overrides or [])
    from posttrain.core.plugin_manager import PluginManager

    manager = PluginManager()
    return resolve(loaded, manager), manager


@contextlib.contextmanager
def stdout_to_stderr(active: bool) -> Iterator[None]:
    """Send what libraries print to stderr while `active`, so that JSON stays alone on stdout."""
    if not active:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield
