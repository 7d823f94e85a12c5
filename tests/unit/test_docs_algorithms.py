"""docs/algorithms.md: complete, and with the numbers that the papers' examples give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.core.plugin_manager import PluginManager
from tests.helpers.scripts import load_script

REPO = Path(__file__).resolve().parents[2]
MANAGER = PluginManager()


GENERATOR = load_script("generate_algorithms")


def test_the_script_writes_the_page_and_its_picture(tmp_path: Path) -> None:
    GENERATOR.write(tmp_path)
    page = (tmp_path / "algorithms.md").read_text("utf-8")
    assert page == GENERATOR.page(MANAGER) and "0.894427" in page
    assert "](images/aggregation-weights.png)" in page
    assert (tmp_path / "images" / "aggregation-weights.png").read_bytes()[:4] == b"\x89PNG"


def test_every_built_in_plugin_has_its_place_on_the_page() -> None:
    page = GENERATOR.page(MANAGER)
    for entry in MANAGER.entries():
        if entry.package == "posttrain" and entry.kind != "stage":  # `posttrain show` has them
            heading = f"### Preset `{entry.name}`" if entry.kind == "algorithm" else None
            assert (heading or f"### `{entry.name}`\n") in page
    assert "{{" not in page
    for name in re.findall(r"\]\(\.\./(configs/[^)#]+)\)", page):
        assert (REPO / name).is_file(), name
    for name in re.findall(r"\]\(#([\w-]+)\)", page):
        heading = re.compile(rf"^#+ {name.replace('-', '[ :-]+')}$", re.MULTILINE | re.IGNORECASE)
        assert f'<a id="{name}">' in page or heading.search(page), name


def test_a_template_that_asks_for_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only in the template \['b'\], only computed \['c'\]"):
        GENERATOR.filled("{{a}} {{b}}", {"a": "1", "c": "2"})


def test_the_token_weights_are_those_of_the_examples() -> None:
    few = GENERATOR.token_weights(MANAGER, 8)
    assert few["seq-mean-token-mean"] == pytest.approx((0.25, 0.0625, 0.85))
    assert few["token-mean"] == pytest.approx((0.1, 0.1, 0.76))
    assert few["seq-mean-token-sum"] == pytest.approx((0.5, 0.5, 3.8))
    assert few["seq-sum-token-mean"] == pytest.approx((0.5, 0.125, 1.7))
    assert few["token-sum"] == pytest.approx((1, 1, 7.6))
    assert few["seq-mean-token-sum-norm"] == pytest.approx((0.0625, 0.0625, 0.475))
    many = GENERATOR.token_weights(MANAGER, 88)
    assert many["token-mean"] == pytest.approx((1 / 90, 1 / 90, 63.6 / 90))
    assert GENERATOR.long_shares(MANAGER)["token-mean"][1] == pytest.approx(88 / 90)


def test_the_numbers_of_the_misreadings_are_the_right_ones() -> None:
    found = GENERATOR.facts(MANAGER)
    expected = {
        "grpo_second": "0.4",
        "grpo_mean": "0.8",
        "gspo_value": "0.894427",
        "prefix_token": "0",
        "prefix_seq": "0.00202",
        "dpo_before": "0.693147",
        "dpo_after": "0.367725",
        "gspo_shrunk": "0.977237",
        "gspo_garbled": "0.001",
        "up_low": "0.5",
        "up_high": "0",
        "down_low": "0",
        "down_high": "-1.5",
    }
    assert {name: found[name] for name in expected} == expected
    rows = GENERATOR.kl_table(MANAGER).splitlines()
    assert "| `k1` | 0.143841 | 0.301737 | 0 | 0.274653 |" in rows
    assert "| `k2` | 0.161214 | 0.006243 | 0.274653 | 0.039506 |" in rows
    assert "| `k3` | 0.143841 | 0.002431 | 0.25 | 0.024653 |" in rows
    assert "| `k3+` | 0.143841 | 0.002431 | 0.274653 | 0.024653 |" in rows
