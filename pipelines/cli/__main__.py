"""The `posttrain` command: what must be set before anything is loaded, then the command itself."""

from __future__ import annotations

import io
import os
import sys
import threading
import time

from posttrain.core.runtime.startup import bound_waiting, use_allocator

EXIT_S = 10.0
"""How long Prefect may take, once the command is done, to send what it still has."""


def main() -> None:
    """Entry point of the `posttrain` command."""
    open_closed_streams()
    escape_what_cannot_be_printed()
    use_allocator(sys.argv[1:])
    bound_waiting()
    from posttrain.core.redaction import redact_output
    from posttrain.core.runtime.collector import command
    from posttrain.pipelines.cli.main import app

    redact_output()
    try:
        with command():
            app()
    except SystemExit as end:
        leave_soon(end.code)
        raise


def open_closed_streams() -> None:
    """Standard streams that the shell closed (`>&-`) read and write nothing.

    In their order, so that each gets its own number before some file of the command does.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def escape_what_cannot_be_printed() -> None:
    """A terminal or a pipe of another encoding gets `\\u2500` for a sign that it does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (
            stream.encoding.lower() != "utf-8" or stream.errors == "strict"
        ):
            stream.reconfigure(errors="backslashreplace")


def leave_soon(code: str | int | None) -> None:
    """End at once where Prefect's server was away, and within `EXIT_S` where it goes away now.

    At a normal exit Prefect offers each event to its server, for minutes if that does not answer.
    """
    away = sys.modules.get("posttrain.pipelines.rl.prefect_away")
    if away is None:
        return
    status = code if isinstance(code, int) else int(code is not None)
    if away.was_away():
        leave(status)
    threading.Thread(target=leave, args=(status, EXIT_S), daemon=True, name="exit").start()


def leave(status: int, after_s: float = 0.0) -> None:
    """End the process, and the run's own server with it, which may hang too."""
    time.sleep(after_s)
    servers = sys.modules.get("posttrain.pipelines.run.prefect_server")
    for server in [] if servers is None else servers.running():
        server.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
