"""`posttrain schema`: the JSON Schema of a config, with every installed plugin, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from posttrain.pipelines.cli.common import EPILOG_CODES, CommandContext, Result, command

SCHEMA_FILE = "posttrain.schema.json"
EPILOG = (
    "Examples:\n\n"
    f"  posttrain schema --out {SCHEMA_FILE}\n\n"
    "Then begin a config with the line\n\n"
    f"  # yaml-language-server: $schema={SCHEMA_FILE}\n\n"
    "and editors with YAML support (VS Code, Neovim, JetBrains, Emacs) complete names and mark "
    "mistakes. Write the file again after installing a plugin. `posttrain validate` checks more: "
    "what several places must agree on, the model and the data.\n\n" + EPILOG_CODES
)


@command()
def schema(
    context: CommandContext,
    out: Annotated[
        Path | None, typer.Option(help="File to write.  \\[default: standard output]")
    ] = None,
) -> Result | None:
    """Print or write the JSON Schema of a config: sections, stage kinds, every plugin's fields."""
    text = schema_text()
    if out is None:
        print(text, file=context.stdout)
        return None
    write_schema(out, text)
    context.say(f"wrote {out}; begin a config with")
    context.say(header(out))
    return Result({"status": "ok", "schema": str(out)})


def schema_text() -> str:
    from posttrain.core.config.json_schema import json_schema
    from posttrain.core.plugin_manager import PluginManager

    return json.dumps(json_schema(PluginManager()), indent=1, ensure_ascii=False)


def write_schema(path: Path, text: str) -> None:
    from posttrain.core.runtime.files import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n")


def header(path: Path | str) -> str:
    """The line by which editors find the schema; `path` is relative to the config."""
    return f"# yaml-language-server: $schema={path}"
