"""Rows of any data file: what each kind gives, and what damaged files are refused with."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, ipc, parquet

from posttrain.core.data.rows import (
    data_digest,
    data_files,
    data_rows,
    hub_source,
)
from posttrain.core.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"id": str(i), "prompt": f"What is {i} + 1?\nSay – “it”.", "answer": str(i + 1)}
    for i in range(150)
]
NESTED = [
    {"prompt": [{"role": "user", "content": f"Number {i}?"}], "reward_model": {"ground_truth": i}}
    for i in range(150)
]


def as_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(as_lines(rows), encoding="utf-8")


def write_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")


def write_wrapped(path: Path, rows: list[dict[str, Any]]) -> None:
    whole = {"version": 1.5, "note": {"data": []}, "data": rows, "more": [1, {"a": "]"}]}
    path.write_text(json.dumps(whole), encoding="utf-8")


def write_packed(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress(as_lines(rows).encode()))


def write_separated(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(
            stream, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ","
        )
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=40)


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)


def write_file(path: Path, rows: list[dict[str, Any]]) -> None:
    feather.write_feather(pyarrow.Table.from_pylist(rows), path, compression="lz4")


Writer = Callable[[Path, list[dict[str, Any]]], None]
KINDS: dict[str, tuple[str, Writer]] = {
    "jsonl": ("a.jsonl", write_lines),
    "ndjson": ("a.ndjson", write_lines),
    "upper": ("A.JSONL", write_lines),
    "gz": ("a.jsonl.gz", write_packed),
    "array": ("a.json", write_array),
    "wrapped": ("b.json", write_wrapped),
    "lines named json": ("c.json", write_lines),
    "csv": ("a.csv", write_separated),
    "tsv": ("a.tsv", write_separated),
    "parquet": ("a.parquet", write_parquet),
    "arrow stream": ("a.arrow", write_stream),
    "arrow file": ("b.arrow", write_file),
    "feather": ("a.feather", write_file),
}
TEXT_ONLY = ("csv", "tsv")


def read(path: Path) -> list[dict[str, object]]:
    return [row.values for row in data_rows(str(path), "task.path")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    name, write = KINDS[kind]
    path = tmp_path / name
    write(path, ROWS)
    rows = list(data_rows(str(path), "task.path"))
    assert [row.values for row in rows] == ROWS
    assert rows[0].where.startswith(f"{path}:") and len({row.where for row in rows}) == len(rows)
    before = data_digest(str(path), "task.path")
    write(path, ROWS[:-1])
    assert data_digest(str(path), "task.path") != before
    if kind not in TEXT_ONLY:
        write(path, NESTED)
        assert read(path) == NESTED
        write(path, ROWS[:1])
        assert read(path) == ROWS[:1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_of_any_kind_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Cut off at many places, with bytes changed, or empty: rows or a `DataError`, nothing else."""
    name, write = KINDS[kind]
    path = tmp_path / name
    write(path, ROWS)
    whole = path.read_bytes()
    refused = 0
    for step in range(40):
        at = step * len(whole) // 40
        for damaged in (
            whole[:at],
            whole[:at] + bytes([whole[at] ^ 0xFF, 0x80]) + whole[at + 2 :],
            whole[:at] + b'"' + whole[at:],
        ):
            path.write_bytes(damaged)
            try:
                read(path)
            except DataError as error:
                refused += 1
                assert str(path) in str(error) and len(str(error)) < 800
    assert refused >= 40
    for empty in (b"", b" \n\n"):
        path.write_bytes(empty)
        with pytest.raises(DataError, match=path.name):
            read(path)


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    none = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    parquet.write_table(none, tmp_path / "a.parquet")
    feather.write_feather(none, tmp_path / "a.feather")
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    (tmp_path / "a.json").write_text("[ ]")
    (tmp_path / "b.json").write_text('{"data": []}')
    for name in ("a.parquet", "a.feather", "a.csv", "a.json", "b.json"):
        with pytest.raises(DataError, match=f"{name} has no rows"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"a": 1}, 2]', r"a.json:2 holds '2', expected a JSON object"),
        ("a.json", '[{"a": 1} {"a": 2}]', r"a.json is not JSON after row 1 \(expected ',' or '\]'"),
        ("a.json", '[{"a": 1}, {"a": NaN}]', r"a.json:2 is not JSON \(NaN is not JSON\)"),
        ("a.json", '[{"a": 1, "a": 2}]', r"a.json:1 is not JSON \(the key 'a' is written twice"),
        ("a.json", '[{"a": "\\ud800"}]', r"a.json:1 holds \\ud800, half of a surrogate pair"),
        ("a.json", '[{"a": 1}]\n[{"a": 2}]', r"a.json goes on after its last row"),
        ("a.json", '[{"a": 1}, {"a": ' + "[" * 100_000, r"a.json is not JSON after row 1"),
        ("a.json", "prompt,answer", r"a.json begins with 'p', expected an array of JSON objects"),
        ("a.json", '{"a": 1', r"a.json is not JSON after row 0"),
        ("a.csv", "a,b\n1,2\n3\n", r"a.csv:3 has 1 cells, expected 2 as in the header"),
        ("a.csv", 'a,b\n1,2\n3,"4\n', r"a.csv:3 .* \(the file ends inside quotes\)"),
        ("a.csv", "a;b\n1;2\n", r"a.csv has one column, 'a;b', whose cells seem .* by ';': save"),
        ("a.csv", "a\tb\n1\t2\n", r"seem to be separated by '\\t': rename the file to .tsv"),
        ("a.tsv", "a,b\n1,2\n", r"seem to be separated by ',': rename the file to .csv"),
        ("a.csv", "a,a\n1,2\n", r"a.csv:1 has the column 'a' twice"),
        ("a.csv", "a,\n1,2\n", r"a.csv:1 has the column '' twice or without a name"),
        ("a.jsonl.gz", '{"a": 1}\n', r"a.jsonl.gz is not a whole gzip file"),
        ("a.txt", "x", r"a.txt has the ending '.txt', expected one of .jsonl, .*: rename"),
        ("rows", "x", r"rows has the ending ''"),
        ("a.jsonl.zst", "x", r"a.jsonl.zst has the ending '.zst', .*: unpack it"),
        ("a.zip", "x", r"unpack it"),
    ],
)
def test_what_is_wrong_is_named_with_its_row(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_a_single_object_is_one_row_and_cells_may_hold_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "prompt": "a",\n "data": [1, 2]\n}\n')
    assert read(tmp_path / "a.json") == [{"prompt": "a", "data": [1, 2]}]
    (tmp_path / "a.csv").write_text('\ufeffa,b\r\n"1\n2",\r\n\r\n3,"x ""y"""\r\n', "utf-8")
    rows = list(data_rows(str(tmp_path / "a.csv"), "s"))
    assert [row.values for row in rows] == [{"a": "1\n2", "b": ""}, {"a": "3", "b": 'x "y"'}]
    assert [row.where.rpartition(":")[2] for row in rows] == ["2", "5"]


