"""Curves, bars and lineage: real pictures, pages that load nothing, lines around boxes."""

import html.parser
import math
import re
from pathlib import Path

import pytest
from PIL import Image

from posttrain.core.analysis.learning_curves import (
    before_after,
    learning_curves,
    learning_panels,
)
from posttrain.core.analysis.pictures import Series
from posttrain.core.tracking.lineage import (
    BOX_HEIGHT,
    BOX_WIDTH,
    LineageNode,
    depths,
    headline,
    lineage_html,
)

DIGEST = "0123456789abcdef" * 4
STAGES = [
    LineageNode("base", "base", {}, DIGEST),
    LineageNode("sft", "sft", {"model": "base"}, DIGEST, "loss 0.412", "ran"),
    LineageNode("eval_base", "evaluate", {"model": "base"}, DIGEST, "accuracy 31.0 %", "cached"),
    LineageNode("reward_model", "reward_model", {"model": "sft"}, DIGEST, "pairs 81.0 %", "ran"),
    LineageNode("rl", "rl", {"model": "sft", "reward": "reward_model"}, DIGEST, "", "ran"),
    LineageNode("evaluate", "evaluate", {"model": "rl", "baseline": "eval_base"}, DIGEST),
    LineageNode("register", "register", {"model": "rl", "evaluation": "evaluate"}),
]


