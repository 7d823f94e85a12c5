"""Waiting threads spin for a bounded time, unless the user has chosen otherwise."""

from __future__ import annotations

import os

import pytest

from posttrain.core.runtime.startup import SPIN_COUNT, SPINS, WAIT_POLICY, bounded_waiting


def test_the_bound_is_set_where_nothing_was_chosen() -> None:
    assert bounded_waiting({"PATH": "/bin"}) == {SPIN_COUNT: str(SPINS)}


@pytest.mark.parametrize("name", [SPIN_COUNT, WAIT_POLICY])
def test_a_choice_of_the_user_s_stays(name: str) -> None:
    assert bounded_waiting({name: "7"}) == {}


def test_tests_have_it_too() -> None:
    assert SPIN_COUNT in os.environ or WAIT_POLICY in os.environ
