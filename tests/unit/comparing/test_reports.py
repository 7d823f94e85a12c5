"""Pages load nothing and obey no text; what people write is read or refused with a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.core.analysis.pictures import Panel, Series, bars, curves, histogram, scatter
from posttrain.core.analysis.report import (
    Link,
    Picture,
    Report,
    Table,
    in_words,
    plain,
    shown,
    table,
    write_page,
)
from posttrain.core.config.spec import parse_spec
from posttrain.core.errors import ConfigError, ResourceError
from posttrain.pipelines.analysis.rescoring import parse_reward
from posttrain.pipelines.analysis.variants import parse_clip

EVIL = "<script src='http://x.example/a.js'>alert(1)</script>\x1b[2J"


def test_links_can_be_opened_and_everything_is_escaped() -> None:
    page = Report("t", (), [Table("links", ["", ""], [["MLflow", Link('http://h/#/a?b="<c>"')]])])
    assert '<a href="http://h/#/a?b=&quot;&lt;c&gt;&quot;" target="_blank"' in page.html()
    assert "<http://h/" in page.markdown()


def test_values_are_words_and_no_python() -> None:
    rewards = [{"name": "accuracy", "weight": 1.0}, {"name": "reward_model", "options": {}}]
    assert in_words(rewards) == "accuracy (weight 1), reward_model (options nothing)"
    assert in_words({"a": None, "b": [True, 0.25], "c": {"d": "x"}}) == "a none, b yes, 0.25, c d x"
    assert in_words([]) == "nothing"


def test_text_of_a_model_is_escaped_everywhere() -> None:
    made = Table(EVIL, [EVIL], [[EVIL]], EVIL)
    report = Report(EVIL, [EVIL], [made, Picture(EVIL, b"png", EVIL + '" onload="x')])
    page = report.html()
    assert "<script" not in page
    assert "\x1b" not in page
    assert '" onload=' not in page
    assert page.count("&lt;script") >= 8
    text = report.markdown().replace("\\<", "")
    assert "<" not in text and "\x1b" not in text


def test_columns_without_names_have_no_row_of_them() -> None:
    bare, named = (Table("t", names, [["seed", "0"]]) for names in (["", ""], ["", "value"]))
    assert Report("t", [], [bare]).html().count("<tr>") == 1
    assert Report("t", [], [named]).html().count("<tr>") == 2


def test_a_column_without_any_value_is_left_out_of_a_table() -> None:
    made = table("t", [{"a": None, "b": None, "c": 1}, {"c": 2, "d": "x", "a": "y"}])
    assert made.columns == ["a", "c", "d"]
    assert made.rows == [[None, 1, None], ["y", 2, "x"]]


def test_a_page_loads_nothing_from_elsewhere() -> None:
    pictures = [
        scatter({"a": ([0.0, 1.0], [1.0, 2.0])}, "t", "x", "y"),
        bars({"a": {"clip/frac": 0.1}, "b": {}}, "$t$", "y"),
        histogram({"a": [1.0, 1.0]}, "t", "x"),
        histogram({}, "t", "x"),
        curves(
            [
                Panel(
                    "m", "", [Series("A", "", [1, 2], [1.0, 2.0], [0.0, None], [2.0, None], True)]
                ),
                Panel("n", "", []),
            ]
        ),
    ]
    assert all(png.startswith(b"\x89PNG") for png in pictures)
    page = Report("t", [], [Picture("p", png) for png in pictures]).html()
    assert page.count("data:image/png;base64,") == 5
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=[\"'](?!data:)", page)
    assert "http" not in page.replace("http-equiv", "")


def test_a_page_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ResourceError, match="--out"):
        write_page(tmp_path / "taken", "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="--out"):
        write_page(tmp_path / "file" / "a.html", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]
    assert (
        write_page(tmp_path / "new" / "a.html", Report("t").html())
        .read_text()
        .endswith("</html>\n")
    )


def test_cells_and_json_have_no_nan() -> None:
    values = (None, float("nan"), True, 0.123456, 7, "a\tb")
    assert [shown(value) for value in values] == ["-", "-", "yes", "0.1235", "7", "a\\tb"]
    holes = {"a": [float("inf"), 1.0], "b": (float("nan"),)}
    assert plain(holes) == {"a": [None, 1.0], "b": [None]}


def test_a_plugin_is_written_with_its_fields() -> None:
    spec = parse_spec("--loss", "gspo,clip_low=0.001,tags=[a, b],name2=x")
    assert (spec.name, spec.fields) == (
        "gspo",
        {"clip_low": 0.001, "tags": ["a", "b"], "name2": "x"},
    )
    found, weight = parse_reward("format,tags=[think, answer]:0.5")
    assert (found.fields, weight) == ({"tags": ["think", "answer"]}, 0.5)
    assert parse_reward("accuracy")[1] == 1.0
    assert parse_reward("format,pattern=a:b")[0].fields == {"pattern": "a:b"}
    assert parse_clip("0.2:0.28") == (0.2, 0.28)
    assert parse_clip("0.2") == (0.2, 0.2)


@pytest.mark.parametrize(
    "text", ["gspo,clip_low", "gspo,=1", "=1", "", ",a=1", "a,b=1,b=2", "a,b={"]
)
def test_what_is_no_plugin_with_fields_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--loss"):
        parse_spec("--loss", text)


@pytest.mark.parametrize("text", ["accuracy:x", "accuracy:nan", "accuracy:inf", ":1"])
def test_a_weight_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--reward"):
        parse_reward(text)
    with pytest.raises(ConfigError, match="--clip"):
        parse_clip("1:x")
