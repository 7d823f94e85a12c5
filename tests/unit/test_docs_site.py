"""The documentation: commands and configs on its pages exist, and the site builds from them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from posttrain.core.config.json_schema import json_schema
from posttrain.core.plugin_manager import PluginManager
from posttrain.pipelines.cli.main import app
from tests.helpers.tutorials import blocks

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", REPO / "README.zh.md", *sorted((REPO / "docs").glob("*.md"))]
PAGES += [
    page for part in ("tutorials", "explanations") for page in (REPO / "docs" / part).iterdir()
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(posttrain [^`]*)`")
COMMAND = re.compile(r"^posttrain ([a-z].*)$", re.MULTILINE)


def command_lines(text: str) -> Iterator[str]:
    """What follows `posttrain` in code blocks and inline code, without comments."""
    code = [*(block for _, block in FENCE.findall(text)), *INLINE.findall(text)]
    for found in COMMAND.findall("\n".join(code)):
        yield re.split(r"\s+[#(·]|\s{3,}| \.\.\.", found.strip())[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_on_a_page_exist(page: Path) -> None:
    root: Any = typer.main.get_command(app)  # Any: Click's own
    for line in command_lines(page.read_text("utf-8")):
        try:
            words = shlex.split(line)
        except ValueError:  # a quotation that a sentence goes on after
            continue
        command, rest = root, words
        while rest and hasattr(command, "commands"):
            if not re.fullmatch(r"[a-z-]+", rest[0]):
                break  # `plugins list|show`, or a sentence
            assert rest[0] in command.commands, f"{page.name}: posttrain {line}"
            command, rest = command.commands[rest[0]], rest[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        known |= {option for p in command.params for option in p.secondary_opts} | {"--help"}
        given = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert given <= known, f"{page.name}: posttrain {line}: {sorted(given - known)}"


@pytest.fixture(scope="module")
def schema(manager: PluginManager) -> dict[str, Any]:
    return json_schema(manager)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_marked_configs_and_stages_fit_the_schema(page: Path, schema: dict[str, Any]) -> None:
    whole = jsonschema.Draft7Validator(schema)
    stage = whole.evolve(schema={"$ref": "#/$defs/stage", "$defs": schema["$defs"]})
    for block in blocks(page):
        if block.does == "config" or block.argument.endswith(".yaml"):
            errors = list(whole.iter_errors(yaml.safe_load(block.text)))
            assert errors == [], f"{page.name}: {block.text[:80]}: {errors[0].message}"
    for language, text in FENCE.findall(page.read_text("utf-8")):
        values = yaml.safe_load(text) if language == "yaml" else None
        for name, fields in (values or {}).get("stages", {}).items() if values else ():
            if isinstance(fields, dict) and "inputs" in fields and "..." not in text:
                errors = list(stage.iter_errors(fields))
                assert errors == [], f"{page.name}: {name}: {errors[0].message}"


def test_the_table_of_rewards_has_each_built_in_one(manager: PluginManager) -> None:
    page = (REPO / "docs" / "rewards.md").read_text("utf-8")
    ours = {entry.name for entry in manager.entries("reward") if entry.package == "posttrain"}
    assert ours == set(re.findall(r"^\| `(\w+)` \|.*\| (?:host|worker) \|", page, re.MULTILINE))


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs is not installed: pip install 'posttrain[docs]'",
)
def test_the_site_builds_without_dead_links() -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "docs" / "build_site.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (REPO / "build" / "site" / "reference" / "stages" / "index.html").read_text("utf-8")
    assert "num_generations" in page and "responses per prompt" in page
