"""Writes the reference pages: commands, stage kinds, config sections and plugins.

    python docs/generate_reference.py FOLDER

Everything on them is read from the code of what is installed; `docs/build_site.py` calls this.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from posttrain.core.config.stage_kinds import sections
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.cli.describe import fields_of, value_text
from posttrain.pipelines.cli.main import app
from posttrain.pipelines.cli.plugins import describe
from posttrain.pipelines.cli.show import describe_stage

WRITTEN = "Written by `python docs/generate_reference.py` from what is installed."


def stages_page(manager: PluginManager) -> str:
    """Every stage kind: inputs, fields, an example."""
    parts = [f"# Stage kinds\n\n{WRITTEN} On the command line: `posttrain show stage KIND`."]
    for entry in manager.entries("stage"):
        found = describe_stage(entry)
        reads = [f"`{role}`: {made}" for role, made in found["required_inputs"].items()]
        reads += [f"`{role}`: {made}, optional" for role, made in found["optional_inputs"].items()]
        if found["more_inputs"]:
            reads.append("what its rewards ask for, such as `reward_model`")
        parts += [
            f"## {entry.name}",
            found["doc"],
            f"Reads {'; '.join(reads) or 'nothing'}. Makes: {found['makes']}.",
            field_table(found["fields"]),
            f"```yaml\n{found['example']}\n```",
        ]
    return joined(parts)


def sections_page(manager: PluginManager) -> str:
    """Every section of a config, with its places."""
    parts = [f"# Config sections\n\n{WRITTEN} On the command line: `posttrain show section NAME`."]
    for name, section in sections(manager).items():
        places = ", ".join(f"`{place}`" for place in section.places)
        doc = section.cls.__doc__ or ""
        parts += [f"## {name}", doc, f"Where: {places}.", field_table(fields_of(section.cls))]
    return joined(parts)


def plugins_page(manager: PluginManager) -> str:
    """Every plugin with its fields, by kind."""
    parts = [
        f"# Installed plugins\n\n{WRITTEN} On the command line: `posttrain plugins show NAME`."
    ]
    kinds = dict.fromkeys(entry.kind for entry in manager.entries() if entry.kind != "stage")
    for kind in kinds:
        parts.append(f"## {kind}")
        for entry in manager.entries(kind):
            found = describe(entry, manager)
            parts += [f"### {kind}: {entry.name}", safe(found["doc"])]
            if found["fields"]:
                parts.append(field_table(found["fields"]))
    return joined(parts)


def commands_page() -> str:
    """Every command with its arguments and options."""
    parts = [f"# Commands\n\n{WRITTEN} All commands have `--help`."]
    for name, command in commands(typer.main.get_command(app), ()):
        parts += [f"## posttrain {name}", command.help or ""]
        rows = [
            (f"`{called(parameter)}`", escaped(getattr(parameter, "help", "") or ""))
            for parameter in command.params
            if parameter.name != "help"
        ]
        if rows:
            parts.append(table(("argument or option", "meaning"), rows))
    return joined(parts)


def commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:  # Any: Click's own
    """(name, command) of all commands, groups opened."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def called(parameter: Any) -> str:  # Any: Click's own
    """An option's names, or what stands for an argument."""
    if parameter.param_type_name == "option":
        return ", ".join([*parameter.opts, *parameter.secondary_opts])
    return str(parameter.metavar or parameter.name.upper())


def field_table(fields: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"`{field['name']}`",
            escaped(", ".join([field["type"], *field["constraints"]])),
            "required" if field["required"] else f"`{value_text(field['default'])}`",
            escaped(field["description"]),
        )
        for field in fields
    ]
    return table(("field", "type", "default", "meaning"), rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escaped(text: str) -> str:
    """Text of a cell on one line, in which only code between backticks is markup."""
    return safe(" ".join(text.replace("\\[", "[").split())).replace("|", "\\|")


def safe(text: str) -> str:
    """Text in which nothing is taken for markup, except code between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    signs = re.compile(r"([*_\[\]{}\\])")
    return "".join(
        part if place % 2 else signs.sub(r"\\\1", part.replace("<", "&lt;"))
        for place, part in enumerate(parts)
    )


def joined(parts: list[str]) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def write(folder: Path) -> None:
    """Write all pages."""
    manager = PluginManager()
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "commands": commands_page(),
        "stages": stages_page(manager),
        "sections": sections_page(manager),
        "plugins": plugins_page(manager),
    }
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
