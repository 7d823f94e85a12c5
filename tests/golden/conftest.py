"""Prints how many of the peers' recorded answers our plugins give."""

from __future__ import annotations

import pytest

CASE_TEST = "test_the_peer_gives_the_same_numbers"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line beside pytest's own."""

    def count(outcome: str) -> int:
        reports = terminalreporter.stats.get(outcome, [])
        return sum(CASE_TEST in r.nodeid and r.when == "call" for r in reports)

    passed, failed = count("passed"), count("failed")
    if passed + failed:
        terminalreporter.write_line(f"golden cases: {passed} of {passed + failed} equal the peers'")
