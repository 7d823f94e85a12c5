"""`posttrain serve` and `posttrain deploy`: a config as a Prefect deployment, on a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli.common import (
    EPILOG_CODES,
    CommandContext,
    ConfigsArgument,
    Result,
    SetOption,
    command,
)
from posttrain.pipelines.run.checks import resolve_configs

if TYPE_CHECKING:
    from posttrain.pipelines.deploy.forms import RunRequest

SERVE_EPILOG = (
    "Examples:\n\n"
    "  posttrain serve my.yaml --cron '0 2 * * *'\n\n"
    "  posttrain serve my.yaml --flow continual --cron '*/30 * * * *' --home /data/runs\n\n"
    "Ctrl-C ends it and pauses the schedule.\n\n" + EPILOG_CODES
)
DEPLOY_EPILOG = (
    "Examples:\n\n"
    "  posttrain deploy my.yaml --cron '0 2 * * *' --timezone Europe/Berlin\n\n"
    "  posttrain deploy quickstart --pool gpus --job-variable image=registry/posttrain:1\n\n"
    "Run it now: prefect deployment run train/NAME\n\n" + EPILOG_CODES
)
CronOption = Annotated[
    str | None,
    typer.Option("--cron", help="Five-field cron schedule; omit it to run on demand only."),
]
TimezoneOption = Annotated[
    str | None,
    typer.Option(
        "--timezone",
        help="Time zone of the schedule, such as Europe/Berlin.  \\[default: UTC]",
        show_default=False,
    ),
]
FlowOption = Annotated[
    str, typer.Option("--flow", help="Flow to deploy: train, evaluate or continual.")
]
JobVariables = Annotated[
    list[str] | None,
    typer.Option("--job-variable", metavar="A=B", help="A variable of the pool's jobs."),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="Name of the deployment.  \\[default: the config's name]",
        show_default=False,
    ),
]


@command(as_json=False, interrupted="no longer served")
def serve(
    context: CommandContext,
    configs: ConfigsArgument,
    overrides: SetOption = None,
    cron: CronOption = None,
    timezone: TimezoneOption = None,
    flow: FlowOption = "train",
    name: NameOption = None,
) -> None:
    """Serve a config from this process until Ctrl-C: scheduled runs, and runs started in Prefect.

    PREFECT_API_URL and MLFLOW_TRACKING_URI name the servers.
    """
    request, default_name = _request(configs, overrides, context.home)
    from posttrain.pipelines.run.prefect_env import check_settings, configure_client
    from posttrain.pipelines.services.shared_servers import (
        require_shared_mlflow,
        require_shared_prefect,
    )

    check_settings()
    require_shared_prefect()
    require_shared_mlflow()
    configure_client(context.home)
    from posttrain.pipelines.deploy import deployments

    wanted = deployments.Wanted(flow, name or default_name, request, cron, timezone)
    deployments.check(wanted)
    when = f"on '{cron}' ({timezone or 'UTC'})" if cron else "on demand"
    print(f"serving {flow}/{wanted.name}, {when}; Ctrl-C ends it", flush=True)
    deployments.serve(wanted)


@command(home=False)
def deploy(
    context: CommandContext,
    configs: ConfigsArgument,
    overrides: SetOption = None,
    pool: Annotated[str, typer.Option(help="Work pool to deploy to.")] = "posttrain",
    cron: CronOption = None,
    timezone: TimezoneOption = None,
    flow: FlowOption = "train",
    name: NameOption = None,
    job_variables: JobVariables = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Home of the runs on the worker.  \\[default: the worker's home]"),
    ] = None,
) -> Result:
    """Deploy a config to a work pool: its workers run it on schedule or on demand.

    PREFECT_API_URL names the server. The same command again changes the deployment.
    """
    request, default_name = _request(configs, overrides, home)
    variables = parse_variables(job_variables or [])
    from posttrain.pipelines.run.prefect_env import check_settings, configure_client
    from posttrain.pipelines.services.shared_servers import require_shared_prefect

    check_settings()
    require_shared_prefect()
    configure_client(context.home)
    from posttrain.pipelines.deploy import deployments

    wanted = deployments.Wanted(flow, name or default_name, request, cron, timezone, variables)
    deployments.check(wanted)
    page = deployments.deploy(wanted, pool)
    full_name = f"{flow}/{wanted.name}"
    context.say(f"deployed {full_name} to pool '{pool}': {page}")
    return Result({"status": "ok", "deployment": full_name, "pool": pool, "page": page})


def _request(
    configs: Sequence[Path], overrides: Sequence[str] | None, home: Path | None
) -> tuple[RunRequest, str]:
    """The request that runs will get, and the config's name; refuses what could not run."""
    resolved, _ = resolve_configs(configs, overrides)
    from posttrain.core.config.loading import find_config
    from posttrain.pipelines.deploy.forms import RunRequest

    # A file is found from elsewhere by its whole path, a shipped config by its name.
    places = [str(find_config(path).resolve() if path.exists() else path) for path in configs]
    request = RunRequest(
        configs=places,
        overrides=list(overrides or []),
        home=None if home is None else str(home.expanduser().resolve()),
    )
    return request, resolved.config.name


def parse_variables(given: Sequence[str]) -> dict[str, Any]:
    """`a=b` pairs; values are YAML, so that numbers and lists are what they look like."""
    import yaml

    from posttrain.core.config.positions import read_value

    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not (sign and name):
            raise ConfigError(f"--job-variable '{text}' must look like image=registry/posttrain:1")
        try:
            found[name] = read_value(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            problem = " ".join(str(error).split())
            raise ConfigError(
                f"--job-variable {name}: '{value}' is not YAML ({problem})"
            ) from error
    return found
