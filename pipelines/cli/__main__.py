"""The `posttrain` command: what must be set before anything is loaded, then the command itself."""

from __future__ import annotations

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
    with command():
        app()


if __name__ == "__main__":
    main()
