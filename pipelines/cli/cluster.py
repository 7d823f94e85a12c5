"""`posttrain cluster`: a Ray cluster on this machine, to try a config that has one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from posttrain.core.errors import ResourceError
from posttrain.pipelines.cli.common import CommandContext, Result, command, say_aside

app = typer.Typer(
    no_args_is_help=True,
    help="A Ray cluster of several nodes on this machine (extra: posttrain\\[ray]).",
)


@app.command(
    "up",
    epilog="Example:\n\n  posttrain cluster up --nodes 2\n\n"
    "  posttrain run my.yaml --set cluster.ray.address=127.0.0.1:6379 "
    "--set limits.learner_ranks=2",
)
@command()
def up(
    context: CommandContext,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes to start.")] = 2,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs of each, as Ray counts them.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each, as Ray counts them.")] = 0,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the head.")] = 6379,
) -> Result:
    """Start nodes that only holders of HOME/cluster/token can use, and wait until all are there.

    It is a cluster to try things with: all nodes share this machine. Runs of this home find the
    token; elsewhere set RAY_AUTH_TOKEN_PATH.
    """
    from posttrain.pipelines.services.cluster import Shape
    from posttrain.pipelines.services.cluster import up as start_all

    shape = Shape(nodes, cpus, gpus, port)
    found = start_all(context.home, shape, say_aside)
    say_aside(f"{len(found)} nodes are up; configs use them with:")
    print(f"cluster: {{ray: {{address: '{shape.address}'}}}}", flush=True)
    return Result({"address": shape.address, "nodes": [asdict(node) for node in found]})


@app.command("down")
@command()
def down(context: CommandContext) -> Result:
    """Stop the nodes of this home, and the ranks on them."""
    from posttrain.pipelines.services.cluster import down as stop_all

    stop_all(context.home, say_aside)
    say_aside(f"no cluster of {context.home} runs")
    return Result({"status": "ok"})


@app.command("status", epilog="Exit codes: 0 it is up, 4 it is not, or nodes are gone.")
@command()
def status(context: CommandContext) -> Result:
    """Show the nodes of this home's cluster."""
    from posttrain.pipelines.services.cluster import joined, shape_of

    shape = shape_of(context.home)
    found = joined(context.home) if shape else []
    for node in found:
        say_aside(str(node))
    whole = shape is not None and len(found) == shape.nodes
    if shape is None:
        say_aside(f"no cluster in {context.home}; start one with: posttrain cluster up")
    elif not whole:
        say_aside(f"{len(found)} of {shape.nodes} nodes are up: `posttrain cluster down`, then up")
    return Result(
        {
            "up": whole,
            "address": shape.address if shape else "",
            "nodes": [asdict(node) for node in found],
        },
        exit_code=0 if whole else ResourceError.exit_code,
    )
