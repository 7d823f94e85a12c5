"""Alarms that a tiny model can be brought to set off, and where each is seen."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.helpers.learning import Budget, learning_config, make_model, run
from tests.helpers.plugin_site import offer

# A step of these stages has 128 responses.
REWARDS = '''
from posttrain.core.contracts import PluginConfig, Reward
from posttrain.core.hooks import hookimpl
from posttrain.core.types import Score


class Wrong(Reward):
    """1 less the verdict."""

    name = "wrong"
    Config = PluginConfig

    def score(self, samples):
        return [Score(1.0 - sample.verdict.correct) for sample in samples]


class Sevens(Reward):
    """The share of sevens, whatever was asked."""

    name = "sevens"
    Config = PluginConfig

    def score(self, samples):
        return [Score(sample.text.count("7") / 2) for sample in samples]


class Jumping(Reward):
    """The verdict, and from the seventh step on a thousand times it."""

    name = "jumping"
    runs_in = "host"
    Config = PluginConfig
    seen = 0

    def score(self, samples):
        self.seen += len(samples)
        factor = 1000.0 if self.seen > 6 * 128 else 1.0
        return [Score(factor * sample.verdict.correct) for sample in samples]


@hookimpl
def posttrain_register():
    return [Wrong, Sevens, Jumping]
'''
FAST = {"optimizer": {"learning_rate": 2.0e-2}}
HACKS = {
    "inputs": {"model": "learns"},
    "rewards": ["wrong"],
    "policy_loss": {"name": "ppo_clip", "clip_low": 0.02, "clip_high": 0.02},
    "kl": {"controller": {"name": "adaptive", "target": 0.01, "kl_unit": "token"}},
    "epochs": 3,
    "num_mini_batches": 2,
    "evaluate_every": 4,
    **FAST,
}
BUDGETS = {
    "jumps": Budget(8, {"rewards": ["jumping"], "mismatch_alarm": 1e-18}, "dr_grpo"),
    "collapses": Budget(20, {"rewards": ["sevens"], **FAST}, "dr_grpo"),
    "learns": Budget(40, {}, "dr_grpo"),
    "hacks": Budget(20, HACKS, "grpo"),
}
EXPECTED = {
    "jumps": {"grad_spike", "mismatch", "truncated"},
    "collapses": {"entropy_collapse", "equal_groups", "duplicates", "truncated"},
    "hacks": {"overoptimised", "clip_high", "policy_kl", "kl_target", "truncated"},
}


@pytest.mark.slow
def test_alarms_are_told_once_as_warnings_tags_and_events_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "alarming_rewards", REWARDS, monkeypatch)
    config = learning_config(make_model(tmp_path, seed=0), BUDGETS, seed=0)
    config["task"] |= {"places": 2, "held_out_permille": 600}
    config["evaluation"] |= {"num_problems": 50}
    config["alarms"] = {"clip_high": 0.1}  # the others at their defaults
    learned = run(tmp_path, config)
    result = learned.result
    client = MlflowClient(result["mlflow_uri"])
    events = told_events(tmp_path / "home")
    for stage, expected in EXPECTED.items():
        tags = client.get_run(result["stages"][stage]["mlflow_run_id"]).data.tags
        raised = {
            name.removeprefix("posttrain.alarm."): text
            for name, text in tags.items()
            if name.startswith("posttrain.alarm.")
        }
        assert expected <= set(raised), f"{stage}: {raised}"
        for name, text in raised.items():
            rung = [step for step, value in learned.curve(stage, f"alarm/{name}") if value]
            assert text.startswith(f"step {rung[0]}: ")
            assert [w for w in result["warnings"] if f"{stage}: alarm {name}:" in w] == [
                f"{stage}: alarm {name}: {text}"
            ]
            assert (stage, name, rung[0]) in events
        assert len(events) == len(set(events))


def told_events(home: Path) -> list[tuple[str, str, int]]:
    """Stage, alarm and step of each event that Prefect has of an alarm."""
    database = sqlite3.connect(f"file:{home}/prefect/prefect.db?mode=ro", uri=True)
    query = "select payload from events where event = 'posttrain.alarm.raised'"
    rows = [json.loads(payload) for (payload,) in database.execute(query)]
    return [(row["stage"], row["alarm"], row["step"]) for row in rows]
