"""`posttrain import`: rollout dumps of verl and TRL as a run, for inspect, compare and others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

EPILOG = (
    "Examples:\n\n"
    "  posttrain import ./rollouts --model Qwen/Qwen2.5-1.5B-Instruct     verl\n\n"
    "  posttrain import ./out/completions --model ./policy --algorithm dapo     TRL\n\n"
    "  posttrain import ./rollouts --model ./policy --no-logprobs     for forensics and rescore\n\n"
    "Prints the id of a run that `inspect`, `compare`, `rescore` and `forensics` take. verl: "
    "trainer.rollout_data_dir or trainer.validation_data_dir. TRL: log_completions. "
    "docs/importing.md\n\n" + EPILOG_CODES
)


@command(store=True)
def import_dump(
    context: CommandContext,
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="File or folder of rollouts.")],
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model whose tokenizer and log-probs are used: best the one that was trained.",
        ),
    ],
    algorithm: Annotated[
        str, typer.Option(help="Preset for the loss, and for advantages not in the dump.")
    ] = "grpo",
    match: Annotated[
        str, typer.Option(help="How answers are compared with verl's gts; field of `jsonl`.")
    ] = "last_number",
    weight: Annotated[
        list[str] | None,
        typer.Option(metavar="REWARD=W", help="TRL's reward_weights; 1 for those not named."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature that was sampled at.")] = 1.0,
    logprobs: Annotated[
        bool,
        typer.Option("--logprobs/--no-logprobs", help="Evaluate every response by the model."),
    ] = True,
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
) -> Result:
    """Read the rollouts that verl or TRL dumped, and make a run of them in the home.

    The dump is not changed. The same dump with the same options is the same run.
    """
    from posttrain.core.data.dumps import read_dump
    from posttrain.core.models.quiet import quiet_libraries
    from posttrain.pipelines.analysis.imported import ImportOptions
    from posttrain.pipelines.analysis.imported import import_dump as imported
    from posttrain.pipelines.run.progress import make_reporter

    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(f"--temperature {temperature}: expected a number above 0")
    read = read_dump(dump, parsed_weights(weight or []))
    quiet_libraries()
    options = ImportOptions(model, algorithm, match, name or "", logprobs, temperature)
    with make_reporter(json=context.as_json, plain=True) as reporter:
        done = imported(read, options, context.home, context.store, reporter)
    for note in done.notes:
        context.say(f"note: {note}")
    more = " ".join(["", *context.options()])
    short = done.run_id[:12]
    context.say(
        f"run {short}: {done.responses} responses of {len(done.steps)} steps "
        f"({read.format}); rewards {', '.join(read.reward_names)}\n\nnext:\n"
        f"  posttrain forensics {short}{more}\n"
        f"  posttrain inspect {short} --step {done.steps[0]}{more}"
    )
    return Result(
        {
            "run_id": done.run_id,
            "format": read.format,
            "steps": done.steps,
            "responses": done.responses,
            "rewards": list(read.reward_names),
            "notes": done.notes,
        }
    )


def parsed_weights(given: list[str]) -> dict[str, float]:
    """`correctness=1`, several times, as numbers by name; raises `ConfigError`."""
    found = {}
    for text in given:
        name, sign, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not sign or not name or not math.isfinite(value):
            raise ConfigError(f"--weight '{text}': the form is --weight REWARD=0.5")
        found[name] = value
    return found
