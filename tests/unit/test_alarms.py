"""Each alarm goes off where it should, is silent where it should, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.analysis.alarms import RULES, Row, Seen, judge
from posttrain.core.config.sections import AlarmsSection

LIMITS = AlarmsSection()
STEADY = [{"step": float(i), "grad/norm": 1.0} for i in range(1, 6)]


def three(share: float) -> list[Row]:
    return [{"step": float(i), "group/zero_adv_frac": share} for i in (1, 2)]


def held_out(step: float, accuracy: float, half: float = 0.05) -> Row:
    key = "eval/greedy"
    return {
        "step": step,
        f"{key}_accuracy": accuracy,
        f"{key}_low": accuracy - half,
        f"{key}_high": accuracy + half,
    }


FIRST = {"step": 1.0, "entropy/mean": 2.0, "resp_len/mean": 10.0, "reward/mean": 0.3}
FALLEN = (held_out(0, 0.2), held_out(1, 0.6), held_out(9, 0.3))
# Name: what makes it go off, what is just not enough, a word of the advice.
CASES: dict[str, tuple[Seen, Seen, str]] = {
    "mismatch": (
        Seen({"mismatch/k3": 0.021}),
        Seen({"mismatch/k3": 0.02}),
        "rollout_correction",
    ),
    "entropy_collapse": (
        Seen({"entropy/mean": 0.19}, [FIRST]),
        Seen({"entropy/mean": 0.2}, [FIRST]),
        "entropy_coef",
    ),
    "truncated": (
        Seen({"resp_len/truncated_frac": 0.31}),
        Seen({"resp_len/truncated_frac": 0.3}),
        "max_response_length",
    ),
    "length_explosion": (
        Seen({"resp_len/mean": 30.1}, [FIRST]),
        Seen({"resp_len/mean": 30.0}, [FIRST]),
        "token-mean",
    ),
    "overoptimised": (
        Seen({"step": 9.0, "reward/mean": 0.4}, [FIRST], FALLEN),
        Seen({"step": 9.0, "reward/mean": 0.3}, [FIRST], FALLEN),
        "posttrain inspect",
    ),
    "equal_groups": (
        Seen({"group/zero_adv_frac": 1.0}, three(0.9)),
        Seen({"group/zero_adv_frac": 1.0}, three(0.89)),
        "num_generations",
    ),
    "clip_high": (
        Seen({"clip/high_frac": 0.31}),
        Seen({"clip/high_frac": 0.3}),
        "policy_loss.clip_high",
    ),
    "policy_kl": (Seen({"kl/old_k3": 0.11}), Seen({"kl/old_k3": 0.1}), "kl_guard"),
    "kl_target": (
        Seen({"kl/ref_sequence": 12.1}, kl_target=("kl/ref_sequence", 6.0)),
        Seen({"kl/ref_sequence": 12.0}, kl_target=("kl/ref_sequence", 6.0)),
        "coefficient",
    ),
    "grad_spike": (
        Seen({"grad/norm": 10.1}, STEADY),
        Seen({"grad/norm": 10.0}, STEADY),
        "max_grad_norm",
    ),
    "duplicates": (
        Seen({"sampling/duplicate_frac": 0.51, "group/all_correct_frac": 0.5}),
        Seen({"sampling/duplicate_frac": 0.51, "group/all_correct_frac": 0.51}),
        "temperature",
    ),
    "ess_seq": (Seen({"ess/seq": 0.29}), Seen({"ess/seq": 0.3}), "max_staleness"),
}


def test_every_alarm_has_a_case() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("name", CASES)
def test_it_goes_off_says_what_to_do_and_is_silent_just_below(name: str) -> None:
    loud, quiet, advice = CASES[name]
    assert advice in judge(loud, LIMITS)[name]
    assert judge(quiet, LIMITS)[name] == ""


@pytest.mark.parametrize("name", [name for name in CASES if name != "mismatch"])
def test_it_can_be_turned_off(name: str) -> None:
    off = AlarmsSection(**{name: False if name == "overoptimised" else None})
    assert name not in judge(CASES[name][0], off)


@pytest.mark.parametrize("name", RULES)
def test_what_was_not_measured_is_not_judged(name: str) -> None:
    assert name not in judge(Seen({"step": 9.0}, [FIRST, *STEADY], FALLEN[:2]), LIMITS)


def test_accuracy_that_may_have_fallen_by_chance_is_no_alarm() -> None:
    wide = (held_out(1, 0.6, 0.2), held_out(9, 0.3, 0.2))
    assert judge(Seen({"step": 9.0, "reward/mean": 0.4}, [FIRST], wide), LIMITS) == {
        "overoptimised": ""
    }


def test_groups_that_are_solved_are_told_as_such() -> None:
    seen = Seen({"group/zero_adv_frac": 1.0, "group/all_correct_frac": 0.9}, three(1.0))
    assert "solved" in judge(seen, LIMITS)["equal_groups"]


def test_the_page_about_alarms_names_each_with_its_threshold() -> None:
    page = (Path(__file__).parents[2] / "docs" / "alarms.md").read_text()
    for name in RULES:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        value = getattr(LIMITS, name, 0.02)
        assert row.endswith(" on |" if value is True else f"| {value:g} |"), row
