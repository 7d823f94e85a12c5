"""The decision table of aggregation modes on docs/token-weights.md: a row for each, none wrong."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from posttrain.core.tracking.metric_names import METRICS
from tests.helpers.losses import MANAGER, build_aggregator

PAGE = (Path(__file__).resolve().parents[2] / "docs/token-weights.md").read_text()
COLUMNS = ["mode", "a token of row i weighs", "strengths", "weaknesses", "use when"]
LENGTHS, PROMPTS = (3, 1, 5, 2), (0, 0, 1, 1)


def rows() -> dict[str, list[str]]:
    """Cells of each row of the decision table, by mode."""
    lines = PAGE.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| mode |"))
    assert cells(lines[head]) == COLUMNS
    found = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        mode, *rest = cells(line)
        found[mode.strip("`")] = rest
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def value_of(formula: str, names: dict[str, float]) -> float:
    """`1 / (a * b)`, with or without a denominator."""
    found = re.fullmatch(r"`1(?: / \(?([A-Za-z_ *]+)\)?)?`", formula)
    assert found is not None, formula
    factors = [] if found[1] is None else found[1].split(" * ")
    return 1 / math.prod(names[factor] for factor in factors)


def test_every_mode_has_a_row_and_no_cell_is_empty() -> None:
    modes = {e.name for e in MANAGER.entries("aggregator") if e.package == "posttrain"}
    assert rows().keys() == modes
    assert all(len(row) == 4 and all(row) for row in rows().values())


@pytest.mark.parametrize("mode", [e.name for e in MANAGER.entries("aggregator")])
def test_the_formulas_are_what_the_modes_compute(mode: str) -> None:
    mask = (torch.arange(5)[None, :] < torch.tensor(LENGTHS)[:, None]).double()
    aggregator = build_aggregator(mode)
    counts = aggregator.count(mask, torch.tensor(PROMPTS))
    weights = aggregator.weights(mask, counts)
    for row, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        names = {
            "N_tok": sum(LENGTHS),
            "N_seq": len(LENGTHS),
            "P": len(set(PROMPTS)),
            "n_i": length,
            "n_p": sum(n for n, p in zip(LENGTHS, PROMPTS, strict=True) if p == prompt),
            "L": 8,  # what `build_aggregator` sets
        }
        assert float(weights[row, 0]) == pytest.approx(value_of(rows()[mode][0], names))


def test_every_metric_is_on_the_page() -> None:
    for name in METRICS:
        if name.startswith("token_weight/"):
            assert f"`{name}`" in PAGE, name
