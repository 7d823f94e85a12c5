"""Alarms of a stage: judged at every step, reported once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.alarms import Seen, judge
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import KlController
from posttrain.pipelines.stages.context import StageContext

ALARM_RAISED = "posttrain.alarm.raised"
TAG = "posttrain.alarm."
METRIC = "alarm/"


def step_alarms(
    context: StageContext,
    stage: RlStage,
    controller: KlController[Any],  # Any: of every config type
    step: int,
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
) -> dict[str, float]:
    """`alarm/NAME` 1 of each alarm that goes off.

    Silent alarms have no metric: a dozen zeros would take the place of others. An alarm is reported
    at the first step of the stage at which it goes off, also if that was before an interruption.
    """
    target = controller.target()
    seen = Seen(
        {**metrics, "step": float(step)},
        history,
        evaluations,
        None if target is None else (f"kl/ref_{target[0]}", target[1]),
        stage.mismatch_alarm,
    )
    texts = {name: text for name, text in judge(seen, context.run.alarms).items() if text}
    for name, text in texts.items():
        if not any(row.get(METRIC + name) for row in history):
            raise_alarm(context, name, step, text)
    return {METRIC + name: 1.0 for name in texts}


def raise_alarm(context: StageContext, name: str, step: int, text: str) -> None:
    """Report an alarm that goes off for the first time.

    A warning now and in the run's summary, a tag on the stage's MLflow run, an event in Prefect.
    """
    context.warn(f"{context.name}: alarm {name}: step {step}: {text}")
    context.tracker.set_tags({TAG + name: f"step {step}: {text}"})
    context.announce(
        ALARM_RAISED, {"stage": context.name, "alarm": name, "step": step, "text": text}
    )
