"""The dashboard: groups, alarms on their curves, many steps, both themes, and the pointer."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.analysis.alarms import RULES, Raised, raised_in
from posttrain.core.analysis.dashboard import GROUPS, dashboard_page, write_dashboard
from posttrain.core.analysis.pictures import BLUE, Panel, Series, smoothed
from posttrain.core.analysis.svg import (
    POINTS,
    Chart,
    Mark,
    Scale,
    chart_svg,
    stretches,
    thinned,
)
from posttrain.core.config.alarms import AlarmsSection
from posttrain.core.tracking.metric_names import find_metric
from tests.helpers.browser import open_browser
from tests.helpers.series import flat, made, rising, with_alarms

CURVES = {
    "reward/mean": rising(0.1, 0.8),
    "reward/std": flat(0.4),
    "acc/mean": rising(0.1, 0.5),
    "entropy/mean": rising(0.5, 1.6),
    "group/zero_adv_frac": flat(0.2),
    "time/step_s": flat(2.0),
}


def stage(steps: int = 60) -> tuple[list[dict[str, float]], list[Raised]]:
    answers = {"average": rising(0.2, 0.5), "passed": rising(0.5, 0.8)}
    rows = made(CURVES, steps, held_out=rising(0.2, 0.5), every=max(5, steps // 10), **answers)
    judged = with_alarms(rows)
    return judged, raised_in(judged, AlarmsSection())


def values(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_every_alarm_is_marked_on_a_curve_and_every_curve_is_a_metric() -> None:
    assert all(rule.curves for rule in RULES.values())
    curves = [c for group in GROUPS for plot in group.plots for c in plot.curves]
    names = [c.metric for c in curves] + [b for c in curves for b in c.bounds if b]
    assert not [name for name in names if find_metric(name) is None]
    drawn = {c.metric for c in curves} | {"eval/pass_at/"}
    assert not [name for rule in RULES.values() for name in rule.curves if name not in drawn]


def test_the_page_has_the_groups_that_were_measured_and_says_which_alarms_were_raised() -> None:
    rows, raised = stage()
    assert [alarm.name for alarm in raised] == ["entropy_rise"]
    page = dashboard_page(rows, raised, "a <b>run</b>", "grpo")
    for title in ("Reward and held-out accuracy", "Entropy and KL", "Speed", "avg@8 and pass@8"):
        assert title in page
    for title in ("Critic", "Token weights", "Length and truncation", "Effective sample size"):
        assert title not in page, "nothing of it was measured"
    assert "a &lt;b&gt;run&lt;/b&gt;" in page and "<b>run" not in page
    assert f"<b>entropy_rise</b>, steps {raised[0].steps[0]} to 60" in page
    entropy = page[page.index("<figcaption>Entropy<") :]
    assert 'class="badge"' in entropy[: entropy.index("</figure>")]
    assert page.count('class="badge"') == 1, "on no other curve"
    assert "No alarm was raised" in dashboard_page(rows, [], "run")


def test_token_weights_and_components_have_charts_where_a_stage_has_them() -> None:
    more = {"token_weight/share/long": flat(0.2), "token_weight/peak": flat(3.0)}
    more |= {"reward/component/accuracy": flat(0.4), "reward/component/format": flat(1.0)}
    page = dashboard_page(made(CURVES | more), [], "run")
    assert "Weight by length of the response" in page and ">long <" in page and ">format <" in page
    assert "Weight by place" not in page, "nothing of it was measured"


def test_a_thousand_steps_stay_small_and_keep_their_extremes() -> None:
    rows, raised = stage(1000)
    rows[500]["reward/mean"] = 7.0
    rows[501]["reward/mean"] = float("nan")
    began = time.perf_counter()
    page = dashboard_page(rows, raised, "run")
    assert time.perf_counter() - began < 5 and len(page) < 1e6
    reward = values(page)["charts"][0][0]
    assert len(reward["steps"]) <= POINTS + 2 and max(reward["values"]) == 7.0


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    rows, raised = stage()
    path = write_dashboard(rows, raised, "run", "grpo", tmp_path / "plots")
    assert path.name == "dashboard.html" and path.read_text().endswith("</html>\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_in_both_themes_and_the_pointer_shows_values(
    tmp_path: Path, scheme: Any
) -> None:
    rows, raised = stage()
    path = write_dashboard(rows, raised, "run", "grpo", tmp_path)
    with open_browser() as page:
        page.emulate_media(color_scheme=scheme)
        page.goto(path.as_uri())
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 28)")
        figure = page.locator("figure", has_text="nats per token").first
        value = figure.locator(".legend i").first
        last = value.inner_text()
        figure.scroll_into_view_if_needed()
        box = figure.locator("svg").bounding_box()
        assert box is not None
        # The middle of the axis, which is step 30.
        middle = box["x"] + box["width"] * (58 + (580 - 58 - 14) / 2) / 580
        page.mouse.move(middle, box["y"] + box["height"] / 2)
        assert page.locator("#step").inner_text() == "step 30"
        assert float(value.inner_text()) == pytest.approx(rows[30]["entropy/mean"], rel=1e-3)
        assert value.inner_text() != last
        page.mouse.move(0, 0)
        assert value.inner_text() == last
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


# --- charts ---------------------------------------------------------------------------------------


def test_smoothing_keeps_a_constant_and_a_median_ignores_a_single_spike() -> None:
    spike = [1.0] * 50
    spike[25] = 100.0
    assert smoothed([2.0] * 30) == pytest.approx([2.0] * 30)
    assert smoothed([1.0] * 9) is None
    assert smoothed(spike, robust=True) == [1.0] * 50
    means = smoothed(spike)
    assert means is not None and max(means) > 10


def test_thinning_keeps_first_last_smallest_and_largest() -> None:
    points = [float(i % 7) for i in range(5000)]
    points[1234], points[4321] = -50.0, 50.0
    steps, kept = thinned(range(5000), points)
    assert len(kept) <= POINTS + 2 and steps[0] == 0 and steps[-1] == 4999
    assert min(kept) == -50 and max(kept) == 50 and steps == sorted(steps)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (Scale(0, 1, 0, 100), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(0, 60, 0, 1), [0, 20, 40, 60]),
        (Scale(1, 1000, 0, 3, log=True), [1, 10, 100, 1000]),
        (Scale(0.5, 0.5, 0, 1), [0.5]),
    ],
)
def test_ticks_are_round_values_within_the_scale(scale: Scale, expected: list[float]) -> None:
    assert scale.ticks() == pytest.approx(expected)


def test_a_log_scale_spaces_powers_evenly() -> None:
    scale = Scale(1, 1000, 0, 300, log=True)
    assert [scale(10.0**p) for p in range(4)] == pytest.approx([0, 100, 200, 300])


def test_steps_that_follow_one_another_are_one_stretch() -> None:
    assert stretches((3, 4, 5, 9, 11, 12)) == [(3, 5), (9, 9), (11, 12)]


def test_a_chart_alone_has_its_style_title_and_legend() -> None:
    series = Series("a & b", BLUE, [1, 2, 3], [1.0, 2.0, 1.5])
    chart = Chart(Panel("<Reward>", "reward", [series]), [Mark(1, (2,))])
    alone = chart_svg(chart, alone=True)
    assert (
        "prefers-color-scheme:dark" in alone and "&lt;Reward&gt;" in alone and "a &amp; b" in alone
    )
    assert "prefers-color-scheme" not in chart_svg(chart) and "a &amp; b" not in chart_svg(chart)
    assert "not recorded" in chart_svg(Chart(Panel("x", "y", [])))


def test_values_that_differ_by_rounding_alone_have_one_tick() -> None:
    steps = list(range(20))
    almost = [1 - 1e-13 * (step % 3) for step in steps]
    drawn = chart_svg(Chart(Panel("ess", "fraction", [Series("ess", BLUE, steps, almost)])))
    ticks = re.findall(r'text-anchor="end"[^>]*>([^<]*)<', drawn)
    assert ticks and len(ticks) == len(set(ticks)), drawn
