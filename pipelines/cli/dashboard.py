"""`posttrain dashboard`: the curves of an rl stage, in groups, with its alarms."""

from __future__ import annotations

from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.reports import OutOption, RunArgument, StageOption, give, open_run

EPILOG = (
    "Examples:\n\n"
    "  posttrain dashboard 3f2a9c\n\n"
    "  posttrain dashboard 3f2a9c --stage rl --out now.html\n\n"
    "A stage that is done has the same page among its files in MLflow, plots/dashboard.html; of "
    "one that still runs the command shows the steps so far. docs/monitoring.md says how to read "
    "it.\n\n" + EPILOG_CODES
)


@command(store=True)
def dashboard(
    context: CommandContext, run: RunArgument, stage: StageOption = None, out: OutOption = None
) -> Result:
    """Show an rl stage's curves in groups, with its alarms marked on them.

    Writes one HTML page and prints the alarms. Changes nothing.
    """
    past = open_run(run, context)
    from posttrain.pipelines.analysis.dashboards import dashboard_of

    return give(context, dashboard_of(past, stage), "dashboard", out)
