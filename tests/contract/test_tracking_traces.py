"""Responses as traces in a real SQLite MLflow, read back with MLflow's client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Trace
from mlflow.exceptions import MlflowException

from posttrain.core.batch import RolloutBatch
from posttrain.core.kit.batches import build_batch
from posttrain.core.tracking.mlflow_run import TracedResponse, traced_responses
from posttrain.core.tracking.mlflow_tracker import PipelineTracker, prepare_database
from posttrain.core.types import Problem


@pytest.fixture
def tracker(tmp_path: Path) -> PipelineTracker:
    return PipelineTracker.start(
        uri=prepare_database(tmp_path),
        experiment="demo",
        run_name="first",
        config_yaml="",
        params={},
        tags={},
    )


def traces_of(tracker: PipelineTracker, run_id: str) -> list[Trace]:
    client = MlflowClient(tracking_uri=tracker.uri)
    found = client.search_traces(locations=[tracker.experiment_id], run_id=run_id)
    return sorted(found, key=lambda trace: trace.info.request_time)


def batch() -> RolloutBatch:
    """Six scored responses, of which 3 is paid best and 1 worst, and one that was not scored."""
    made = build_batch(
        torch.ones(7, 2),
        rewards=torch.tensor([0.5, -1.0, 0.4, 2.0, 0.0, 0.3, 9.0]),
        advantages=torch.tensor([0.0, -1.5, 0.0, 1.5, 0.0, 0.0, 0.0])[:, None].expand(7, 2),
        acc=torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        reward_components=torch.tensor([[0.5], [-1.0], [0.4], [2.0], [0.0], [0.3], [9.0]]),
    ).with_columns(scored=torch.tensor([True] * 6 + [False]))
    problems = tuple(Problem(f"k{i}", f"What is {i}?", "a", "w") for i in range(7))
    return replace(made, problems=problems, texts=tuple(f"answer {i}" for i in range(7)))


def test_the_best_and_the_worst_paid_are_chosen_and_none_that_was_not_scored() -> None:
    found = traced_responses(batch(), 4, ("accuracy",), 2)
    assert [one.response for one in found] == ["answer 3", "answer 1"]
    assert found[0].feedback == {
        "reward": 2.0,
        "reward/accuracy": 2.0,
        "advantage": 1.5,
        "correct": 1.0,
    }
    every = [one.response for one in traced_responses(batch(), 4, ("accuracy",), 99)]
    assert sorted(every) == [f"answer {i}" for i in range(6)]
    assert traced_responses(replace(batch(), problems=(), texts=()), 4, (), 2) == []


def test_a_trace_is_of_its_run_with_rewards_as_feedback(tracker: PipelineTracker) -> None:
    stage, other = tracker.stage("rl", "rl", {}), tracker.stage("rl2", "rl", {})
    stage.log_traces(traced_responses(batch(), 4, ("accuracy",), 2))
    tracker.finish("FINISHED")
    first, second = traces_of(tracker, stage.run_id)
    assert traces_of(tracker, other.run_id) == []
    (span,) = first.data.spans
    assert span.inputs == {"prompt": "What is 3?"} and span.outputs == "answer 3"
    assert second.data.spans[0].outputs == "answer 1"
    assert first.info.tags["posttrain.step"] == "4"
    feedback = {a.name: a.feedback.value for a in first.info.assessments if a.feedback}
    assert feedback == {"reward": 2.0, "reward.accuracy": 2.0, "advantage": 1.5, "correct": 1.0}
    assert span.attributes["finish_reason"] == "stop"


def test_each_turn_of_an_episode_is_a_span_of_its_own(tracker: PipelineTracker) -> None:
    stage = tracker.stage("rl", "rl", {})
    stage.log_traces([TracedResponse(1, "p", "a<tool>b", {"reward": 1.0}, {}, ("a", "b"))])
    tracker.finish("FINISHED")
    (trace,) = traces_of(tracker, stage.run_id)
    root, *turns = trace.data.spans
    assert (root.span_type, root.outputs) == ("AGENT", "a<tool>b")
    assert [(turn.name, turn.outputs) for turn in turns] == [("turn 1", "a"), ("turn 2", "b")]
    assert {turn.parent_id for turn in turns} == {root.span_id}


def test_a_server_that_takes_no_traces_is_told_of_once_and_the_run_goes_on(
    tracker: PipelineTracker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: object) -> None:
        raise MlflowException("no such endpoint")

    monkeypatch.setattr("mlflow.log_feedback", refuse)
    stage = tracker.stage("rl", "rl", {})
    stage.log_traces(traced_responses(batch(), 1, ("accuracy",), 2))
    stage.log_step(1, {"reward/mean": 0.5})
    tracker.finish("FINISHED")
    run = MlflowClient(tracking_uri=tracker.uri).get_run(stage.run_id)
    assert run.info.status == "FINISHED" and run.data.metrics["reward/mean"] == 0.5
    reported = [
        r.getMessage() for r in caplog.records if "are not shown as traces" in r.getMessage()
    ]
    assert len(reported) == 1 and "no such endpoint" in reported[0]
