"""The tools `"calculator"` and `"search"`, the environment `"tools"`, the reward `"arpo_rule"`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.contracts import (
    Environment,
    NoConfig,
    Observation,
    Reward,
    Tool,
    ToolResult,
    Turn,
)
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.rollout.sampling import StopStrings
from posttrain.core.types import Problem, RewardSample, Verdict

MANAGER = PluginManager()
PROBLEM = Problem("k", "What is 1 + 1?", "2", "2")


def calculator(**fields: object) -> Tool[Any]:
    return MANAGER.build(Tool, "calculator", fields)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" -(4 - 10) // 4 ", "1"),
        ("-7 % 3", "2"),
        ("7 / 2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 100", str(2**100)),
        ("2 ** -2", "0.25"),
        ("sqrt(2)", "1.41421356237"),
        ("max(1, 2, 3) + round(2.6) + gcd(12, 18)", "12"),
        ("floor(pi) + ceil(e)", "6"),
        ("round(1234, -2) + round(5, -10 ** 12) + round(2, 10 ** 12)", "1202"),
    ],
)
def test_the_calculator_computes_as_python_does(text: str, value: str) -> None:
    assert calculator().call(text) == ToolResult(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "1 / 0",
        "9 ** 9 ** 9 ** 9",
        "2 ** 99999999",
        "10.0 ** 400",
        "(-8) ** 0.5",
        "exp(1e9)",
        "0 ** -1",
        "__import__('os')",
        "(1).__class__",
        "[1] * 10",
        "'a' * 10",
        "True + 1",
        "1 if 1 else 2",
        "lambda: 1",
        "open('x')",
        "max()",
        "max(*[1, 2])",
        "round(1, ndigits=2)",
        "round(2, 0.5)",
        "x",
        "1; 2",
        "1 << 9999",
        "1j",
        "\x00",
        "(" * 190,
        "-" * 199 + "1" * 0,
        "9" * 201,
        "1e308 * 10",
        "\ud800",
    ],
)
def test_the_calculator_refuses_in_words_and_at_once(text: str) -> None:
    began = time.thread_time()
    found = calculator().call(text)
    assert found.failed and found.text.startswith("error: ")
    assert time.thread_time() - began < 1.0


def test_the_calculator_s_numbers_are_bounded_on_the_way_too() -> None:
    assert not calculator(max_bits=64).call("2 ** 31 * 2 ** 31").failed
    assert calculator(max_bits=64).call("2 ** 40 * 2 ** 40 // 2 ** 79").failed


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("The cat sat.\nOn a mat.\n\nDogs bark at the moon.\n")
    (tmp_path / "b.md").write_text("A cat and a dog met another cat.\n\nMars is red.")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe cat")
    return tmp_path


def search(path: Path, **fields: object) -> Tool[Any]:
    return MANAGER.build(Tool, "search", {"path": str(path), **fields})


def test_search_ranks_passages_by_bm25(texts: Path) -> None:
    tool = search(texts, top=2)
    assert tool.call("CAT?").text.split("\n")[0] == "A cat and a dog met another cat."
    assert tool.call("red mars").text == "Mars is red."
    assert tool.call("zebra") == ToolResult("nothing found")
    # By hand: 4 passages, 'bark' in one of them, of 5 words; the mean is 24 words over 4.
    import math

    from posttrain.plugins.tools.search import SearchConfig, SearchTool

    built = SearchTool(SearchConfig(path=texts))
    assert built._mean == (6 + 5 + 8 + 3) / 4
    assert math.log(1 + 3.5 / 1.5) > math.log(1 + 2.5 / 2.5), "a rare word weighs more"
    assert tool.call("cat mars").text.split("\n")[0] == "Mars is red."


def test_search_shows_no_more_than_it_is_told_to(texts: Path) -> None:
    assert search(texts, top=1, max_chars=5).call("cat").text == "A cat"
    assert search(texts, passage="line", top=1).call("mat").text == "On a mat."
    assert search(texts / "a.txt").call("mars").text == "nothing found"


@pytest.mark.parametrize("query", ["", " .,!", "\x00", "((("])
def test_a_query_without_a_word_is_a_failure(texts: Path, query: str) -> None:
    assert search(texts).call(query).failed


def test_what_cannot_be_searched_is_a_data_error(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="correct `path`"):
        search(tmp_path / "nothing.txt")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        search(texts / "c.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no text"):
        search(tmp_path / "empty")


# --- the environment ------------------------------------------------------------------------------


class Broken(Tool[NoConfig]):
    """Raises."""

    name = "broken"
    Config = NoConfig
    description = "breaks"

    def call(self, arguments: str) -> ToolResult:
        raise KeyError(arguments)


def environment(**fields: object) -> Environment[Any]:
    given = {"tools": ["calculator", "broken"], "tags": {"calculator": "python"}, **fields}
    made = MANAGER.build(Environment, "tools", given)
    made.setup([calculator(), Broken(NoConfig())])
    return made


def answer(text: str, calls: int = 0, **fields: object) -> Observation:
    return environment(**fields).step(calls, Turn(text, ended=False))


def test_a_call_is_answered_in_the_result_s_form() -> None:
    found = answer("Let me see: <python>6 * 7</python>")
    assert found == Observation("<result>42</result>", False, 1, {"calls": 1.0, "failed": 0.0})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("6 * 7</python>", "no tool was called; calls are <python>...</python>, <broken>"),
        ("<calc>6 * 7</python>", "no tool was called"),
        ("<python>6 *</python>", "not an arithmetic expression"),
        ("<broken>x</broken>", "the tool failed (KeyError)"),
        ("<broken>6 * 7</python>", "no tool was called"),
    ],
)
def test_a_bad_call_is_an_observation_and_counted(text: str, says: str) -> None:
    found = answer(text)
    assert says in found.text and not found.done
    assert found.counts == {"calls": 1.0, "failed": 1.0}


def test_calls_beyond_the_limit_are_refused() -> None:
    assert "no call is left of 2" in answer("<python>1</python>", calls=2, max_calls=2).text
    assert answer("<python>1</python>", calls=1, max_calls=2).counts["failed"] == 0


def test_the_last_opening_tag_begins_the_argument() -> None:
    assert "<result>3</result>" == answer("<python>1 <python>1 + 2</python>").text


def test_an_answer_ends_the_episode() -> None:
    found = environment().step(1, Turn("<python>1</python> so it is 1", ended=True))
    assert found.done and found.counts == {} and found.state == 1


def test_results_are_cut() -> None:
    assert answer("<python>2 ** 99</python>", max_result_chars=3).text == "<result>633</result>"


def test_the_model_is_told_what_it_may_call() -> None:
    reported = environment().reset(PROBLEM)
    assert reported.state == 0 and reported.system is None
    for part in ("<python>...</python>: computes", "<result>...</result>", "At most 3 calls"):
        assert part in reported.suffix
    as_system = environment(place="system").reset(PROBLEM)
    assert as_system.suffix == "" and as_system.system == reported.suffix.strip()
    own = environment(instructions="Use: {calls}").reset(PROBLEM)
    assert own.suffix.startswith("Use: <python>")


def test_the_closing_tags_end_a_turn() -> None:
    assert environment().stop_strings() == ("</python>", "</broken>")
    assert environment(call_close="!").stop_strings() == ("!",)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"call_open": "do:"}, "called by the same text"),
        ({"tags": {"calc": "c"}}, "not among the tools"),
        ({"result": "done"}, "must contain {result}"),
        ({"tools": []}, "at least 1"),
    ],
)
def test_settings_under_which_calls_could_not_be_told_apart_are_refused(
    fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        environment(**fields)


# --- stop strings and the rule --------------------------------------------------------------------


def test_a_stop_string_is_seen_once_its_last_character_is_there() -> None:
    pieces = ["a", "</", "py", "", "tho", "n>b", "c"]
    found = StopStrings(lambda ids: "".join(pieces[i] for i in ids), ("</python>", "never"))
    seen = [found.completed_by_last(range(n + 1)) for n in range(len(pieces))]
    assert seen.index(True) == 5


def rule(text: str, correct: float) -> float | None:
    sample = RewardSample(
        PROBLEM, (1,), (2,), "<answer>2</answer>", False, Verdict(correct, None), transcript=text
    )
    return MANAGER.build(Reward, "arpo_rule").score([sample])[0].value


def test_arpo_s_rule() -> None:
    both = "<search>a</search><result>b</result><python>1</python><result>1</result>"
    form = "<answer>2</answer>"
    assert rule(both + form, 0.5) == pytest.approx(0.6)
    assert rule("<python>1</python>" + form, 0.5) == 0.5
    assert rule(both + form, 0.0) == 0.0
    assert rule(both, 1.0) == -1.0
    assert rule(form + " and more", 1.0) == -1.0
