"""The first row that a file's reader refuses is named, and those after it are counted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.core.config.base import Component
from posttrain.core.data.formats import examples
from posttrain.core.data.preference_files import read_preference_rows
from posttrain.core.data.rows import data_rows, each_row
from posttrain.core.data.steps import read_labelled_steps
from posttrain.core.errors import DataError
from posttrain.core.plugin_manager import PluginManager

GOOD, BAD = "user", "narrator"
Row = Callable[[int, str], dict[str, object]]


def chat(number: int, role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{number} + 1?"}]


def answer(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": str(number + 1)}


def supervised(path: Path) -> object:
    return list(examples(data_rows(str(path), "stages.sft.data")))


def preferences(path: Path) -> object:
    return read_preference_rows(path, "stages.dpo.data", ("pairs", "labels"))


def steps(path: Path) -> object:
    return read_labelled_steps(str(path), "stages.prm.data", "\n")


def task(path: Path) -> object:
    component = Component.model_validate({"name": "rows", "path": str(path)})
    return PluginManager().task(component).problems("train", 1, 0)


READERS: list[tuple[Callable[[Path], object], Row]] = [
    (supervised, lambda i, role: {"messages": [*chat(i, role), answer(i)]}),
    (
        supervised,
        lambda i, role: {
            "conversations": [
                {"from": role, "value": f"{i} + 1?"},
                {"from": "gpt", "value": str(i + 1)},
            ]
        },
    ),
    (
        preferences,
        lambda i, role: {
            "prompt": chat(i, role),
            "chosen": [answer(i)],
            "rejected": [answer(i + 1)],
        },
    ),
    (
        preferences,
        lambda i, role: {"prompt": chat(i, role), "completion": [answer(i)], "label": i % 2 == 0},
    ),
    (steps, lambda i, role: {"prompt": chat(i, role), "completions": [f"{i}"], "labels": [True]}),
    (task, lambda i, role: {"prompt": chat(i, role), "answer": str(i + 1)}),
]


@pytest.mark.parametrize(("read", "row"), READERS)
def test_rows_with_an_unknown_role_are_counted(
    tmp_path: Path, read: Callable[[Path], object], row: Row
) -> None:
    path = tmp_path / "rows.jsonl"
    roles = [GOOD, GOOD, BAD, GOOD, BAD, GOOD, BAD]
    path.write_text("".join(json.dumps(row(i, role)) + "\n" for i, role in enumerate(roles)))
    with pytest.raises(DataError) as caught:
        read(path)
    said = str(caught.value)
    assert "narrator" in said
    assert f"{path}:3" in said
    assert said.endswith("(2 of the 4 rows after it are refused, too)")
    path.write_text("".join(json.dumps(row(i, GOOD)) + "\n" for i in range(40)))
    assert read(path)


def test_contradictions_of_a_task_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    answers = ["2", "2", "3", "2", "4"]
    path.write_text("".join(f'{{"prompt": "1 + 1?", "answer": "{a}"}}\n' for a in answers))
    with pytest.raises(DataError, match=r"\(1 of the 2 rows after it are refused, too\)$"):
        task(path)


def test_a_single_refused_row_is_not_counted_twice(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": [*chat(i, BAD if i == 1 else GOOD), answer(i)]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="correct this row$"):
        supervised(path)


def test_the_rest_of_a_damaged_file_counts_as_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [*chat(0, GOOD), answer(0)]})
    bad = json.dumps({"messages": [*chat(0, BAD), answer(0)]})
    path.write_text("\n".join([bad, good, "{damaged", good]))
    with pytest.raises(DataError, match=r"\(1 of the 2 rows after it are refused, too\)$"):
        supervised(path)


def test_rows_before_a_refused_one_are_given(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": -1}\n')

    def read(row: object) -> int:
        number = int(row.values["n"])  # type: ignore[attr-defined]
        if number < 0:
            raise DataError("negative")
        return number

    found = each_row(data_rows(str(path), "data"), read)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(DataError, match="^negative$"):
        next(found)
