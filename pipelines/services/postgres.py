"""A PostgreSQL cluster of our own: found, made, started, with one database per server.

It listens on 127.0.0.1 alone, over TCP with a password; there is no Unix socket.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
from pathlib import Path

from posttrain.core.errors import ResourceError
from posttrain.pipelines.services.layout import Layout, plain_environment
from posttrain.pipelines.services.listening import HOST
from posttrain.pipelines.services.processes import Launch, as_user, last_line

ROLE = "posttrain"
DATABASES = ("prefect", "mlflow")
DEBIAN = Path("/usr/lib/postgresql")
SYSTEM_USER = "postgres"
INSTALL = (
    "install it (Debian, Ubuntu: apt-get install postgresql; macOS: brew install postgresql@16; "
    "Fedora: dnf install postgresql-server), or put the folder of `initdb` on PATH"
)


def binaries() -> Path | None:
    """The folder of PostgreSQL's server programs: on PATH, or Debian's newest."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    versions = [path for path in DEBIAN.glob("*/bin") if (path / "initdb").exists()]
    return max(versions, key=lambda path: _number(path.parent.name), default=None)


def _number(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def why_missing() -> str | None:
    """Why no cluster can run here, with what to do about it; None when one can."""
    if binaries() is None:
        return f"PostgreSQL's server programs are missing: {INSTALL}"
    try:
        _user()
    except ResourceError as error:
        return str(error)
    return None


def _programs() -> Path:
    found = binaries()
    if found is None:
        raise ResourceError(f"PostgreSQL's server programs are missing: {INSTALL}")
    return found


def _user() -> str | None:
    """PostgreSQL refuses to run as root, so root runs it as the user of Debian's package."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(SYSTEM_USER).pw_name
    except KeyError:
        raise ResourceError(
            f"PostgreSQL does not run as root and there is no user '{SYSTEM_USER}': {INSTALL}"
        ) from None


class Cluster:
    """The cluster below `layout.folder`/postgres."""

    def __init__(self, layout: Layout, port: int) -> None:
        self._layout, self._port = layout, port
        self._bin, self._system_user = _programs(), _user()
        self._folder = layout.folder / "postgres"
        self._data = self._folder / "data"
        self._environment = dict(plain_environment())

    def prepare(self) -> None:
        """Make the cluster and its password if they are not there; half-made ones are removed."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._system_user:
            shutil.chown(self._folder, self._system_user)
            self._check_reachable(self._system_user)
        if not self._data.exists():
            self._make()
        elif not self._layout.password_file.exists():
            raise ResourceError(
                f"the password file {self._layout.password_file} of the databases in {self._data} "
                "is gone: restore it, or remove that folder to begin with empty databases"
            )

    def _check_reachable(self, user: str) -> None:
        tried = subprocess.run(["test", "-w", str(self._folder)], **as_user(user))
        if tried.returncode == 0:
            return
        closed = [str(path) for path in self._folder.parents if not path.stat().st_mode & 0o001]
        raise ResourceError(
            f"PostgreSQL runs as user '{user}', who cannot enter {', '.join(closed)}: "
            f"run `chmod o+x` on it, or choose another --home"
        )

    def _make(self) -> None:
        """In a folder next to it, renamed when complete: a killed start leaves no half cluster."""
        partial, given = self._folder / "data.partial", self._folder / "password"
        shutil.rmtree(partial, ignore_errors=True)
        password = secrets.token_urlsafe(24)
        write_private(given, password)
        if self._system_user:
            shutil.chown(given, self._system_user)
        how = ("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C")
        role = ("--username", ROLE, "--pwfile", str(given))
        log = self._layout.log("initdb")
        try:
            with log.open("w") as stream:
                made = subprocess.run(
                    [str(self._bin / "initdb"), "--pgdata", str(partial), *how, *role],
                    env=self._environment,
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    **as_user(self._system_user),
                )
        finally:
            given.unlink(missing_ok=True)
        if made.returncode != 0:
            raise ResourceError(
                f"PostgreSQL's initdb ended with code {made.returncode}; its log {log} ends with: "
                f"{last_line(log)}"
            )
        write_private(self._layout.password_file, f"{HOST}:*:*:{ROLE}:{password}\n")
        partial.rename(self._data)

    def launch(self) -> Launch:
        address = ("-c", f"listen_addresses={HOST}", "-c", "unix_socket_directories=")
        return Launch(
            service="postgres",
            command=[str(self._bin / "postgres"), "-D", str(self._data), *address]
            + ["-p", str(self._port), "-c", "max_connections=200"],
            environment=self._environment,
            log=self._layout.log("postgres"),
            record=self._layout.record("postgres"),
            user=self._system_user,
        )

    def is_ready(self) -> bool:
        ask = [str(self._bin / "pg_isready"), "-q", "-h", HOST, "-p", str(self._port)]
        return subprocess.run(ask, env=self._environment).returncode == 0

    def make_databases(self) -> None:
        listed = self._client("psql", "-d", "postgres", "-tAc", "select datname from pg_database")
        for name in DATABASES:
            if name not in listed.split():
                self._client("createdb", name)

    def _client(self, program: str, *arguments: str) -> str:
        place = ("-h", HOST, "-p", str(self._port), "-U", ROLE, "-w")
        done = subprocess.run(
            [str(self._bin / program), *place, *arguments],
            env={**self._environment, "PGPASSFILE": str(self._layout.password_file)},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise ResourceError(
                f"PostgreSQL on {HOST}:{self._port} refused `{program}`: {done.stderr.strip()}"
            )
        return done.stdout


def write_private(path: Path, text: str) -> None:
    """A new file that its owner alone can read, also while it is written."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
