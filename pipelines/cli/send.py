"""`posttrain send`: send to MLflow, and to a store with a URL, what waits since they were away."""

from __future__ import annotations

from posttrain.pipelines.cli.common import CommandContext, Result, command, send_what_waits

EPILOG = (
    "Examples:\n\n"
    "  posttrain send\n\n"
    "  MLFLOW_TRACKING_URI=http://server:5000 posttrain send --home /data/runs\n\n"
    "  posttrain send --store s3://bucket/stages\n\n"
    "Other commands that read MLflow do this first, runs with the store as well. Exit code 1: "
    "something still waits."
)


@command(store=True)
def send(context: CommandContext) -> Result:
    """Send to MLflow, and to a store with a URL, what waits since they were away."""
    said = [*send_what_waits(context.home, quiet=False), *_pushed(context)]
    for sentence in said or ["nothing waits to be sent"]:
        if not context.as_json:
            print(sentence)
    waits = any((context.home / "runs").glob("*/mlflow-waiting/operations.jsonl"))
    waits = waits or any((context.store / ".waiting").glob("[!.]*"))
    return Result({"messages": said, "waiting": waits}, exit_code=1 if waits else 0)


def _pushed(context: CommandContext) -> list[str]:
    """A sentence on the stages that wait for a store with a URL; none without."""
    from posttrain.core.store.mirror import WAITING, mirror_of

    mirror = mirror_of(context.store)
    waiting = [path.name for path in (context.store / WAITING).glob("[!.]*")]
    if mirror is None or not waiting:
        return []
    mirror.push_waiting()
    left = mirror.settle(0.0)
    sent = [name for name in waiting if not (context.store / WAITING / name).exists()]
    told = [f"{len(sent)} stages were sent to the store {mirror.url}"] if sent else []
    return [*told, *mirror.news(), *([left] if left else [])]
