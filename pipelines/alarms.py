"""Alarms of an RL step: measured at every step, told to people once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.pipelines.stages.context import StageContext

TAG = "posttrain.alarm.mismatch"


def mismatch_alarm(
    context: StageContext,
    step: int,
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, float]],
    threshold: float,
) -> dict[str, float]:
    """`alarm/mismatch`: 1 when mismatch/k3 exceeds `threshold`, 0 when not, none if unmeasured.

    The stage's first such step, also before an interruption, is a warning and a tag on its run.
    """
    k3 = metrics.get("mismatch/k3")
    if k3 is None:
        return {}
    if k3 <= threshold:
        return {"alarm/mismatch": 0.0}
    if not any(row.get("alarm/mismatch") for row in history):
        text = (
            f"step {step}: engine and trainer disagree on the sampled tokens, mismatch/k3 {k3:.4f} "
            f"> mismatch_alarm {threshold} nats: see whether sync/probe_abs_mean is small "
            "(if not, it is the weights or the precision), staleness/max is 0, and the engine "
            "samples as `generation` says; set rollout_correction.plugin to bound its effect. "
            "Later steps are only counted, in alarm/mismatch"
        )
        context.warn(f"{context.name}: {text}")
        context.tracker.set_tags({TAG: text})
    return {"alarm/mismatch": 1.0}
