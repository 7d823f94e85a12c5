"""Each alarm goes off where it should, is silent where it should, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core.analysis.alarm_samples import StepSamples
from posttrain.core.analysis.alarms import RULES, Row, Seen, judge, look_at, raised_in
from posttrain.core.config.alarms import AlarmsSection
from posttrain.core.tracking.metric_names import ALARM
from posttrain.core.training.step_record import is_reproducible
from tests.helpers.series import Curve, flat, made, rising, with_alarms

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


def seen(rows: list[dict[str, float]]) -> Seen:
    """What rules see at the last of the rows."""
    held = [row for row in rows if "eval/greedy_accuracy" in row]
    told = [row for row in rows if "eval/sampled_problems" in row]
    return Seen(rows[-1], rows[:-1], held, told)


def late(before: float, after: float) -> Curve:
    """One value in the first half, another in the second."""
    return lambda done: before if done < 0.5 else after


UP = rising(0.2, 0.6)
LENGTH, REWARD, ACC = "resp_len/mean", "reward/mean", "acc/mean"
SPREAD = {"reward/std": flat(0.4)}
STALLED = {LENGTH: late(100, 151), REWARD: flat(0.5), ACC: flat(0.5)}
SHRUNK = {LENGTH: rising(100, 40), REWARD: UP, ACC: flat(0.3)}
SIGNAL = "group/zero_adv_frac"
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
    "entropy_rise": (
        seen(made({"entropy/mean": late(0.6, 1.21)})),
        seen(made({"entropy/mean": late(0.6, 1.19)})),
        "read responses",
    ),
    "length_stalled": (
        seen(made(STALLED, 80)),
        seen(made(STALLED | {LENGTH: late(100, 149)}, 80)),
        "max_response_length",
    ),
    "length_shrinks": (
        seen(made(SHRUNK)),
        seen(made(SHRUNK | {ACC: rising(0.3, 0.4)})),
        "shortest responses",
    ),
    "held_out_flat": (
        seen(made({REWARD: UP, **SPREAD}, held_out=flat(0.3))),
        seen(made({REWARD: rising(0.2, 0.41), **SPREAD}, held_out=flat(0.3))),
        "by heart",
    ),
    "signal_fades": (
        seen(made({SIGNAL: rising(0.2, 0.85), ACC: flat(0.5)})),
        seen(made({SIGNAL: rising(0.2, 0.75), ACC: flat(0.5)})),
        "sampler 'dynamic'",
    ),
    "diversity_lost": (
        seen(made({}, average=rising(0.2, 0.4), passed=flat(0.6))),
        seen(made({}, average=rising(0.2, 0.4), passed=rising(0.6, 0.62))),
        "pass_at_k",
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


# What good stages look like: learning in several ways, noise included.
GOOD: dict[str, list[dict[str, float]]] = {
    # The policy stops rambling, is right more often and surer; what it can solve grows as well.
    "learns, shorter": made(
        {
            "entropy/mean": rising(1.5, 0.4),
            LENGTH: rising(16, 6),
            "resp_len/truncated_frac": rising(0.25, 0.0),
            REWARD: UP,
            ACC: UP,
            **SPREAD,
            SIGNAL: rising(0.2, 0.5),
        },
        held_out=rising(0.2, 0.55),
        average=rising(0.2, 0.55),
        passed=rising(0.5, 0.8),
        noise=0.1,
    ),
    # Reasoning grows longer all the time, entropy with it.
    "learns, longer": made(
        {
            "entropy/mean": rising(0.3, 0.6),
            LENGTH: rising(400, 1000),
            REWARD: UP,
            ACC: UP,
            **SPREAD,
            SIGNAL: rising(0.5, 0.4),
        },
        200,
        held_out=rising(0.2, 0.5),
        noise=0.1,
    ),
    # Solved half way: length, reward and accuracy stay, most groups are all right.
    "solves": made(
        {
            LENGTH: lambda done: 20 + 20 * min(1, 2 * done),
            REWARD: lambda done: 0.3 + 0.65 * min(1, 2 * done),
            ACC: lambda done: 0.3 + 0.65 * min(1, 2 * done),
            **SPREAD,
            SIGNAL: lambda done: 0.2 + 0.6 * min(1, 2 * done),
        },
        100,
        held_out=lambda done: 0.3 + 0.65 * min(1, 2 * done),
        average=lambda done: 0.3 + 0.65 * min(1, 2 * done),
        passed=lambda done: 0.7 + 0.28 * min(1, 2 * done),
        noise=0.02,
    ),
    # Right from the start, and shaped to be brief: there is nothing for accuracy to gain.
    "shorter, still right": made(
        {LENGTH: rising(100, 30), REWARD: UP, ACC: flat(0.95), **SPREAD}, held_out=flat(0.95)
    ),
    # Nothing is learned, and nothing else happens.
    "learns nothing": made(
        {"entropy/mean": flat(1.0), LENGTH: flat(30), REWARD: flat(0.2), ACC: flat(0.2), **SPREAD},
        held_out=flat(0.2),
        average=flat(0.2),
        passed=flat(0.5),
        noise=0.2,
    ),
    # Too few held-out problems to say that accuracy is where it was.
    "four held-out problems": made(
        {REWARD: UP, ACC: UP, **SPREAD}, held_out=flat(0.25), problems=4
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_stage_raises_nothing_at_any_step(name: str) -> None:
    raised = {key for row in with_alarms(GOOD[name]) for key in row if key.startswith(ALARM)}
    assert raised == set()


def test_entropy_may_fall_while_the_stage_learns_or_when_it_has_solved_its_problems() -> None:
    low = {"entropy/mean": late(2.0, 0.1)}
    collapsed = made(low | {REWARD: flat(0.5), ACC: flat(0.5)}, noise=0.05)
    assert "stopped exploring" in judge(seen(collapsed), LIMITS)["entropy_collapse"]
    for more in ({REWARD: UP, ACC: flat(0.5)}, {REWARD: flat(0.9), ACC: flat(0.95)}):
        assert judge(seen(made(low | more, noise=0.02)), LIMITS)["entropy_collapse"] == ""


def test_right_answers_that_are_the_same_are_no_duplicates_to_warn_of() -> None:
    rows = {"sampling/duplicate_frac": 0.8, "acc/mean": 0.3}
    assert judge(Seen(rows), LIMITS)["duplicates"] == ""
    assert "more than are right" in judge(Seen(rows | {"acc/mean": 0.29}), LIMITS)["duplicates"]


def test_length_that_stops_while_the_reward_still_rises_is_no_alarm() -> None:
    learning = STALLED | {REWARD: rising(0.2, 0.6)}
    assert judge(seen(made(learning, 80)), LIMITS)["length_stalled"] == ""
    solved = STALLED | {ACC: flat(0.9)}
    assert judge(seen(made(solved, 80)), LIMITS)["length_stalled"] == ""


def test_entropy_that_was_next_to_nothing_may_double() -> None:
    rows = made({"entropy/mean": late(0.1, 0.5)})
    assert judge(seen(rows), LIMITS)["entropy_rise"] == ""


def test_pass_at_k_that_falls_is_an_alarm_even_from_everything() -> None:
    rows = made({}, average=rising(0.2, 0.7), passed=rising(1.0, 0.8))
    assert "pass@8 went from 98.3% to 83.3%" in judge(seen(rows), LIMITS)["diversity_lost"]
    ceiling = made({}, average=rising(0.2, 0.7), passed=flat(1.0))
    assert judge(seen(ceiling), LIMITS)["diversity_lost"] == ""


def test_held_out_accuracy_is_judged_at_evaluations_only() -> None:
    rows = [*made({REWARD: UP, **SPREAD}, held_out=flat(0.3)), {"step": 61.0, REWARD: 0.6}]
    assert "held_out_flat" not in judge(seen(rows), LIMITS)


def test_short_answers_with_held_out_accuracy_where_it_was() -> None:
    """The training verdict follows the reward, held-out accuracy does not."""
    rows = made(SHRUNK | {ACC: UP}, held_out=flat(0.3))
    assert "short answers" in judge(seen(rows), LIMITS)["length_shrinks"]
    rows = made(SHRUNK | {ACC: UP}, held_out=UP)
    assert judge(seen(rows), LIMITS)["length_shrinks"] == ""


def test_alarms_of_a_history_are_found_again_with_steps_and_texts() -> None:
    rows = with_alarms(made({"entropy/mean": late(0.6, 1.5)}, 20))
    (found,) = raised_in(rows, LIMITS)
    assert found.name == "entropy_rise"
    assert found.steps == tuple(range(found.steps[0], 21)) and 11 <= found.steps[0] <= 14
    first = rows[found.steps[0]]
    assert found.text == judge(Seen(first, rows[: found.steps[0]]), LIMITS)["entropy_rise"] != ""
    assert raised_in(made({"entropy/mean": flat(1.0)}), LIMITS) == []


def test_a_replay_which_has_no_evaluations_compares_no_alarms() -> None:
    assert is_reproducible("reward/mean", 1.0)
    assert not is_reproducible("alarm/overoptimised", 1.0)


def sample(group: int, response: str, reward: float, correct: float = 0.0) -> dict[str, object]:
    cut = "length" if response.endswith("...") else "stop"
    return {
        "group": group,
        "response": response,
        "reward": reward,
        "correct": correct,
        "advantage": reward - 0.5,
        "finish_reason": cut,
    }


SAMPLES = StepSamples(
    7,
    [
        sample(0, "a", 0.0),
        sample(0, "a", 0.0),
        sample(1, "long...", 1.0, 1.0),
        sample(1, "wrong but paid", 2.0),
    ],
    [1, 1, 9, 5],
    [0.1, float("nan"), 2.0, 0.5],
)
AT = "tables/samples/step-000007.json"


def test_every_alarm_says_where_to_look() -> None:
    assert [name for name, rule in RULES.items() if rule.rows is None] == ["diversity_lost"]
    for name in RULES:
        assert "step-000007" in look_at(name, SAMPLES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("truncated", f"rows 2 of {AT} (responses that the limit cut)"),
        ("length_explosion", f"rows 2, 3, 0, 1 of {AT} (the longest responses)"),
        ("entropy_rise", f"rows 2, 3, 0 of {AT} (the responses of highest entropy)"),
        ("entropy_collapse", f"rows 0, 3, 2 of {AT} (the responses of lowest entropy)"),
        ("equal_groups", f"rows 0 of {AT} (first rows of groups with equal rewards)"),
        ("duplicates", f"rows 1 of {AT} (responses that repeat one of their group)"),
        ("grad_spike", f"rows 3, 0, 1, 2 of {AT} (the responses of largest advantage)"),
        (
            "overoptimised",
            f"rows 3, 0, 1 of {AT} (wrong responses with the most reward); "
            "tables/held_out/step-000007.json",
        ),
    ],
)
def test_the_rows_are_those_that_show_it(name: str, expected: str) -> None:
    assert look_at(name, SAMPLES) == expected
    command = "posttrain inspect 3f2a9c --stage rl --step 7"
    assert look_at(name, SAMPLES, command) == f"{expected}; {command}"


def test_lost_diversity_is_seen_in_the_sampled_answers() -> None:
    text = look_at("diversity_lost", SAMPLES, "posttrain inspect")
    assert text.startswith("tables/held_out_sampled/step-000007.json against step-000000.json")
    assert "inspect" not in text, "the step's own samples do not show it"
