"""`posttrain send`: send to MLflow what runs recorded while it was away."""

from __future__ import annotations

from posttrain.pipelines.cli.common import CommandContext, Result, command, send_what_waits

EPILOG = (
    "Examples:\n\n"
    "  posttrain send\n\n"
    "  MLFLOW_TRACKING_URI=http://server:5000 posttrain send --home /data/runs\n\n"
    "Other commands that read MLflow do this first. Exit code 1: something still waits."
)


@command()
def send(context: CommandContext) -> Result:
    """Send to MLflow what runs of a home recorded while it was away."""
    said = send_what_waits(context.home, quiet=False)
    for sentence in said or ["nothing waits for MLflow"]:
        if not context.as_json:
            print(sentence)
    waits = any((context.home / "runs").glob("*/mlflow-waiting/operations.jsonl"))
    return Result({"messages": said, "waiting": waits}, exit_code=1 if waits else 0)
