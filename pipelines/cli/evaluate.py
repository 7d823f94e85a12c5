"""`posttrain eval`: benchmark suites of a model or of what a run made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command
from posttrain.pipelines.cli.reports import result_of

if TYPE_CHECKING:
    from posttrain.core.evaluation.suites import Progress

EPILOG = (
    "Suites:\n\n"
    "  lm_eval:TASK\\[,TASK]      tasks of lm-eval, or YAML files in --tasks-dir\n\n"
    "  inspect:FILE.py\\[@TASK]   tasks of inspect-ai; runs the Python code in FILE.py\n\n"
    "  held_out                 the run's own evaluation of its held-out problems\n\n"
    "Examples:\n\n"
    "  posttrain eval 3f2a9c --suite lm_eval:capitals --tasks-dir benchmarks\n\n"
    "  posttrain eval 3f2a9c/sft --suite held_out --suite inspect:sums.py --limit 50\n\n"
    "  posttrain eval ./model --suite lm_eval:arc_easy --fewshot 5 --download\n\n"
    "Results go to HOME/evaluations and to MLflow, among the run's own; `posttrain compare RUN "
    "RUN` shows them in one table. docs/evaluation.md says how to write a benchmark.\n\n"
    + EPILOG_CODES
)


@command(store=True)
def evaluate(
    context: CommandContext,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN[/STAGE]",
            help="A folder, a hub id, models:/NAME@ALIAS, or what a run made.",
        ),
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="SUITE", help="What to measure; give it several times."),
    ] = None,
    tasks_dir: Annotated[
        Path | None, typer.Option(help="Folder with tasks of lm-eval as YAML files.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Samples of each task.", show_default="all")
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(
            min=0, help="Examples in each prompt (lm_eval).", show_default="as the task says"
        ),
    ] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Put prompts into the chat template (lm_eval).",
            show_default="where the model has one",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences computed together.")] = 16,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Of a response, where the task says nothing.")
    ] = 256,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Tokens of prompt and response (inspect, held_out).",
            show_default="as in the run",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling and of examples.")] = 0,
    download: Annotated[
        bool, typer.Option("--download", help="Let tasks fetch their data from a hub.")
    ] = False,
) -> Result:
    """Measure a model by benchmark suites: lm-eval, inspect-ai, or the run's own evaluation.

    Works offline with tasks in local files. Needs `pip install 'posttrain\\[eval]'`.
    """
    from posttrain.core.config.suites import parse_suite
    from posttrain.core.evaluation.suites import SuiteOptions, require_suites

    if not suite:
        raise ConfigError(
            "nothing to measure: name a suite, such as --suite lm_eval:TASK, --suite "
            "inspect:FILE.py or --suite held_out"
        )
    try:
        suites = [parse_suite(text) for text in suite]
    except ValueError as error:
        raise ConfigError(f"--suite {error}") from error
    require_suites(suites)
    options = SuiteOptions(
        limit=limit,
        fewshot=fewshot,
        tasks_dir=None if tasks_dir is None else tasks_dir.expanduser().resolve(),
        chat=chat_template,
        batch_size=batch_size,
        max_tokens=max_tokens,
        seed=seed,
        download=download,
    )
    from posttrain.pipelines.run.model_evaluation import evaluate_model
    from posttrain.pipelines.run.model_reference import find_model

    found = find_model(model, context.home, context.store)
    context.say(f"model: {found.path} ({found.origin})")
    for one in suites:
        if one.file:
            context.say(f"suite {one.text}: runs the code in {one.file}")
    with _bar() as progress:
        evaluated = evaluate_model(found, suites, options, context.home, progress, max_model_len)
    report = evaluated.report()
    report.show(context.console())
    context.say(f"results: {evaluated.folder}")
    return result_of(report)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar at a terminal; nothing in a file or a pipe."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    known: dict[str, bars.TaskID] = {}
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in known:
                known[what] = shown.add_task(what, total=total)
            shown.update(known[what], completed=done, total=total)

        yield progress
