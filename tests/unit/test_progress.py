"""What the terminal shows of a run: plain lines, live bars, the summary."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.artifacts import Artifact, RunResult, StageResult
from posttrain.pipelines.run import progress, summary
from posttrain.pipelines.run.card import verdict
from posttrain.pipelines.run.progress import PlainReporter, RichReporter, describe, duration


def plain() -> tuple[PlainReporter, io.StringIO]:
    stream = io.StringIO()
    return PlainReporter(Console(file=stream, width=200)), stream


def test_only_the_metrics_worth_a_glance_are_shown() -> None:
    metrics = {"acc/mean": 0.25, "grad/norm": 3.0, "reward/mean": 0.5, "loss/total": 2.0}
    assert describe(metrics) == "reward 0.500  accuracy 25.0%  loss 2.0000"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.31, "0.3 s"), (42.4, "42 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_a_duration_reads_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_short_stage_prints_every_step_and_how_it_ended() -> None:
    reporter, stream = plain()
    reporter.stage_reached("rl")
    reporter.stage_started("rl", "rl", 3)
    for step in (1, 2, 3):
        reporter.step_done("rl", step, {"reward/mean": step / 10})
    reporter.stage_finished("rl", "ran", 61.0, {"eval/greedy_accuracy": 0.5})
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["[rl] reads its inputs", "[rl] started (rl, 3 steps)"]
    lines = lines[1:]
    assert [line.split("  ")[0] for line in lines[1:4]] == [f"[rl] step {i}/3" for i in (1, 2, 3)]
    # One step says nothing of the pace: a stage may begin with slow work, or continue at step 20.
    assert ["left" in line for line in lines[1:4]] == [False, True, False]
    assert lines[-1] == "[rl] ran in 1 min 1 s  held-out 50.0%"


def test_a_long_stage_prints_about_fifty_lines_with_the_first_and_the_last() -> None:
    reporter, stream = plain()
    reporter.stage_started("sft", "sft", 1003)
    for step in range(1, 1004):
        reporter.step_done("sft", step, {"sft/loss": 1.0})
    lines = stream.getvalue().splitlines()[1:]
    assert 45 <= len(lines) <= progress.MAX_LINES + 2
    assert "step 1/" in lines[0] and "step 1003/" in lines[-1]


def test_markup_in_a_message_is_printed_as_it_is() -> None:
    reporter, stream = plain()
    reporter.warn("tokens [B, T] and [red] stay")
    assert stream.getvalue() == "warning: tokens [B, T] and [red] stay\n"


def test_the_live_display_shows_stage_metrics_and_end() -> None:
    stream = io.StringIO()
    with RichReporter(Console(file=stream, force_terminal=True, width=160)) as reporter:
        reporter.stage_reached("rl")
        assert [task.fields["shown"] for task in reporter._progress.tasks] == ["reads its inputs"]
        reporter.stage_started("rl", "rl", 2)
        assert [task.fields["shown"] for task in reporter._progress.tasks] == [""]
        reporter.step_done("rl", 1, {"acc/mean": 0.25})
        reporter.step_done("rl", 2, {"acc/mean": 0.5})
        reporter.stage_finished("rl", "ran", 3.0, {"acc/mean": 0.5})
        reporter.stage_started("register", "register", 0)
        reporter.stage_finished("register", "cached", 0.1, {})
        reporter.say("hello [B, T]")
    shown = stream.getvalue()
    for text in ("rl", "2/2", "ran in 3.0 s", "accuracy 50.0%", "cached in 0.1 s", "hello [B, T]"):
        assert text in shown


@pytest.mark.parametrize(("status", "filled"), [("ran", 5), ("failed", 2), ("killed", 2)])
def test_a_stage_that_did_not_end_keeps_its_bar_where_it_was(status: str, filled: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with RichReporter(console) as reporter:
        reporter.stage_started("rl", "rl", 5)
        reporter.step_done("rl", 2, {})
        reporter.stage_finished("rl", status, 3.0, {})
        (task,) = reporter._progress.tasks
        assert task.completed == filled


def test_away_from_a_terminal_or_on_request_the_lines_are_plain() -> None:
    assert isinstance(progress.make_reporter(json=False, plain=True), PlainReporter)
    reporter: Reporter = progress.make_reporter(json=True, plain=True)
    assert isinstance(reporter, PlainReporter)


def run_result(uri: str = "sqlite:////home/mlflow/mlflow.db") -> RunResult:
    artifact = Artifact("model", "/home/artifacts/sft-1/model", "abc", "sft")
    before = {"eval/greedy_accuracy": 0.5, "eval/greedy_low": 0.43, "eval/greedy_high": 0.57}
    after = {"eval/greedy_accuracy": 0.75, "eval/gain": 0.25, "eval/gain_low": 0.1}
    stages = {
        "before": StageResult("before", "evaluate", "cached", (), before, 2.0),
        "sft": StageResult("sft", "sft", "ran", (artifact,), {"sft/loss": 0.1}, 60.0),
        "after": StageResult("after", "evaluate", "ran", (), after | {"eval/gain_high": 0.4}, 2.0),
    }
    return RunResult(
        "run-1",
        "completed",
        stages,
        uri,
        "m1",
        "7",
        "p1",
        Path("/home"),
        64.0,
        (),
        {"after": "before"},
    )


def test_the_summary_shows_before_after_gain_stages_artifacts_and_links() -> None:
    stream = io.StringIO()
    summary.print_summary(run_result(), Console(file=stream, width=160))
    shown = stream.getvalue()
    for text in (
        "50.0 % [43.0, 57.0]",
        "+25.0 points [+10.0, +40.0] over before",
        "cached",
        "/home/artifacts/sft-1/model",
        "http://127.0.0.1:5000/#/experiments/7/runs/m1",
        "http://127.0.0.1:4200/runs/flow-run/p1",
        "posttrain ui --home /home",
    ):
        assert text in shown, text


@pytest.mark.parametrize(
    ("low", "says"), [(0.1, "Better: "), (-0.1, "No difference is shown: "), (-0.9, "Worse: ")]
)
def test_the_verdict_of_the_card_names_what_it_compares(low: float, says: str) -> None:
    result = run_result()
    changed = {"eval/gain_low": low, "eval/gain_high": -0.1 if low < -0.5 else 0.4}
    after = replace(result.stages["after"], metrics=result.stages["after"].metrics | changed)
    text = verdict({**result.stages, "after": after}, result.baselines)
    assert text.startswith(f"{says}held-out accuracy, after: +25.0 points")
    assert "] over before" in text
    assert "sampled" not in text
    sampled = {
        "eval/sampled_gain": 0.3,
        "eval/sampled_gain_low": 0.2,
        "eval/sampled_gain_high": 0.4,
    }
    after = replace(after, metrics=dict(after.metrics) | sampled)
    text = verdict({**result.stages, "after": after}, result.baselines)
    better = "Better: sampled answers, after: +30.0 points [+20.0, +40.0] over before."
    assert better in text and says in text
    assert text.startswith(better) == (says == "No difference is shown: "), "what is shown is first"


def test_links_go_to_the_tracking_server_when_there_is_one() -> None:
    found = summary.links(run_result("http://tracking:80/"))
    page = "http://tracking:80/#/experiments/7/runs/m1?workflowType=machine_learning"
    assert found["mlflow"] == page


def test_the_json_form_holds_status_artifacts_and_metrics_of_each_stage() -> None:
    value = summary.to_json(run_result())
    assert value["run_id"] == "run-1" and value["mlflow_run_id"] == "m1"
    stages = value["stages"]
    assert isinstance(stages, dict)
    assert stages["sft"]["status"] == "ran"
    assert stages["sft"]["metrics"] == {"sft/loss": 0.1}
    assert stages["sft"]["artifacts"] == [
        {"kind": "model", "uri": "/home/artifacts/sft-1/model", "digest": "abc"}
    ]