def test_a_file_is_read_as_a_stream(tmp_path: Path) -> None:
    """The first row comes before the damage far behind it is met."""
    path = tmp_path / "a.json"
    text = json.dumps([{"a": "x" * 1000} for _ in range(1000)])
    path.write_text(text[:-5])
    rows = data_rows(str(path), "s")
    assert len(next(rows).values["a"]) == 1000  # type: ignore[arg-type]
    with pytest.raises(DataError, match="is not JSON after row 999"):
        list(rows)


def test_short_numbers_and_maps_are_read_as_written(tmp_path: Path) -> None:
    inner = pyarrow.struct({"x": pyarrow.float32(), "y": pyarrow.list_(pyarrow.float32())})
    table = pyarrow.table(
        {
            "a": pyarrow.array([0.1], pyarrow.float32()),
            "b": pyarrow.array([{"x": 0.1, "y": [0.2]}], inner),
            "c": pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int8())),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"a": 0.1, "b": {"x": 0.1, "y": [0.2]}, "c": {"k": 1}}]


def test_a_folder_holds_one_kind_and_one_split(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_stream(folder / "data-00000-of-00002.arrow", ROWS[:70])
    write_stream(folder / "data-00001-of-00002.arrow", ROWS[70:])
    for name in ("dataset_info.json", "state.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("# Rows")
    assert read(folder) == ROWS
    assert [file.name[:10] for file in data_files(str(folder), "s")] == ["data-00000", "data-00001"]
    write_lines(folder / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"files of several kinds \(a.jsonl, data-00000-of-00002"):
        read(folder)
    splits = tmp_path / "splits"
    splits.mkdir()
    for name in ("train-00000.parquet", "train-00001.parquet", "test.parquet"):
        write_parquet(splits / name, ROWS)
    with pytest.raises(DataError, match=r"files of several splits \(test.parquet, train-00000"):
        read(splits)
    (splits / "test.parquet").unlink()
    write_parquet(splits / "train-00001.parquet", [{"prompt": "a", "label": 1}])
    with pytest.raises(DataError, match=r"have different columns \(answer, id, label only"):
        read(splits)
    with pytest.raises(DataError, match=r"has no data file .*it has the folders parts, splits"):
        read(tmp_path)


def test_what_is_not_there_is_refused_and_a_hub_s_name_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"on the hub write hub:openai/gsm8k; else correct s"):
        list(data_rows("openai/gsm8k", "s"))
    with pytest.raises(DataError, match=r"nope.csv, which is not there, .*: correct s; relative"):
        list(data_rows(str(tmp_path / "nope.csv"), "s"))
    with pytest.raises(DataError, match=r"/dev/null, which is a device"):
        list(data_rows("/dev/null", "s"))
    hub, split = hub_source("hub:openai/gsm8k/main@v1#test", "s")
    assert (hub.name, hub.subset, hub.revision, split) == ("openai/gsm8k", "main", "v1", "test")
    assert str(hub_source("hub:a/b", "s")[0]) == "a/b@cached"
    with pytest.raises(DataError, match=r"s is 'hub:gsm8k', expected hub:owner/name"):
        list(data_rows("hub:gsm8k", "s"))


@pytest.mark.parametrize("ending", ["arrow", "feather", "parquet"])
@pytest.mark.parametrize("wrong", [b"answ\xcfr", b"answe\xcf"])
def test_a_column_whose_name_is_not_text_is_refused(
    ending: str, wrong: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{ending}"
    (write_parquet if ending == "parquet" else write_file)(path, ROWS)
    data = path.read_bytes()
    assert b"answer" in data
    path.write_bytes(data.replace(b"answer", wrong))
    with pytest.raises(DataError, match=rf"a.{ending} .*\(.*UTF.?8") as error:
        read(path)
    assert "unexpected" not in str(error.value)
