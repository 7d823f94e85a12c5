"""docs/microscope: current, with the numbers of the papers' examples, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.plugin_manager import PluginManager
from tests.helpers.microscope import column_of, meta_of, weights_of
from tests.helpers.scripts import load_script

REPO = Path(__file__).resolve().parents[2]


GENERATOR = load_script("generate_microscope")
GSPO = "gspo,clip_low=0.2,clip_high=0.2@seq-mean-token-mean"
NORM = "own@seq-mean-token-sum-norm,norm_length=6"


def read(slug: str) -> str:
    return (REPO / "docs" / "microscope" / f"{slug}.html").read_text("utf-8")


def test_the_pages_are_what_the_plugins_say() -> None:
    assert GENERATOR.stale(PluginManager()) == [], "run python docs/generate_microscope.py"


def test_a_changed_and_a_missing_page_are_found_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GENERATOR, "FOLDER", tmp_path / "pages")
    assert GENERATOR.main([]) == 0 and GENERATOR.main(["--check"]) == 0
    first = {path.name: path.read_text("utf-8") for path in (tmp_path / "pages").iterdir()}
    assert len(first) == 4
    (tmp_path / "pages" / "dapo-grpo.html").unlink()
    changed = tmp_path / "pages" / "clip-higher.html"
    column = first["length-dilution.html"].split('id="column-weight-0">')[1].split("<")[0]
    old = first["clip-higher.html"].split('id="column-weight-0">')[1].split("<")[0]
    changed.write_text(first["clip-higher.html"].replace(old, column), "utf-8")
    assert GENERATOR.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("stale: clip-higher.html, dapo-grpo.html; run ")
    assert GENERATOR.main([]) == 0
    assert {p.name: p.read_text("utf-8") for p in (tmp_path / "pages").iterdir()} == first


@pytest.mark.parametrize(
    ("slug", "variant", "row", "weights"),
    [
        ("length-dilution", "own", 0, [-1 / 9] * 2),
        ("length-dilution", "own", 1, [-1 / 27] * 6),
        ("length-dilution", "own", 2, [2 / 27] * 6),
        ("length-dilution", "own@token-mean", 0, [-0.047619] * 2),
        ("length-dilution", "own@token-mean", 2, [0.095238] * 6),
        ("length-dilution", NORM, 0, [-1 / 27] * 2),
        ("length-dilution", NORM, 2, [2 / 27] * 6),
        ("grpo-gspo", "own", 0, [0.0, -0.2]),
        ("grpo-gspo", GSPO, 0, [-0.447214] * 2),
        ("grpo-gspo", "cispo", 0, [-1.0, -0.2]),
        ("dapo-grpo", "own", 0, [-0.25] * 2),
        ("dapo-grpo", "own", 1, [-0.003977273] * 88),
        ("dapo-grpo", "own@token-mean", 0, [-0.011111] * 2),
        ("dapo-grpo", "own@token-mean", 1, [-0.007777778] * 88),
    ],
)
def test_weights_are_those_worked_out_by_hand(
    slug: str, variant: str, row: int, weights: list[float]
) -> None:
    assert weights_of(read(slug), variant)[row] == pytest.approx(weights, abs=1e-6)


def test_a_rare_token_is_held_back_by_a_symmetric_clip_alone() -> None:
    page = read("clip-higher")
    states, texts = meta_of(page)["clip_states"], meta_of(page)["texts"]
    tokens = [texts[i] for i in column_of(page, "tokens")[:8]]
    assert tokens[0] == " Notice" and tokens[4] == " By symmetry"
    symmetric, higher = (
        [states[i] for i in column_of(page, f"clip-{place}")[:8]] for place in (0, 1)
    )
    assert [i for i, state in enumerate(symmetric) if state == "high"] == [0, 4]
    assert [i for i, state in enumerate(higher) if state == "high"] == [4]
    own, other = (weights_of(page, name)[0] for name in ("own", "ppo_clip,clip_high=0.28"))
    assert own[0] == 0 and other[0] == pytest.approx(-1.25 / 16)
    assert own[1:] == other[1:]
