"""`posttrain env check`: an environment, played by scripted turns as training plays it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.core.errors import ConfigError
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import CommandContext, Result, command
from posttrain.pipelines.cli.plugins import named, show_findings

if TYPE_CHECKING:
    from posttrain.core.config.base import Component
    from posttrain.core.config.resolve import ResolvedRun
    from posttrain.core.data.tokens import ChatTokenizer
    from posttrain.core.kit.env_play import EnvironmentSubject
    from posttrain.core.plugin_manager import PluginManager

app = typer.Typer(
    help="Environments: whether one does what training relies on.", no_args_is_help=True
)
PROBLEMS = 3
EPILOG = (
    "Examples:\n\n"
    "  posttrain env check gymnasium --set id=Taxi-v4 --turn 0 --turn 2\n\n"
    "  posttrain env check my_game.py:Game --task episodes\n\n"
    "  posttrain env check my.yaml --stage rl"
)


@app.command("check", epilog=EPILOG)
@command()
def check(
    context: CommandContext,
    name: Annotated[
        str,
        typer.Argument(
            metavar="ENVIRONMENT",
            help="A config with an environment, an environment's name, or FILE.py:CLASS.",
            autocompletion=complete.configs,
        ),
    ],
    stage: Annotated[
        str | None, typer.Option(help="Stage of the config.  \\[default: the first that has one]")
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="A field; of a config an override, A.B=C."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help="Task whose problems are played: NAME,a=b.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a model or tokenizer, for the token checks.")
    ] = None,
    turns: Annotated[
        list[str] | None,
        typer.Option("--turn", metavar="TEXT", help="What the policy says, turn by turn."),
    ] = None,
    problems: Annotated[
        int, typer.Option(min=1, help="Problems of the task that are played, at most.")
    ] = PROBLEMS,
    max_turns: Annotated[int, typer.Option(min=1, help="Turns of an episode, at most.")] = 8,
    at_once: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 32,
    limit_s: Annotated[
        float, typer.Option("--limit", min=0.1, help="Seconds of one call, at most.")
    ] = 10.0,
) -> Result:
    """Play episodes by scripted turns, and say what fails and why; exit code 1 if anything."""
    from dataclasses import replace

    from posttrain.core.kit.env_check import check_environment

    title, subject = _subject(name, stage, given or [], task, problems, (tokenizer, context.home))
    subject = replace(
        subject, turns=turns or (), max_turns=max_turns, at_once=at_once, limit_s=limit_s
    )
    findings = check_environment(subject)
    show_findings(context, title, findings)
    failed = sum(finding.state == "failed" for finding in findings)
    values = {"environment": title, "checks": [asdict(each) for each in findings]}
    return Result({**values, "failed": failed}, exit_code=int(failed > 0))


def _subject(
    name: str,
    stage: str | None,
    given: list[str],
    task: str | None,
    count: int,
    folders: tuple[Path | None, Path],
) -> tuple[str, EnvironmentSubject]:
    """What is checked, by a name for people."""
    from posttrain.core.config.base import Component
    from posttrain.core.config.spec import parse_spec
    from posttrain.core.contracts import AnyEnvironment
    from posttrain.core.kit.env_play import PROBLEMS as OWN
    from posttrain.core.kit.env_play import EnvironmentSubject
    from posttrain.core.plugin_manager import PluginManager

    run: ResolvedRun | None = None
    if _is_config(name):
        from posttrain.pipelines.run.checks import resolve_configs

        run, manager = resolve_configs([Path(name)], given)
        title, component = _of_stage(run, stage)
        environment: AnyEnvironment[Any] = manager.build(
            AnyEnvironment, component.name, component.fields()
        )
    else:
        if stage is not None:
            raise ConfigError(f"--stage {stage}: '{name}' is not a config; leave --stage out")
        manager = PluginManager()
        known = manager.entries("environment")
        (entry, *others) = named(name, "environment", manager, known)
        if others or entry.kind != "environment":
            raise ConfigError(f"'{name}' is not one environment; name it as FILE.py:CLASS")
        title = f"environment '{entry.cls.name}'"
        fields = parse_spec("--set", ",".join(["environment", *given])).fields
        environment = manager.build(AnyEnvironment, entry.name, fields)
    _set_up(environment, manager)
    problems, of_task = tuple(OWN), None
    chosen: Component | None = run.config.task if run is not None else None
    if task is not None:
        chosen = Component.model_validate(parse_spec("--task", task).component())
    if chosen is not None and chosen.name != "none":
        of_task = manager.task(chosen)
        seed = run.config.seed if run is not None else 0
        held = of_task.available("train")
        count = count if held is None else min(count, held)
        problems = tuple(of_task.problems("train", count, seed))
    made = _tokenizer(*folders, run, manager)
    return title, EnvironmentSubject(
        environment=environment, tokenizer=made, problems=problems, task=of_task
    )


def _is_config(name: str) -> bool:
    from posttrain.core.config.loading import SUFFIXES, shipped_configs

    path = Path(name)
    return path.suffix in SUFFIXES or name in shipped_configs()


def _of_stage(run: ResolvedRun, wanted: str | None) -> tuple[str, Component]:
    """The environment of a stage, by default of the first that has one."""
    found: dict[str, Component] = {}
    for name, each in run.config.stages.items():
        if (component := getattr(each, "environment", None)) is not None:
            found[name] = component
    if not found or wanted is not None and wanted not in found:
        what = "no stage has" if wanted is None else f"stage '{wanted}' does not have"
        raise ConfigError(f"{what} an environment (stages with one: {sorted(found) or 'none'})")
    name = wanted or next(iter(found))
    return f"environment '{found[name].name}' of stage '{name}'", found[name]


def _set_up(environment: Any, manager: PluginManager) -> None:  # Any: environments of any config
    """Give a value environment the tools that its config names."""
    from posttrain.core.config.presets import tool_components
    from posttrain.core.contracts import Environment, Tool

    if isinstance(environment, Environment):
        listed = tool_components(environment.config.model_dump(mode="json"))
        environment.setup([manager.build(Tool, each.name, each.fields()) for _, each in listed])


def _tokenizer(
    folder: Path | None, home: Path, run: ResolvedRun | None, manager: PluginManager
) -> ChatTokenizer:
    """Of the folder, of the config's model where it is on this disk, or one of the kit's."""
    from posttrain.core.data.template import TemplateConfig, TemplateRenderer
    from posttrain.core.data.tokens import ChatTokenizer

    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--tokenizer {folder}: the folder does not exist; name a model's")
        return ChatTokenizer.load(folder)
    if run is not None:
        from posttrain.core.models.source import known_folder
        from posttrain.pipelines.stage.inputs import load_tokenizer

        found = known_folder(run.config.model, home / "models")
        if found is not None:
            return load_tokenizer(found, run.config, manager)
    from posttrain.core.kit.tiny import make_byte_tokenizer

    renderer = TemplateRenderer(TemplateConfig(tools_in_system=True))
    return ChatTokenizer(make_byte_tokenizer(), None, renderer=renderer)
