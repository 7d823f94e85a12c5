"""`posttrain show`: stage kinds and config sections, with fields, defaults and an example."""

from __future__ import annotations

import inspect
import json
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.core.errors import ConfigError, nearest
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import CommandContext, Result, command

if TYPE_CHECKING:
    from posttrain.core.config.base import StageBase
    from posttrain.core.plugin_manager import PluginEntry, PluginManager

app = typer.Typer(
    help="Stage kinds and config sections: fields, defaults, meaning, an example.",
    invoke_without_command=True,
)


@app.callback()
@command()
def show(context: CommandContext, ctx: typer.Context) -> Result | None:
    """Show what a config can hold; without a command, list stage kinds and sections."""
    if ctx.invoked_subcommand is not None:
        return None
    from posttrain.core.config.stage_kinds import sections
    from posttrain.core.plugin_manager import PluginManager

    manager = PluginManager()
    stages = {entry.name: _summary(entry.cls) for entry in manager.entries("stage")}
    places = {name: _summary(section.cls) for name, section in sections(manager).items()}
    context.say("stage kinds (posttrain show stage KIND)", style="bold")
    for kind, summary in stages.items():
        context.say(f"  {kind:<21}{summary}")
    context.say("\nconfig sections (posttrain show section NAME)", style="bold")
    for name, summary in places.items():
        context.say(f"  {name:<21}{summary}")
    context.say("\nplugins: posttrain plugins list")
    return Result(
        {
            "stages": [{"kind": kind, "summary": text} for kind, text in stages.items()],
            "sections": [{"name": name, "summary": text} for name, text in places.items()],
        }
    )


@app.command("stage", epilog="Example:  posttrain show stage rl")
@command()
def show_stage(
    context: CommandContext,
    kind: Annotated[
        str,
        typer.Argument(help="Kind of stage, as `kind:` in YAML.", autocompletion=complete.kinds),
    ],
) -> Result:
    """Show what a kind of stage reads, makes and does, its fields, and an example."""
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.pipelines.cli.describe import field_line

    manager = PluginManager()
    known = {entry.name: entry for entry in manager.entries("stage")}
    if kind not in known:
        hint = _elsewhere(kind, manager) or nearest(kind, known)
        raise ConfigError(f"no stage kind '{kind}'{hint} (kinds: {list(known)})")
    found = describe_stage(known[kind])
    context.say(f"stage kind '{kind}'", style="bold")
    context.say(f"\n{found['doc']}\n")
    for role, made in found["required_inputs"].items():
        context.say(f"  reads {role}: {_a(made)}")
    for role, made in found["optional_inputs"].items():
        context.say(f"  may read {role}: {_a(made)}")
    if found["more_inputs"]:
        context.say("  may read what its rewards ask for, such as reward_model")
    context.say(f"  makes {_a(found['makes'])}\n")
    for field in found["fields"]:
        context.say(field_line(field))
    context.say("\nsections among these: posttrain show section NAME")
    source = f" (from {found['example_from']})" if found["example_from"] else ""
    context.say(f"\nexample{source}:\n\n{found['example']}")
    return Result(found)


@app.command("section", epilog="Example:  posttrain show section model")
@command()
def show_section(
    context: CommandContext,
    name: Annotated[
        str, typer.Argument(help="Name of the section.", autocompletion=complete.sections)
    ],
) -> Result:
    """Show a section's fields, defaults and meaning, and where a config has it."""
    from posttrain.core.config.stage_kinds import sections
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.pipelines.cli.describe import field_line, fields_of

    manager = PluginManager()
    known = sections(manager)
    if name not in known:
        hint = _elsewhere(name, manager) or nearest(name, known)
        raise ConfigError(f"no section '{name}'{hint} (sections: {list(known)})")
    section = known[name]
    fields, doc = fields_of(section.cls), inspect.getdoc(section.cls) or ""
    context.say(f"section '{name}'", style="bold")
    context.say(f"\n{doc}\n")
    for field in fields:
        context.say(field_line(field))
    context.say(f"\nwhere: {', '.join(section.places)}")
    return Result({"section": name, "doc": doc, "fields": fields, "places": list(section.places)})


def _elsewhere(name: str, manager: PluginManager) -> str:
    """Which command shows `name`, where it is something else; empty where it is nothing."""
    from posttrain.core.config.stage_kinds import sections
    from posttrain.core.contracts import CONTRACTS

    kinds = [entry.kind for entry in manager.entries() if entry.name == name]
    if "stage" in kinds:
        return f"; it is a kind of stage: posttrain show stage {name}"
    if name in sections(manager):
        return f"; it is a section: posttrain show section {name}"
    if name in CONTRACTS:
        return (
            f"; it is a kind of plugin: posttrain plugins list --kind {name} names them, and "
            "posttrain plugins show NAME shows one"
        )
    return f"; it is a plugin: posttrain plugins show {name}" if kinds else ""


def describe_stage(entry: PluginEntry) -> dict[str, Any]:
    """All that `show stage` prints. Any: it goes to JSON as it is."""
    from posttrain.core.config.stage_kinds import takes_more_inputs
    from posttrain.pipelines.cli.describe import fields_of

    stage: type[StageBase] = entry.cls.Config
    example, file = stage_example(entry.name, stage)
    return {
        "stage": entry.name,
        "package": entry.package,
        "doc": inspect.getdoc(stage) or inspect.getdoc(entry.cls) or "",
        "required_inputs": dict(stage.reads),
        "optional_inputs": dict(stage.may_read),
        "more_inputs": takes_more_inputs(stage),
        "makes": stage.makes,
        "fields": [field for field in fields_of(stage) if field["name"] not in ("kind", "inputs")],
        "example": example,
        "example_from": file,
    }


def stage_example(kind: str, stage: type[StageBase]) -> tuple[str, str]:
    """A stage of this kind as a shipped config has it, and that config's name.

    For a kind that none has: its inputs and required fields alone, and no name.
    """
    from posttrain.core.config.loading import shipped_configs

    simplest_first = sorted(
        shipped_configs().items(), key=lambda item: (item[0] != "quickstart", item[0].count("/"))
    )
    for name, path in simplest_first:
        found = _cut_out(path.read_text("utf-8"), kind)
        if found:
            return found, name
    usual = {"model": "sft", "evaluation": "evaluate"}
    inputs = ", ".join(f"{role}: {usual.get(made, made)}" for role, made in stage.reads.items())
    lines = [f"{kind}:", f"  kind: {kind}", f"  inputs: {{{inputs}}}"]
    for name, field in stage.model_fields.items():
        if field.is_required() and name != "kind":
            lines.append(f"  {name}: {json.dumps(field.examples[0]) if field.examples else '...'}")
    return "\n".join(lines), ""


def _cut_out(text: str, kind: str) -> str:
    """The lines of the first stage of this kind, comments included; empty if there is none."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    stages = next(value for key, value in root.value if key.value == "stages")
    for name, stage in stages.value:
        kinds = [value.value for key, value in stage.value if key.value == "kind"]
        if kinds == [kind]:
            lines = text.splitlines()[name.start_mark.line : stage.end_mark.line]
            if not lines:  # one line, `name: {kind: ...}`
                lines = [text.splitlines()[name.start_mark.line]]
            return textwrap.dedent("\n".join(lines)).strip()
    return ""


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").split("\n", 1)[0]


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"
