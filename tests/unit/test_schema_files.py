"""New databases come from files of SQL that say what the libraries' migrations would make."""

from __future__ import annotations

import importlib.util
import sqlite3
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from posttrain.core.runtime.files import create_database
from tests.conftest import REPO

LIBRARIES = ["prefect", "mlflow"]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The script that writes the files."""
    spec = importlib.util.spec_from_file_location("make_schemas", REPO / "infra/make_schemas.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_file_is_of_the_installed_version_and_makes_its_tables(
    maker: ModuleType, tmp_path: Path, library: str
) -> None:
    schema = maker.SCHEMAS[library]
    assert schema.read_text().splitlines()[0] == f"-- {library} {version(library)}", (
        "run `python infra/make_schemas.py` after the version changes"
    )
    database = tmp_path / "made.db"
    assert create_database(database, schema, library)
    with closing(sqlite3.connect(database)) as connection:
        assert len(connection.execute("select * from sqlite_master").fetchall()) > 100
        assert connection.execute("select count(*) from alembic_version").fetchone() == (1,)
    assert not create_database(database, schema, library), "one that is there stays"
    assert [path.name for path in tmp_path.iterdir()] == ["made.db"]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_file_makes_what_the_migrations_make(
    maker: ModuleType, tmp_path: Path, library: str
) -> None:
    wanted = maker.dumped(library, maker.migrated(library, tmp_path))
    found = maker.SCHEMAS[library].read_text()
    # The order of constraints and of indexes is that of a set, and differs from run to run.
    assert sorted(x.rstrip(",") for x in found.splitlines()) == sorted(
        x.rstrip(",") for x in wanted.splitlines()
    )


def test_a_file_of_another_version_is_not_used(tmp_path: Path) -> None:
    schema = tmp_path / "schema.sql"
    schema.write_text("-- prefect 0.0.1\ncreate table a (b);\n")
    assert not create_database(tmp_path / "made.db", schema, "prefect")
    assert not (tmp_path / "made.db").exists()
