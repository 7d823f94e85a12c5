"""Prefect's event of a better evaluation: one for each, with what it was and what it is."""

from __future__ import annotations

import json
import sqlite3
from itertools import accumulate
from pathlib import Path

from tests.helpers.learning import Budget, learning_config, make_model, run

EVERY = 3


def test_each_evaluation_that_is_better_than_all_before_it_is_an_event(tmp_path: Path) -> None:
    budget = Budget(15, {"evaluate_every": EVERY})
    config = learning_config(make_model(tmp_path, seed=0), {"dr_grpo": budget}, seed=0)
    config["task"] |= {"places": 2, "held_out_permille": 300}
    config["evaluation"]["num_problems"] = 30
    learned = run(tmp_path, config)
    curve = learned.curve("dr_grpo", "eval/greedy_accuracy")
    assert [step for step, _ in curve] == [*range(0, budget.steps + 1, EVERY)]
    best = accumulate((value for _, value in curve), max)
    expected = [
        (step, before, value)
        for (step, value), before in zip(curve[1:], best, strict=False)
        if value > before
    ]
    assert expected, "a run that gets better"
    database = sqlite3.connect(f"file:{tmp_path}/home/prefect/prefect.db?mode=ro", uri=True)
    query = "select payload from events where event = 'posttrain.eval.improved' order by occurred"
    reported = [json.loads(payload) for (payload,) in database.execute(query)]
    assert [(t["step"], t["before"], t["eval/greedy_accuracy"]) for t in reported] == expected
