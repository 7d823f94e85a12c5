"""`posttrain`: one module per command. Importing this loads no torch, mlflow, prefect or vllm."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from posttrain.pipelines.cli import (
    blame,
    chat,
    cluster,
    compare,
    dashboard,
    data,
    deployments,
    doctor,
    env,
    evaluate,
    export,
    forensics,
    fork,
    import_dump,
    init,
    inspect,
    plan,
    plugins,
    replay,
    rescore,
    rollback,
    run,
    schema,
    send,
    serve_model,
    services,
    show,
    sweep,
    ui,
    validate,
    verify,
)
from posttrain.pipelines.cli.commands import Commands
from posttrain.pipelines.cli.common import EPILOG_CODES

app = typer.Typer(
    name="posttrain",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First steps: posttrain doctor · posttrain plan quickstart · posttrain run quickstart · "
    "posttrain ui\n\n" + EPILOG_CODES,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"posttrain {version('posttrain')}")
        raise typer.Exit


@app.callback()
def posttrain(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and stop."
        ),
    ] = False,
) -> None:
    """Post-train a language model: a DAG of stages, every algorithm a plugin, all on record."""


app.command("init", epilog=init.EPILOG)(init.init)
app.command("run", epilog=run.EPILOG)(run.run)
app.command("sweep", epilog=sweep.EPILOG)(sweep.sweep)
app.command("send", epilog=send.EPILOG)(send.send)
app.command("validate", epilog=validate.EPILOG)(validate.validate)
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("chat", epilog=chat.EPILOG)(chat.chat)
app.command("serve-model", epilog=serve_model.EPILOG)(serve_model.serve_model)
app.command("export", epilog=export.EPILOG)(export.export)
app.command("fork", epilog=fork.EPILOG)(fork.fork)
app.command("replay", epilog=replay.EPILOG)(replay.replay)
app.command("dashboard", epilog=dashboard.EPILOG)(dashboard.dashboard)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("compare", epilog=compare.EPILOG)(compare.compare)
app.command("rescore", epilog=rescore.EPILOG)(rescore.rescore)
app.command("forensics", epilog=forensics.EPILOG)(forensics.forensics)
app.command("import", epilog=import_dump.EPILOG)(import_dump.import_dump)
app.command("eval", epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command("blame", epilog=blame.EPILOG)(blame.blame)
app.command("verify", epilog=verify.EPILOG)(verify.verify)
app.command("rollback", epilog=rollback.EPILOG)(rollback.rollback)
app.add_typer(data.app, name="data")
app.add_typer(plugins.app, name="plugins")
app.add_typer(env.app, name="env")
app.add_typer(show.app, name="show")
app.command("schema", epilog=schema.EPILOG)(schema.schema)
app.command("serve", epilog=deployments.SERVE_EPILOG)(deployments.serve)
app.command("deploy", epilog=deployments.DEPLOY_EPILOG)(deployments.deploy)
app.add_typer(services.app, name="services")
app.add_typer(cluster.app, name="cluster")
app.command("ui", epilog=ui.EPILOG)(ui.ui)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
