"""What `posttrain plugins new` writes: a kind's example under another name, and its package."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from pathlib import Path

from posttrain.core.contracts import CONTRACTS
from posttrain.core.contracts.validity import snake
from posttrain.core.errors import ConfigError, nearest

EXAMPLES = Path(__file__).parent / "examples"

USES: Mapping[str, str] = {
    "task": "task: {}",
    "reward": "stages: {{rl: {{kind: rl, rewards: [{}]}}}}",
    "sampler": "stages: {{rl: {{kind: rl, sampler: {}}}}}",
    "environment": "stages: {{rl: {{kind: rl, environment: {}}}}}",
    "tool": "stages: {{rl: {{kind: rl, environment: {{name: tools, tools: [{}]}}}}}}",
    "renderer": "model: {{renderer: {}}}",
    "rollout_engine": "engine: {}",
    "advantage": "stages: {{rl: {{kind: rl, advantage: {}}}}}",
    "advantage_transform": "stages: {{rl: {{kind: rl, advantage_transform: {}}}}}",
    "distillation_loss": "stages: {{rl: {{kind: rl, distillation: {}}}}}",
    "policy_loss": "stages: {{rl: {{kind: rl, policy_loss: {}}}}}",
    "aggregator": "stages: {{rl: {{kind: rl, aggregator: {}}}}}",
    "kl": "stages: {{rl: {{kind: rl, kl: {{estimator: {}}}}}}}",
    "kl_controller": "stages: {{rl: {{kind: rl, kl: {{controller: {}}}}}}}",
    "entropy_controller": "stages: {{rl: {{kind: rl, entropy_controller: {}}}}}",
    "rollout_correction": "stages: {{rl: {{kind: rl, rollout_correction: {{plugin: {}}}}}}}",
    "preference_loss": "stages: {{dpo: {{kind: preference, preference_loss: {}}}}}",
    "stage": "stages: {{short: {{kind: {}}}}}",
    "optimizer": "stages: {{sft: {{kind: sft, optimizer: {{name: {}, learning_rate: 1e-4}}}}}}",
    "algorithm": "stages: {{rl: {{kind: rl, algorithm: {}}}}}",
}
"""Where a configuration names a plugin of each kind; what is left out is as in any config."""


def check_kind(kind: str) -> None:
    """Raise `ConfigError` for an unknown kind of plugin."""
    if kind not in CONTRACTS:
        raise ConfigError(
            f"no plugin kind '{kind}'{nearest(kind, CONTRACTS)} (kinds: {sorted(CONTRACTS)})"
        )


def example(kind: str, name: str = "example") -> str:
    """The module with the example of `kind`, the plugin called `name`."""
    return _renamed((EXAMPLES / f"{kind}.py").read_text("utf-8"), kind, name)


def example_test(kind: str, name: str, module: str) -> str:
    """The tests of `example`, which they import from `module`."""
    text = _renamed((EXAMPLES / f"test_{kind}.py").read_text("utf-8"), kind, name)
    return text.replace(f"posttrain.core.kit.examples.{kind}", module)


def class_name(name: str) -> str:
    """`brief-answer` as `BriefAnswer`."""
    return "".join(part.capitalize() for part in re.split(r"[-_]", name))


def module_name(name: str) -> str:
    return name.replace("-", "_")


def file_of(kind: str, name: str) -> tuple[str, str]:
    """Name and text of a file with a plugin of `kind`, to be named by its path."""
    _check(kind, name)
    return f"{module_name(name)}.py", example(kind, name)


def package_of(kind: str, name: str) -> tuple[str, dict[str, str]]:
    """A folder's name and the texts of its files, by path: a package with a plugin of `kind`."""
    _check(kind, name)
    module, cls = module_name(name), class_name(name)
    package = f"posttrain_{module}"
    values = {"KIND": kind, "NAME": name, "MODULE": module, "CLASS": cls, "PACKAGE": package}
    values |= {"FOLDER": package.replace("_", "-"), "USE": USES[kind].format(name)}
    values |= {"LOCAL": USES[kind].format(f"src/{package}/{module}.py:{cls}")}

    def filled(text: str) -> str:
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        return text

    return values["FOLDER"], {
        "pyproject.toml": filled(_PYPROJECT),
        "README.md": filled(_README),
        f"src/{package}/__init__.py": filled(_INIT),
        f"src/{package}/{module}.py": example(kind, name),
        f"tests/test_{module}.py": example_test(kind, name, f"{package}.{module}"),
    }


def write_new(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write files below `folder`; `ConfigError` if one is there already, and then none is."""
    paths = {folder / name: text for name, text in files.items()}
    there = next((path for path in paths if path.exists()), None)
    if there is not None:
        raise ConfigError(f"{there} is there already: choose another NAME or --out, or remove it")
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return list(paths)


def _check(kind: str, name: str) -> None:
    check_kind(kind)
    fits = re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name)
    if fits is None or keyword.iskeyword(name):
        proposal = re.sub(r"[^a-z0-9]+", "_", snake(name)).strip("_0123456789") or "my_plugin"
        raise ConfigError(
            f"the name '{name}' cannot be a plugin's and a module's: use lower-case letters, "
            f"digits and _, beginning with a letter, such as '{proposal}'"
        )


def _renamed(text: str, kind: str, name: str) -> str:
    cls = class_name(name)
    text = re.sub(r"\bExample(Config)?\b", rf"{cls}\1", text)
    return text.replace('"example"', f'"{name}"').replace("`example`", f"`{name}`")


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "@FOLDER@"
version = "0.1.0"
description = "A plugin for posttrain: the @KIND@ '@NAME@'"
requires-python = ">=3.11"
dependencies = ["posttrain"]

# This line is the whole registration.
[project.entry-points."posttrain.plugins"]
@MODULE@ = "@PACKAGE@"

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
pythonpath = ["src"]
testpaths = ["tests"]
"""

_INIT = '''\
"""A plugin for posttrain: the @KIND@ `@NAME@`."""

from __future__ import annotations

from posttrain.core.hooks import hookimpl

from @PACKAGE@.@MODULE@ import @CLASS@


@hookimpl
def posttrain_register() -> list[type[@CLASS@]]:
    """Offer the plugin to posttrain."""
    return [@CLASS@]
'''

_README = """\
# @FOLDER@

The @KIND@ `@NAME@` for posttrain.

```
posttrain plugins check src/@PACKAGE@/@MODULE@.py:@CLASS@    # what a @KIND@ promises
pytest                                                      # the same, and tests of your own
pip install .                                               # posttrain then knows it by name
```

In a config, installed:

```yaml
@USE@
```

By its path, without an installation:

```yaml
@LOCAL@
```

`src/@PACKAGE@/@MODULE@.py` holds the plugin: a class with `name`, `Config`, a docstring with its
formula or source, and the methods of its kind. Two plugins of one kind and name are refused.
"""
