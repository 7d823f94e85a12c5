"""The process of a run's own Prefect server.

Protocol: it loads Prefect, waits for a line on standard input, makes the database, and writes its
port when it answers. The end of standard input, which is the end of its owner, ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from posttrain.core.errors import ConfigError
from posttrain.core.redaction import redact_output
from posttrain.core.runtime.collector import loading
from posttrain.core.runtime.files import create_database
from posttrain.core.store.locks import locked
from posttrain.pipelines.run.prefect_env import check_settings

SCHEMA = Path(__file__).with_name("prefect_schema.sql")
GRACE_S = 4.0
CHECKED_BYTES = 50_000_000


def main() -> None:
    """Run the server until standard input ends."""
    port_goes_to = os.dup(1)
    os.dup2(2, 1)  # whatever is printed: the pipe takes the port alone
    redact_output()
    with loading():
        try:
            check_settings()
        except ConfigError:
            return  # the owner says what is wrong
        import prefect.server.api.server
        import uvicorn

    if not os.read(0, 4096):
        return
    threading.Thread(target=_end_with_the_owner, daemon=True).start()
    _prepare_database()
    place = socket.socket()
    place.bind(("127.0.0.1", 0))

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            os.write(port_goes_to, f"{place.getsockname()[1]}\n".encode())
            os.close(port_goes_to)

    app = prefect.server.api.server.create_app
    config = uvicorn.Config(app, factory=True, log_level="error", lifespan="on")
    Server(config).run([place])


def _end_with_the_owner() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def _prepare_database() -> None:
    """Make Prefect's tables, one process at a time.

    From the schema file where the database is new and in its usual place, which takes 0.1 s; else,
    or for a version of Prefect that is not the file's, by Prefect's migrations.
    """
    from prefect.server.database import provide_database_interface
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    database = settings.home / "prefect.db"
    url = settings.server.database.connection_url
    with locked(settings.home / ".lock-start"):
        if url is not None and url.get_secret_value().endswith(f":///{database}"):
            move_if_damaged(database)
            create_database(database, SCHEMA, "prefect")
        asyncio.run(provide_database_interface().create_db())


def move_if_damaged(database: Path) -> None:
    """Move a file that SQLite cannot read out of the way, with one sentence.

    It holds nothing but what Prefect's pages show.
    """
    problem = damage(database)
    if problem is None:
        return
    moved = database.with_name(f"{database.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in ("-wal", "-shm", ""):
        part = database.with_name(database.name + suffix)
        if part.exists():
            os.replace(part, moved.with_name(moved.name + suffix))
    print(
        f"Prefect's database {database} is damaged ({problem}): it was moved to {moved.name} and "
        "made again; Prefect's pages lack earlier runs, results are not affected",
        file=sys.stderr,
        flush=True,
    )


def damage(database: Path) -> str | None:
    """What is wrong with the file, or None. A large file is not read through: that takes long."""
    if not database.exists() or not database.stat().st_size:
        return None
    try:
        with closing(sqlite3.connect(database, timeout=5.0)) as connection:
            connection.execute("select count(*) from sqlite_master").fetchone()
            if database.stat().st_size > CHECKED_BYTES:
                return None
            (found,) = connection.execute("pragma quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return None  # locked, or a full disk: the server reports that itself
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if found == "ok" else " ".join(str(found).split())


if __name__ == "__main__":
    main()
