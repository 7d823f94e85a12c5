"""Writes docs/plugins/KIND.md, the contract and an example of each kind: `make docs`.

    python docs/generate_plugins.py [FOLDER]

Everything on a page is read from the code: base classes, their methods and attributes, the checks
of `posttrain plugins check`, and the example that `posttrain plugins new` writes.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posttrain.core.contracts as contracts
from posttrain.core.contracts import CONTRACTS, Plugin
from posttrain.core.contracts.validity import config_base
from posttrain.core.kit.checks import checks_of
from posttrain.core.kit.new import USES, example, example_test
from posttrain.core.plugin_manager import PluginManager

DOCS = Path(__file__).resolve().parent
NAME = "my_plugin"


def bases_of(kind: str) -> list[type[Plugin[Any]]]:
    """The contract of a kind, and the base classes that derive from it, in that order."""
    contract = CONTRACTS[kind]
    found = [getattr(contracts, name) for name in contracts.__all__ if name != "CONTRACTS"]
    derived = [c for c in found if inspect.isclass(c) and issubclass(c, contract)]
    return sorted(derived, key=lambda cls: len(cls.__mro__))


def page(kind: str, manager: PluginManager) -> str:
    """The text of a kind's page."""
    built_in = [f"`{e.name}`" for e in manager.entries(kind) if e.package == "posttrain"]
    parts = [
        f"# Plugins of kind `{kind}`",
        "Written by `python docs/generate_plugins.py`. [All kinds](../plugins.md).",
        f"Built in: {', '.join(built_in)}.",
        "## Begin",
        f"```\nposttrain plugins new {kind} {NAME}           # a package; with --file, one file\n"
        f"posttrain plugins check {NAME}.py:MyPlugin\n```",
        "A config names it by its path, or, once its package is installed, by its name:",
        f"```yaml\n{USES[kind].format(f'{NAME}.py:MyPlugin')}\n```",
        f"```yaml\n{USES[kind].format(NAME)}\n```",
        "## Contract",
    ]
    for cls in bases_of(kind):
        parts += list(_contract(cls))
    checks = "\n".join(f"- {check.name}" for check in checks_of(kind))
    parts += [
        "## Checks",
        f"`posttrain plugins check` runs these:\n\n{checks}",
        "## Example",
        f"```python\n{example(kind, NAME).rstrip()}\n```",
        f"Its test:\n\n```python\n{example_test(kind, NAME, NAME).rstrip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _contract(cls: type[Plugin[Any]]) -> Iterator[str]:
    """A base class: its docstring, attributes and methods of its own."""
    above = [base.__name__ for base in cls.__bases__ if base.__name__ not in ("Generic", "ABC")]
    yield f"### `{cls.__name__}`"
    yield inspect.getdoc(cls) or ""
    settings = config_base(cls).__name__
    yield f"Derives from `{', '.join(above)}`; its `Config` derives from `{settings}`."
    rows = [f"- `{line}`{text}" for line, text in _attributes(cls)]
    if rows:
        yield "\n".join(rows)
    for name, function in vars(cls).items():
        plain = getattr(function, "__func__", function)
        if name.startswith("_") or not inspect.isfunction(plain):
            continue
        must = " **To be implemented.**" if getattr(plain, "__isabstractmethod__", False) else ""
        text = " ".join((inspect.getdoc(plain) or "").split())
        yield f"`{name}{_signature(plain)}`:{must} {text}".rstrip(": ") + ("" if text else ".")


def _signature(function: Any) -> str:  # Any: a function of whatever type
    text = str(inspect.signature(function))
    text = re.sub("[\"']", "", text)
    return text.replace("(self, ", "(").replace("(self)", "()")


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    """Annotated names of a class, as they are written, and the texts below them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    for here, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = ": " + " ".join(str(after.value.value).split())
            yield ast.unparse(here).replace("ClassVar", "class attribute"), text


def write(folder: Path) -> None:
    """Write a page for each kind."""
    manager, pages = PluginManager(), folder / "plugins"
    pages.mkdir(parents=True, exist_ok=True)
    for kind in CONTRACTS:
        (pages / f"{kind}.md").write_text(page(kind, manager), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
