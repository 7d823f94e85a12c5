"""Which champion a rollback goes to, in every kind of history."""

from __future__ import annotations

import pytest

from posttrain.core.errors import RunError
from posttrain.pipelines.run.rollback import Past, earlier_champion


def history(*versions: Past) -> dict[str, Past]:
    return {version.version: version for version in versions}


def test_it_is_the_version_that_the_champion_replaced() -> None:
    known = history(Past("1", "", False), Past("2", "1", False))
    assert earlier_champion(Past("3", "2", False), known.get) == "2"
    assert earlier_champion(known["2"], known.get) == "1"


def test_versions_that_were_taken_back_are_passed_over() -> None:
    known = history(Past("1", "", False), Past("2", "1", True), Past("3", "2", True))
    assert earlier_champion(Past("4", "3", False), known.get) == "1"


@pytest.mark.parametrize(
    ("current", "why"),
    [
        (Past("1", "", False), "it is the first champion"),
        (Past("9", "8", False), "version 8, which it replaced, was deleted"),
        (Past("3", "2", False), "version 2 was itself taken back"),
        (Past("6", "5", False), "version 5 was itself taken back"),
    ],
)
def test_where_there_is_none_it_says_why_and_ends(current: Past, why: str) -> None:
    known = history(Past("2", "", True), Past("5", "6", True))
    with pytest.raises(RunError, match=why) as error:
        earlier_champion(current, known.get)
    assert "--to VERSION" in str(error.value)
