"""Checks of what a plugin's kind promises: how they are written, chosen and run.

A check is a function of a `Subject` that raises `Broken` with what was found, or `Skipped` with why
it does not apply. The other modules here hold the checks of each kind.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from posttrain.core.contracts import CONTRACTS, Component, Plugin
from posttrain.core.errors import PosttrainError, causes
from posttrain.core.plugin_manager import PluginEntry, PluginManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

State = Literal["passed", "failed", "skipped"]


class Broken(AssertionError):
    """A promise that a plugin does not keep; the message says what was found."""


class Skipped(Exception):
    """A check that says nothing of this plugin; the message says why."""


@dataclass(frozen=True)
class Subject:
    """A plugin under test: `build` makes a new one from its `fields` each time.

    `tokenizer`, with the `tags` among its control tokens that it does not mark as special, is what
    a renderer is checked with; None = one of the kit's own, of the ChatML family.
    """

    entry: PluginEntry
    manager: PluginManager
    fields: Mapping[str, object] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    tags: tuple[str, ...] = ()

    def build(self) -> Any:  # Any: each check knows the contract of its kind
        """A new plugin; `ConfigError` where `fields` do not fit."""
        if self.entry.kind == "task":
            return self.manager.task(Component(name=self.entry.name, **self.fields))
        return self.manager.build(CONTRACTS[self.entry.kind], self.entry.name, self.fields)

    @property
    def cls(self) -> Any:  # Any: as in `build`
        return self.entry.cls

    @property
    def is_built_in(self) -> bool:
        return self.entry.package == "posttrain"


@dataclass(frozen=True, slots=True)
class Check:
    """One promise; `name` is what holds, in words."""

    kinds: frozenset[str]
    """The kinds that promise it; empty = every kind."""
    name: str
    function: Callable[[Subject], None]

    def applies_to(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


_CHECKS: list[Check] = []


def check(name: str, *kinds: str) -> Callable[[Callable[[Subject], None]], Callable[..., None]]:
    """Register a function as the check `name` of plugins of these kinds, of all when none is."""

    def register(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        _CHECKS.append(Check(frozenset(kinds), name, function))
        return function

    return register


# Loaded when the checks of a kind are asked for: some need torch or a model.
_MODULES: dict[str, tuple[str, ...]] = {
    "task": ("tasks",),
    "reward": ("rewards",),
    "environment": ("environments",),
    "tool": ("environments",),
    "renderer": ("renderers",),
    "rollout_engine": ("engines",),
    "sampler": ("samplers",),
    "advantage": ("advantages",),
    "aggregator": ("losses",),
    "policy_loss": ("losses",),
    "kl": ("corrections",),
    "kl_controller": ("corrections",),
    "entropy_controller": ("corrections",),
    "rollout_correction": ("corrections",),
    "preference_loss": ("preferences",),
    "advantage_transform": ("teaching",),
    "distillation_loss": ("teaching",),
    "algorithm": ("algorithms",),
    "stage": ("stages",),
    "optimizer": ("optimizers",),
}


def checks_of(kind: str) -> list[Check]:
    """Every check of plugins of this kind, those of all kinds first."""
    for module in ("every", *_MODULES.get(kind, ())):
        importlib.import_module(f"posttrain.core.kit.{module}")
    return [each for each in _CHECKS if each.applies_to(kind)]


@dataclass(frozen=True, slots=True)
class Finding:
    """How one check of a plugin ended; `detail` says what was found, or why it was skipped."""

    check: str
    state: State
    detail: str = ""


def run_checks(subject: Subject) -> list[Finding]:
    """Run all checks of the plugin's kind; whatever the plugin raises is a failed check."""
    return [_run(each, subject) for each in checks_of(subject.entry.kind)]


def assert_keeps_contract(
    cls: type[Plugin[Any]], fields: Mapping[str, object] | None = None
) -> None:
    """Raise `AssertionError` with every check that the plugin class fails; for an author's tests.

    `fields` are the settings that it has no default for.
    """
    manager = PluginManager()
    entry = manager.offer(cls)
    failed = [
        f"{each.check}: {each.detail}"
        for each in run_checks(Subject(entry, manager, fields or {}))
        if each.state == "failed"
    ]
    if failed:
        raise AssertionError(f"{entry.kind} '{entry.name}':\n  " + "\n  ".join(failed))


def _run(check: Check, subject: Subject) -> Finding:
    try:
        check.function(subject)
    except Skipped as reason:
        return Finding(check.name, "skipped", str(reason))
    except Broken as error:
        return Finding(check.name, "failed", str(error))
    except Exception as error:  # somebody else's code: what it raised is the finding
        return Finding(check.name, "failed", raised(error))
    return Finding(check.name, "passed")


def raised(error: BaseException) -> str:
    """What a plugin raised, and the line of its own that did."""
    first = next(iter(causes(error)))
    if isinstance(error, PosttrainError):
        return str(error)
    frames = traceback.extract_tb(first.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(first).split())[:300]
    return f"it raised {type(first).__name__}{where}{f': {text}' if text else ''}"


def broken(sentence: str) -> NoReturn:
    """End a check: this was found."""
    raise Broken(sentence)


def expect(holds: object, sentence: str) -> None:
    """End a check unless `holds`; `sentence` says what was found."""
    if not holds:
        broken(sentence)


def expect_equal(found: object, wanted: object, what: str) -> None:
    """End a check unless two plain values are equal."""
    if found != wanted:
        broken(f"{what}: got {_short(found)}, expected {_short(wanted)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def listed(findings: Sequence[Finding], state: State) -> list[Finding]:
    """The findings of one state."""
    return [each for each in findings if each.state == state]
