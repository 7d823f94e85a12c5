"""The `reasoning_gym` task, with the real package."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.contracts import Task
from posttrain.core.data.problem_sets import check_worked
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.plugin_manager import PluginManager

MANAGER = PluginManager()
TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
NUMBERS_AND_STORIES = ["chain_sum", "basic_arithmetic", "leg_counting", "gsm_symbolic", "products"]


def task(**fields: object) -> Task:  # type: ignore[type-arg]
    return MANAGER.build(Task, "reasoning_gym", fields)


MIXED = task(datasets=[*NUMBERS_AND_STORIES, "prime_factorization", "calendar_arithmetic"])


def test_questions_answers_and_worked_answers_come_from_the_generators() -> None:
    for problem in task(datasets={"chain_sum": {"config": TWO_TERMS}}).problems("train", 20, 0):
        a, operator, b, _, result = problem.worked.split()
        assert f"{a} {operator} {b} =" in problem.prompt
        assert int(result) == (int(a) + int(b) if operator == "+" else int(a) - int(b))
        assert result == problem.answer
    story = task(datasets=["leg_counting"]).problems("train", 1, seed=0)[0]
    assert story.worked == story.answer and "\n" in story.prompt


def test_the_splits_are_disjoint_though_the_generators_repeat_themselves() -> None:
    small = task(datasets={"chain_sum": {"config": TWO_TERMS}}, held_out_permille=300)
    train = {p.key for p in small.problems("train", 100, seed=1)}
    held_out = {p.key for p in small.problems("held_out", 40, seed=2)}
    assert len(train) == 100 and len(held_out) == 40 and not train & held_out


def test_an_exhausted_generator_says_how_many_problems_there_are() -> None:
    small = task(datasets={"chain_sum": {"config": TWO_TERMS}})
    with pytest.raises(DataError, match=r"'reasoning_gym: chain_sum' has 1\d\d distinct problems"):
        small.problems("train", 1000, seed=0)


def test_the_same_seed_gives_the_same_problems() -> None:
    assert MIXED.problems("held_out", 40, seed=3) == MIXED.problems("held_out", 40, seed=3)
    assert MIXED.problems("held_out", 40, seed=3) != MIXED.problems("held_out", 40, seed=4)


def test_weights_decide_the_mixture() -> None:
    mixed = task(datasets={"chain_sum": {"weight": 3}, "products": {"weight": 1}})
    names = Counter(p.metadata["dataset"] for p in mixed.problems("train", 400, seed=0))
    assert 260 < names["chain_sum"] < 340 and names["products"] == 400 - names["chain_sum"]


def test_the_worked_answer_is_always_judged_right_and_another_number_wrong() -> None:
    fresh = task(datasets=NUMBERS_AND_STORIES)
    for problem in MIXED.problems("train", 100, seed=0):
        assert MIXED.verify(problem, f"Let me see.\n{problem.worked}").correct == 1.0
        if problem.metadata["dataset"] in NUMBERS_AND_STORIES:
            # Another process has only the problem itself.
            assert fresh.verify(problem, problem.worked).correct == 1.0
            # The package's scorer gives partial credit to a text that contains the answer.
            assert fresh.verify(problem, f"{problem.answer}1").correct == 0.0
            assert fresh.verify(problem, "").parsed is None


def test_partial_credit_is_kept_only_on_request() -> None:
    kept = task(datasets=["products"], partial_credit=True)
    problem = kept.problems("train", 1, seed=0)[0]
    text = f"{problem.answer}1"
    assert 0.5 < kept.verify(problem, text).correct < 1.0
    assert task(datasets=["products"]).verify(problem, text).correct == 0.0


@pytest.mark.parametrize("name", ["dice", "fraction_simplification", "power_function"])
def test_a_fraction_and_a_power_of_ten_are_one_number(name: str) -> None:
    made = task(datasets=[name])
    for problem in made.problems("train", 12, seed=0):
        bare = problem.answer.strip("$")
        for said in (
            problem.answer,
            f"Hm, 2 of 3.\n{bare}",
            f"So it is {bare}.",
            f"It is ${bare}$",
        ):
            assert made.verify(problem, said).correct == 1.0, said
        assert made.verify(problem, f"{bare} or 7/{len(bare)}").correct == 0.0


def test_answers_that_are_no_numbers_are_read_from_the_last_line() -> None:
    dates = task(datasets={"calendar_arithmetic": {"config": {"tasks": ["weekday_of_date"]}}})
    problem = dates.problems("train", 1, seed=0)[0]
    assert dates.verify(problem, f"Hm, a day in 2022.\n{problem.answer}\n").correct == 1.0
    assert dates.verify(problem, "Hm, a day in 2022.").correct == 0.0


@settings(max_examples=25)
@given(st.text())
def test_any_text_gets_a_verdict(text: str) -> None:
    for problem in MIXED.problems("held_out", 12, seed=0):
        assert 0.0 <= MIXED.verify(problem, text).correct <= 1.0


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        (["chain_sums"], r"datasets.chain_sums: .*did you mean 'chain_sum'"),
        ({"chain_sum": {"config": {"max_term": 2}}}, r"config.max_term: .*mean 'max_terms'"),
        ({"chain_sum": {"config": {"seed": 2}}}, r"chain_sum.config.seed: no such setting"),
        ({"chain_sum": {"config": {"min_terms": 0}}}, r"config: min_terms must be positive"),
        ({"chain_sum": {"config": {"max_digits": 2.5}}}, r"chain_sum.config: .*'max_digits': 2.5"),
        ({"chain_sum": {"weight": 0}}, r"datasets.chain_sum.weight"),
        ({"chain_sum": {"wieght": 1}}, r"datasets.chain_sum.wieght"),
        ([], r"datasets"),
    ],
)
def test_a_wrong_setting_is_named(datasets: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(datasets=datasets)


def test_a_mixture_within_the_mixture_is_refused() -> None:
    with pytest.raises(ConfigError, match="composite: name the datasets to be mixed themselves"):
        task(datasets=["composite"])


def test_a_new_scorer_that_runs_the_answer_as_code_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules[type(MIXED).__module__]
    monkeypatch.setattr(module, "HARMLESS", {})
    with pytest.raises(ConfigError, match="evaluates answers as code"):
        task(datasets=["countdown"])


@pytest.mark.parametrize(
    "name",
    ["simple_integration", pytest.param("intermediate_integration", marks=pytest.mark.slow)],
)
def test_integrals_are_checked_by_numbers(name: str) -> None:
    assert_own_answers_right(name, 25)
    made = task(datasets=[name])
    for problem in made.problems("train", 10, seed=1):
        plain = problem.answer.replace("+ C", "").strip()
        assert made.verify(problem, plain).correct == 1.0
        assert made.verify(problem, f"3 + ({problem.answer})").correct == 1.0
        assert made.verify(problem, f"x + ({problem.answer})").correct == 0.0
        assert made.verify(problem, f"1.01 * ({problem.answer})").correct == 0.0


# --- any dataset of the package, by name --------------------------------------------------------

REFUSED = frozenset({"composite"})
EVALUATED = (
    "binary_matrix countdown n_queens number_sorting polynomial_multiplication puzzle24 "
    "spiral_matrix string_insertion"
).split()
MANY_ANSWERS = frozenset("boxnet graph_color propositional_logic rubiks_cube rush_hour".split())


def assert_own_answers_right(name: str, count: int) -> None:
    """The dataset builds, gives problems of both splits, and its own answers are right."""
    made = task(datasets=[name])
    for split in ("train", "held_out"):
        for problem in made.problems(split, count, seed=0):  # type: ignore[arg-type]
            if name in MANY_ANSWERS:
                assert problem.answer == problem.worked == ""
                assert made.verify(problem, "I do not know").correct == 0.0
                continue
            assert made.verify(problem, problem.answer).correct == 1.0
            assert made.verify(problem, f"Let me see.\n{problem.worked}\n").correct == 1.0
            assert made.verify(problem, "I do not know").correct < 1.0


def test_a_scorer_that_takes_any_text_for_right_is_not_asked() -> None:
    assert_own_answers_right("game_of_life_halting", 10)


@pytest.mark.parametrize("name", ["mini_sudoku", "rotate_matrix", "tower_of_hanoi"])
def test_a_grid_is_read_from_as_many_lines_as_it_has(name: str) -> None:
    assert_own_answers_right(name, 3)


@pytest.mark.parametrize("name", EVALUATED)
def test_an_answer_that_is_code_never_reaches_a_scorer_that_evaluates(
    name: str, tmp_path: Path
) -> None:
    assert_own_answers_right(name, 3)
    made = task(datasets=[name], partial_credit=True)
    trap = tmp_path / "trap"
    code = f"__import__('pathlib').Path({str(trap)!r}).touch()"
    for problem in made.problems("train", 2, seed=0):
        for text in (code, f"[{code}]", f"{code} or [1]", "9**9**9", "(lambda: 1)()", "exit()"):
            assert made.verify(problem, text).correct < 1.0
    assert not trap.exists()
    if name in ("spiral_matrix", "countdown"):  # and it is a trap: the package's scorers run it
        place = int(problem.metadata["seed"]), int(problem.metadata["index"])
        item = made._item(name, *place)  # type: ignore[attr-defined]
        made._blocks[name, place[0]].score_answer(code, item)  # type: ignore[attr-defined]
        assert trap.exists()


def test_a_right_answer_of_another_wording_counts() -> None:
    made = task(datasets=["countdown"])
    problem = made.problems("train", 1, seed=0)[0]
    assert made.verify(problem, f"Let me see.\n({problem.answer})").correct == 1.0
    assert made.verify(problem, f"{problem.answer} + 1").correct == 0.0


def test_problems_with_many_answers_are_judged_by_what_they_ask() -> None:
    made = task(datasets={"graph_color": {"config": {"num_colors": 4}}}, match="text")
    problem = made.problems("train", 1, seed=0)[0]
    block, index = int(problem.metadata["seed"]), int(problem.metadata["index"])
    puzzle = made._item("graph_color", block, index)["metadata"]["puzzle"]  # type: ignore[attr-defined]
    colours: dict[int, int] = {}
    for node in puzzle["vertices"]:
        near = {b if a == node else a for a, b in puzzle["edges"] if node in (a, b)}
        taken = {colours[other] for other in near if other in colours}
        colours[node] = next(c for c in puzzle["color_options"] if c not in taken)
    right = json.dumps({str(node): colour for node, colour in colours.items()})
    assert made.verify(problem, right).correct == 1.0
    first = puzzle["edges"][0]
    wrong = json.dumps({str(n): colours[first[0]] if n in first else c for n, c in colours.items()})
    assert made.verify(problem, wrong).correct == 0.0


def test_supervised_learning_without_a_worked_answer_is_refused() -> None:
    problems = task(datasets=["rush_hour"]).problems("train", 3, seed=0)
    made = task(datasets=["rush_hour"])
    with pytest.raises(DataError, match="3 of 3 training problems .* have no worked answer"):
        check_worked(made, problems)
    check_worked(MIXED, MIXED.problems("train", 3, seed=0))


@pytest.mark.slow
def test_any_dataset_of_the_package_can_be_named_but_for_those_known_to_be_refused() -> None:
    from reasoning_gym.factory import DATASETS

    assert REFUSED <= DATASETS.keys() and len(DATASETS) - len(REFUSED) >= 105
    for name in sorted(DATASETS.keys() - REFUSED):
        assert_own_answers_right(name, 2)
