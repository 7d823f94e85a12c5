"""Write the schema files of Prefect's and MLflow's databases from the installed versions.

`python infra/make_schemas.py` after either version changes; it takes about 20 s. The files hold
what the libraries' own migrations make of an empty SQLite database.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = {
    "prefect": ROOT / "pipelines" / "run" / "prefect_schema.sql",
    "mlflow": ROOT / "core" / "tracking" / "mlflow_schema.sql",
}


def migrated(library: str, folder: Path) -> Path:
    """A database that the library has made in `folder` from nothing."""
    database = folder / f"{library}.db"
    if library == "prefect":
        arguments = ["prefect", "server", "database", "upgrade", "-y"]
    else:
        arguments = ["mlflow", "db", "upgrade", f"sqlite:///{database}"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    subprocess.run(
        [sys.executable, "-m", *arguments],
        check=True,
        capture_output=True,
        # Migrations go through sets: the order of their constraints is that of hashes.
        env=clean | {"PREFECT_HOME": str(folder), "DO_NOT_TRACK": "1", "PYTHONHASHSEED": "0"},
    )
    return database


def dumped(library: str, database: Path) -> str:
    """The text of a schema file."""
    with closing(sqlite3.connect(database)) as connection:
        lines = (line.rstrip() for text in connection.iterdump() for line in text.splitlines())
        return "\n".join([f"-- {library} {version(library)}", *lines]) + "\n"


def main() -> None:
    """Write both files."""
    with tempfile.TemporaryDirectory() as folder:
        for library, schema in SCHEMAS.items():
            schema.write_text(dumped(library, migrated(library, Path(folder))))
            print(schema)


if __name__ == "__main__":
    main()
