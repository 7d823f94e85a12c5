"""`dashboard`: the curves of a past or present rl stage with its alarms, as one page."""

from __future__ import annotations

from posttrain.core.analysis.alarms import raised_in, with_samples
from posttrain.core.analysis.dashboard import about_stage, dashboard_page
from posttrain.core.analysis.report import Report, table
from posttrain.core.analysis.svg import stretches
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.contracts import KlController
from posttrain.core.errors import ConfigError
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.analysis.run_results import step_rows


def dashboard_of(run: PastRun, wanted: str | None) -> Report:
    """The dashboard of the stage named, or of the run's only stage of kind rl or distill.

    A stage that still runs has its steps so far. Raises `ConfigError` for a stage of another kind,
    `ResourceError` where no step is on record.
    """
    name = run.training_stage(wanted)
    stage = run.resolved.config.stages[name]
    if not isinstance(stage, RlStage):
        raise ConfigError(
            f"stage '{name}' is of kind '{stage.kind}'; dashboards are of stages of kind rl or "
            "distill, and MLflow has the curves of others (posttrain ui)"
        )
    found, source = step_rows(run, name)
    history = [{"step": float(step), **metrics} for step, metrics in sorted(found.items())]
    controller = run.manager.build(
        KlController, stage.kl.controller.name, stage.kl.controller.fields()
    )
    target = controller.target()
    found_alarms = raised_in(
        history,
        run.resolved.config.alarms,
        None if target is None else (f"kl/ref_{target[0]}", target[1]),
        stage.mismatch_alarm,
    )
    look = f"posttrain inspect {run.short_id} --stage {name} --step "
    raised = [with_samples(alarm, f"{look}{alarm.steps[0]}") for alarm in found_alarms]
    done = max(found)
    title = f"{run.resolved.config.name}: {name}, run {run.short_id}"
    rows = [
        {
            "alarm": alarm.name,
            "steps": ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in stretches(alarm.steps)),
            "what": alarm.text,
        }
        for alarm in raised
    ]
    notes = [] if source == "journal" else [f"the steps are those of the {source}: no evaluations"]
    return Report(
        title,
        notes,
        [table(f"Alarms up to step {done}", rows)],
        {"run_id": run.record.run_id, "stage": name, "steps": done, "alarms": rows},
        page=dashboard_page(history, raised, title, about_stage(stage, done)),
    )
