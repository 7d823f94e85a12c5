"""The hook specifications: everything a third-party package implements to extend posttrain.

A package names a module in its `pyproject.toml`::

    [project.entry-points."posttrain.plugins"]
    my_package = "my_package.plugins"

and that module holds functions marked with `hookimpl`. All hooks start with `posttrain_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pluggy

PROJECT_NAME = "posttrain"
ENTRY_POINT_GROUP = "posttrain.plugins"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def posttrain_register() -> list[type[Any]]:  # type: ignore[empty-body]
    """Return the plugin classes this module offers.

    Each is a subclass of one of the base classes in `posttrain.core.contracts`. Two plugins of one
    kind and name are an error at load, whoever offers them. (Untyped here because the contracts
    stand above the hooks in the order of imports.)
    """


@hookspec
def posttrain_commands() -> list[Any]:  # type: ignore[empty-body]
    """Return commands for `posttrain`: typer apps with a name, or functions as typer takes them.

    The module stands in the entry-point group `posttrain.commands`, not with the plugins: it is
    loaded where help is asked for, so it should load nothing heavy. (Any: hooks load no typer.)
    """


@hookspec
def posttrain_on_step_end(stage: str, step: int, metrics: Mapping[str, float]) -> None:
    """Called after every optimizer step of any stage with the metrics that were tracked for it."""


@hookspec
def posttrain_on_stage_end(stage: str, status: str, metrics: Mapping[str, float]) -> None:
    """Called once a stage has ended: `ran`, `cached`, `resumed`, `failed` or `killed`."""
