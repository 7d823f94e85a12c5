"""`posttrain rescore`: old rollouts under new rewards."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.pipelines.cli.common import (
    DEFAULT_HOME,
    EPILOG_CODES,
    Boundary,
    DebugOption,
    HomeOption,
    JsonOption,
    StoreOption,
    folders,
    stdout_to_stderr,
)
from posttrain.pipelines.cli.reports import OutOption, StageOption, give, open_run

EPILOG = (
    "Examples:\n\n"
    "  posttrain rescore 3f2a9c --reward accuracy --reward length_penalty:0.2\n\n"
    "  posttrain rescore 3f2a9c --step 12 --reward 'format,tags=[think, answer]:0.5'\n\n"
    "All rewards named together are the new reward, summed by their weights (1 unless given), as a "
    "stage would sum them. `posttrain plugins list` shows the rewards, docs/comparing.md what each "
    "number is.\n\n" + EPILOG_CODES
)


def rescore(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id that `posttrain run` printed, or its start.")
    ],
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="NAME[,field=value][:weight]",
            help="A reward with its fields and weight; give it several times.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="One step, from 1.  [default: all steps kept]"),
    ] = None,
    stage: StageOption = None,
    home: HomeOption = DEFAULT_HOME,
    store: StoreOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score the responses that a run kept under other rewards, and say what would change.

    Reports the distribution of each reward before and after, and within groups which pairs change
    their order, which advantages change sign, and which groups become or stop being all-equal.
    Writes nothing into the run.
    """
    home, shared = folders(home, store)
    with Boundary(as_json=as_json, debug=debug):
        with stdout_to_stderr(as_json):
            from posttrain.pipelines.analysis.rescoring import parse_reward
            from posttrain.pipelines.analysis.rescoring import rescore as rescored
            from posttrain.pipelines.quiet import quiet_libraries

            rewards = [parse_reward(text) for text in reward or ()]
            quiet_libraries()
            report = rescored(open_run(run, home, shared), stage, step, rewards)
        give(report, "rescore", home, out, as_json)
