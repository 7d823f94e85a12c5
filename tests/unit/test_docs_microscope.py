"""docs/microscope: the numbers of the papers' examples, worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.microscope import column_of, meta_of, weights_of
from tests.helpers.scripts import load_script

REPO = Path(__file__).resolve().parents[2]


GENERATOR = load_script("generate_microscope")
GSPO = "gspo,clip_low=0.2,clip_high=0.2@seq-mean-token-mean"
NORM = "own@seq-mean-token-sum-norm,norm_length=6"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages by slug."""
    folder = tmp_path_factory.mktemp("docs")
    GENERATOR.write(folder)
    return {path.stem: path.read_text("utf-8") for path in folder.iterdir()}


def test_there_is_a_page_for_each_example_and_the_guide_links_to_it(pages: dict[str, str]) -> None:
    guide = (REPO / "docs" / "microscope.md").read_text("utf-8")
    assert set(pages) == {example.slug for example in GENERATOR.EXAMPLES}
    assert set(pages) == set(re.findall(r"microscope/([\w-]+)\.html", guide))


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
    pages: dict[str, str], slug: str, variant: str, row: int, weights: list[float]
) -> None:
    assert weights_of(pages[slug], variant)[row] == pytest.approx(weights, abs=1e-6)


def test_a_rare_token_is_held_back_by_a_symmetric_clip_alone(
    pages: dict[str, str],
) -> None:
    page = pages["clip-higher"]
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