class Links(html.parser.HTMLParser):
    """Collects every attribute that makes a browser load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [f"{tag} {k}" for k, _ in attrs if k in {"src", "href", "data", "srcset"}]


def links(page: str) -> Links:
    parser = Links()
    parser.feed(page)
    return parser


def history(steps: int) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "reward/mean": 0.3 + 0.01 * step,
            "reward/component/accuracy": 0.2 + 0.01 * step,
            "reward/component/format": 0.1,
            "acc/mean": 0.2 + 0.005 * step,
            "entropy/mean": 1 - 0.01 * step,
            "resp_len/mean": 20 + math.sin(step),
            "kl/old_k3": 0.001,
            "kl/ref_k3": 0.002 * step,
            "mismatch/k3": 0.0005,
            "clip/high_frac": 0.01,
        }
        for step in range(1, steps + 1)
    ]


EVALUATIONS = [
    {"step": 0.0, "eval/greedy_accuracy": 0.3, "eval/greedy_low": 0.25, "eval/greedy_high": 0.35},
    {"step": 30.0, "eval/greedy_accuracy": 1.0, "eval/greedy_low": 0.9, "eval/greedy_high": 0.9999},
    {"step": 31.0, "eval/greedy_accuracy": 0.0, "eval/greedy_low": 1e-9, "eval/greedy_high": 0.1},
]


def assert_picture(path: Path) -> None:
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG" and image.width >= 900
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50  # not a blank sheet


@pytest.mark.parametrize("steps", [0, 3, 30])
def test_learning_curves_are_a_picture_and_a_page_that_loads_nothing(
    tmp_path: Path, steps: int
) -> None:
    png, page = learning_curves(history(steps), EVALUATIONS[:steps], "title <b>", tmp_path)
    assert_picture(png)
    text = page.read_text()
    parsed = links(text)
    assert parsed.found == [] and "script" in parsed.tags and "iframe" not in parsed.tags
    assert "<h1>title &lt;b&gt;</h1>" in text and len(text) < 100_000
    for name in ("Reward", "Accuracy", "Entropy", "Response length", "KL divergence", "Clipped"):
        assert f"<figcaption>{name}" in text
    assert ("not recorded" in text) == (steps == 0)


def test_before_after_is_a_picture(tmp_path: Path) -> None:
    results = [("base", 0.31, 0.25, 0.37), ("after RL", 1.0, 0.97, 0.9999)]
    assert_picture(before_after(results, "Held-out accuracy", tmp_path))


def test_panels_show_each_reward_component_and_the_evaluation_interval() -> None:
    panels = learning_panels(history(5), EVALUATIONS)
    assert [series.label for series in panels[0].series] == ["accuracy", "format", "total"]
    held_out = panels[1].series[1]
    assert list(held_out.low or ()) == [0.25, 0.9, 1e-9]
    below, above = held_out.reach() or ([], [])
    assert below == pytest.approx([0.05, 0.1, 0.0]) and above == pytest.approx([0.05, 0.0, 0.1])


def test_what_only_some_stages_have_gets_panels_of_its_own(tmp_path: Path) -> None:
    plain = [panel.title for panel in learning_panels(history(3), [])]
    assert len(plain) == 6
    names = (
        "curriculum/known_frac/inside",
        "curriculum/pass_rate/unseen",
        "progress/share/sums",
        "acc/task/sums",
        "distil/rollout_kl",
        "replay/taken_frac",
        "observed/nll",
    )
    rows = [row | dict.fromkeys(names, 0.25) for row in history(3)]
    panels = learning_panels(rows, [])
    assert [panel.title for panel in panels[:6]] == plain
    assert [panel.series[0].label for panel in panels[6:]] == [
        "inside the band",
        "unseen",
        "sums",
        "sums",
        "KL of the policy, sampled",
        "sampled before",
        "negative log-prob",
    ]
    png, page = learning_curves(rows, [], "RL", tmp_path)
    assert_picture(png)
    assert "<figcaption>Replayed groups<" in page.read_text("utf-8")


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    rows = [
        {"step": 1.0, "entropy/mean": math.nan},
        {"step": 2.0, "entropy/mean": 1.7976931348623157e308},
        {"step": 3.0, "entropy/mean": 0.5},
    ]
    (series,) = learning_panels(rows, [])[2].series
    assert list(series.steps) == [3.0]


def test_smoothing_keeps_a_constant_and_needs_ten_values() -> None:
    assert Series("x", "#000000", range(9), [1.0] * 9).smooth() is None
    assert Series("x", "#000000", range(12), [2.0] * 12).smooth() == [2.0] * 12
    bumpy = Series("x", "#000000", range(12), [0.0, 3.0] * 6).smooth() or []
    assert bumpy[1] == pytest.approx(1.0)


def test_a_stage_stands_below_everything_it_reads() -> None:
    level = depths(STAGES)
    for stage in STAGES:
        assert all(level[parent] < level[stage.name] for parent in stage.inputs.values())


def test_lineage_page_shows_stages_digests_results_and_every_input() -> None:
    page = lineage_html([*STAGES, LineageNode("odd<name>", "evaluate", {"model": "gone"})])
    parsed = links(page)
    assert parsed.found == [] and not parsed.tags & {"script", "iframe", "link"}
    assert page.count("marker-end") == sum(len(stage.inputs) for stage in STAGES)
    assert "sha256 0123456789ab" in page and "pairs 81.0 %" in page and "odd&lt;name&gt;" in page


def test_a_long_name_stays_inside_its_box() -> None:
    page = lineage_html([LineageNode("n" * 48, "sft")])
    assert f">{'n' * 24}…</text>" in page and f"<title>{'n' * 48}</title>" in page


def test_no_line_of_the_lineage_runs_through_a_box() -> None:
    page = lineage_html(STAGES)
    boxes = [
        (float(x), float(y))
        for x, y in re.findall(r'<rect x="(-?\d+)" y="(\d+)" [^>]*class="box"', page)
    ]
    assert len(boxes) == len(STAGES)
    for path in re.findall(r'<path d="(M[^"]*)" class="line"', page):
        numbers = [float(number) for number in re.findall(r"-?\d+", path)]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        for begin in range(0, len(points) - 1, 3):
            for t in (i / 40 for i in range(41)):
                x, y = bezier(points[begin : begin + 4], t)
                for left, top in boxes:
                    inside = left + 1 < x < left + BOX_WIDTH - 1
                    assert not (inside and top + 1 < y < top + BOX_HEIGHT - 1)


def bezier(points: list[tuple[float, float]], t: float) -> tuple[float, float]:
    weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
    x = sum(w * p[0] for w, p in zip(weights, points, strict=True))
    return x, sum(w * p[1] for w, p in zip(weights, points, strict=True))


def test_headline_prefers_held_out_results() -> None:
    held_out = {"eval/greedy_accuracy": 0.615, "eval/greedy_low": 0.58, "eval/greedy_high": 0.65}
    assert headline({"reward/mean": 0.5, **held_out}) == "accuracy 61.5 % (58.0 to 65.0)"
    assert headline({"rm/held_out_pair_accuracy": 0.8}) == "pairs 80.0 %"
    assert headline({"sft/loss": 0.4121}) == "loss 0.412"
    assert headline({}) == ""
