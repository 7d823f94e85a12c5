"""The `posttrain` command: what must be set before anything is loaded, then the command itself."""

from __future__ import annotations

import os
import sys

from posttrain.core.runtime.startup import bound_waiting, use_allocator


def main() -> None:
    """Entry point of the `posttrain` command."""
    use_allocator(sys.argv[1:])
    bound_waiting()
    from posttrain.core.redaction import redact_logs, redacting
    from posttrain.core.runtime.collector import command
    from posttrain.pipelines.cli.main import app

    redact_logs()
    sys.stdout, sys.stderr = redacting(sys.stdout), redacting(sys.stderr)
    try:
        with command():
            app()
    except SystemExit as end:
        leave_if_prefect_was_away(end.code)
        raise


def leave_if_prefect_was_away(code: str | int | None) -> None:
    """End at once: at a normal exit Prefect offers each event to the server that is away."""
    away = sys.modules.get("posttrain.pipelines.rl.prefect_away")
    if away is not None and away.was_away():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
