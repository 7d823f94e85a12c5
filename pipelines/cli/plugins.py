"""`posttrain plugins list|show|new|check`: what is installed, and what authors begin with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.core.errors import ConfigError, nearest
from posttrain.pipelines.cli import complete
from posttrain.pipelines.cli.common import CommandContext, Result, command

if TYPE_CHECKING:
    from posttrain.core.kit.checks import Finding
    from posttrain.core.plugin_manager import PluginEntry, PluginManager

app = typer.Typer(
    help="List and document plugins: tasks, rewards, algorithms, engines and the rest.",
    no_args_is_help=True,
)
KindOption = Annotated[
    str | None,
    typer.Option("--kind", help="Only this kind of plugin.", autocompletion=complete.plugin_kinds),
]


def _entries(kind: str | None) -> tuple[PluginManager, list[PluginEntry]]:
    from posttrain.core.contracts import CONTRACTS
    from posttrain.core.plugin_manager import PluginManager

    if kind is not None and kind not in CONTRACTS:
        hint = nearest(kind, CONTRACTS)
        raise ConfigError(f"no plugin kind '{kind}'{hint} (kinds: {sorted(CONTRACTS)})")
    manager = PluginManager()
    return manager, manager.entries(kind)


def _first_line(entry: PluginEntry, entries: Sequence[PluginEntry]) -> str:
    """The first line of the module's docstring, which names the idea; the class's where the module
    has several plugins."""
    module = inspect.getmodule(entry.cls)
    alone = sum(other.cls.__module__ == entry.cls.__module__ for other in entries) == 1
    about = inspect.getdoc(module) if module and alone else None
    return (about or inspect.getdoc(entry.cls) or "").split("\n", 1)[0]


@app.command("list", epilog="Example:  posttrain plugins list --kind policy_loss")
@command()
def list_plugins(context: CommandContext, kind: KindOption = None) -> Result:
    """List every installed plugin with the package it comes from."""
    from rich.markup import escape
    from rich.table import Table

    _, entries = _entries(kind)
    table = Table()
    for heading in ("kind", "name", "package", "what it is"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        package = f"{entry.package} {entry.version}"
        table.add_row(*map(escape, (entry.kind, entry.name, package, _first_line(entry, entries))))
    context.console().print(table, soft_wrap=False)
    return Result(
        {
            "plugins": [
                _origin(entry) | {"summary": _first_line(entry, entries)} for entry in entries
            ]
        }
    )


def _origin(entry: PluginEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "package": entry.package,
        "version": entry.version,
    }


@app.command("show", epilog="Examples:  posttrain plugins show grpo · posttrain plugins show jsonl")
@command()
def show(
    context: CommandContext,
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the plugin; all kinds of that name show.",
            autocompletion=complete.plugins,
        ),
    ],
    kind: KindOption = None,
) -> Result:
    """Show a plugin's documentation, source file, fields and, for an algorithm, what it sets."""
    from posttrain.pipelines.cli.describe import field_line

    manager, known = _entries(kind)
    found = [entry for entry in known if entry.name == name]
    if not found and ".py" in name:
        found = [manager.in_file(manager.local_name(name))]
    if not found:
        refuse_kind(name, known)
        names = sorted({entry.name for entry in known})
        raise ConfigError(
            f"no {kind or 'plugin'} named '{name}'{nearest(name, names)} (installed: {names})"
        )
    details = [describe(entry, manager) for entry in found]
    for entry, detail in zip(found, details, strict=True):
        context.say(f"{entry.kind} '{entry.name}'", style="bold")
        source = f"{detail['source']} (package {entry.package} {entry.version})"
        context.say(source, style="dim")
        context.say(f"\n{detail['doc']}\n")
        for field in detail["fields"]:
            context.say(field_line(field))
        if not detail["fields"]:
            context.say("  it has no fields")
        if detail["in_config"]:
            context.say("\nin a config also:")
        for field in detail["in_config"]:
            context.say(field_line(field))
        if detail["expands_to"] is not None:
            import yaml

            kind_of_stage = entry.cls.stage  # type: ignore[attr-defined]
            text = yaml.safe_dump(detail["expands_to"], sort_keys=False)
            context.say(f"\nsets, as YAML of a stage of kind '{kind_of_stage}':\n\n{text}")
            for axis in detail["axes"]:
                context.say(_axis_text(axis))
    return Result({"plugins": details})


def describe(entry: PluginEntry, manager: PluginManager) -> dict[str, Any]:
    """All that `show` prints of one plugin. Any: it goes to JSON as it is."""
    from posttrain.core.config.presets import axes_of
    from posttrain.pipelines.cli.describe import fields_in_config, fields_of

    fields = fields_of(entry.cls.Config)
    expands, axes = None, []
    if entry.kind == "algorithm" and not any(field["required"] for field in fields):
        preset: Any = entry.cls(entry.cls.Config())  # Any: `expand` is of its own contract
        expands = preset.expand()
        axes = [asdict(axis) for axis in axes_of(preset, manager)]
    return _origin(entry) | {
        "doc": inspect.getdoc(entry.cls) or "",
        "source": inspect.getsourcefile(entry.cls) or "unknown",
        "fields": fields,
        "in_config": fields_in_config(entry.kind),
        "expands_to": expands,
        "axes": axes,
    }


def _axis_text(axis: dict[str, Any]) -> str:
    """One plugin of a preset: place, name, formula, and each field's value."""
    fields = ", ".join(f"{name}: {value}" for name, value in axis["fields"].items())
    lines = [f"{axis['place']}: {axis['name']}", f"  {axis['formula']}"]
    return "\n".join([*lines, f"  {fields}"] if fields else lines) + "\n"


@app.command(
    "new",
    epilog="Examples:  posttrain plugins new reward brief --file · posttrain plugins new kl k9",
)
@command()
def new(
    context: CommandContext,
    kind: Annotated[
        str,
        typer.Argument(
            help="Kind of the plugin, such as reward.", autocompletion=complete.plugin_kinds
        ),
    ],
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits and _.")],
    out: Annotated[
        Path, typer.Option(help="Folder to write to.", show_default="this folder")
    ] = Path(),
    file: Annotated[
        bool, typer.Option("--file", help="Write one file instead of a package.")
    ] = False,
) -> Result:
    """Write a package, or a file, with a working plugin of a kind, to be changed."""
    from posttrain.core.kit.new import USES, class_name, file_of, package_of, write_new

    if file:
        name_of_file, text = file_of(kind, name)
        (path,) = write_new({name_of_file: text}, out)
        plugin, written = f"{path}:{class_name(name)}", [path]
    else:
        folder, files = package_of(kind, name)
        written = write_new(files, out / folder)
        module = next(
            path
            for path in written
            if path.parent.parent.name == "src" and path.name != "__init__.py"
        )
        plugin = f"{module}:{class_name(name)}"
    for path in written:
        context.say(f"wrote {path}")
    context.say(f"check it:   posttrain plugins check {plugin}")
    context.say(f"in a config: {USES[kind].format(plugin)}")
    return Result({"kind": kind, "plugin": plugin, "files": [str(path) for path in written]})


@app.command(
    "check",
    epilog="Examples:  posttrain plugins check my_rewards.py:Brief · posttrain plugins check grpo",
)
@command()
def check(
    context: CommandContext,
    name: Annotated[
        str,
        typer.Argument(
            metavar="PLUGIN",
            help="FILE.py:CLASS, FILE.py for every plugin in it, a package, or a plugin's name.",
        ),
    ],
    kind: KindOption = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A setting that has no default."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer to check a renderer with.")
    ] = None,
) -> Result:
    """Run the checks of a plugin's kind, and say which it fails and why; exit code 1 if any."""
    from posttrain.core.config.spec import parse_spec
    from posttrain.core.kit.checks import Subject, run_checks

    manager, known = _entries(kind)
    found = named(name, kind, manager, known)
    fields = parse_spec("--set", ",".join(["plugin", *(given or ())])).fields
    loaded = None
    if tokenizer is not None:
        if not tokenizer.is_dir():
            raise ConfigError(f"--tokenizer {tokenizer}: there is no such folder; name a model's")
        from posttrain.core.data.tokens import load_tokenizer

        loaded = load_tokenizer(tokenizer)
    results, failed = [], 0
    for entry in found:
        findings = run_checks(Subject(entry, manager, fields, loaded))
        failed += sum(finding.state == "failed" for finding in findings)
        show_findings(context, f"{entry.kind} '{entry.cls.name}'", findings)
        results.append(_origin(entry) | {"checks": [asdict(finding) for finding in findings]})
    return Result({"plugins": results, "failed": failed}, exit_code=int(failed > 0))


def named(
    name: str, kind: str | None, manager: PluginManager, known: list[PluginEntry]
) -> list[PluginEntry]:
    """The plugins that a name, a package, FILE.py or FILE.py:CLASS stands for."""
    if name.endswith(".py"):
        return manager.all_in_file(Path(name))
    if ".py:" in name:
        return [manager.in_file(manager.local_name(name))]
    found = [e for e in known if name == e.name or name.replace("_", "-") == e.package]
    if not found:
        refuse_kind(name, known)
        names = sorted({each for e in known for each in (e.name, e.package)})
        raise ConfigError(
            f"no {kind or 'plugin'} or package named '{name}'{nearest(name, names)}; a plugin in a "
            "file is FILE.py:CLASS, and `posttrain plugins list` shows the installed ones"
        )
    return found


def refuse_kind(name: str, known: list[PluginEntry]) -> None:
    """Raise `ConfigError` where a kind is named instead of a plugin."""
    if any(entry.kind == name for entry in known):
        raise ConfigError(
            f"'{name}' is a kind of plugin: `posttrain plugins list --kind {name}` lists them"
        )


def show_findings(context: CommandContext, title: str, findings: Sequence[Finding]) -> None:
    """A table of what checks found, failures first."""
    from rich.markup import escape
    from rich.table import Table

    states = [finding.state for finding in findings]
    counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    table = Table(title=escape(f"{title}: {counts}"), title_justify="left")
    for heading in ("check", "", "what was found"):
        table.add_column(heading, overflow="fold")
    for finding in sorted(findings, key=lambda each: each.state != "failed"):
        table.add_row(*map(escape, (finding.check, finding.state, finding.detail)))
    context.console().print(table)
