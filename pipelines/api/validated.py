"""Everything of a config that can be checked without running or writing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.pipelines.run.checks import check_inputs, check_model

if TYPE_CHECKING:
    from posttrain.core.config.resolve import PluginUse, ResolvedRun
    from posttrain.core.config.schema import RunConfig
    from posttrain.core.plugin_manager import PluginManager
    from posttrain.core.types import Problem


@dataclass(frozen=True, slots=True)
class Validation:
    """A config that can be run.

    `order` are its stages in the order they run, `plugins` what each of them uses, `problems` the
    first problem of each split. `notes` say what was not checked, or is computed in a slower way;
    `warnings` what is probably a mistake.
    """

    config: RunConfig
    order: tuple[str, ...]
    plugins: Mapping[str, Sequence[PluginUse]]
    problems: Mapping[str, Problem]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """The result in sentences, the verdict last."""
        config = self.config
        return [
            *(f"{s} problem: {p.prompt!r} -> {p.answer!r}" for s, p in self.problems.items()),
            *(f"note: {note}" for note in self.notes),
            *(f"warning: {warning}" for warning in self.warnings),
            f"ok: {len(self.order)} stages ({', '.join(self.order)}), "
            f"task '{config.task.name}', model {config.model.source}",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def validated(resolved: ResolvedRun, manager: PluginManager, home: Path, store: Path) -> Validation:
    """Check plugins, DAG, model and data; raises `PosttrainError` for what is wrong."""
    from posttrain.core.store.artifacts import check_free_disk
    from posttrain.pipelines.run.forks import check_forks
    from posttrain.pipelines.run.model_reference import find_base
    from posttrain.pipelines.run.rounds import with_model
    from posttrain.pipelines.run.store import require_folders, require_store

    require_folders(home, store)
    require_store(store)
    found = find_base(resolved.config.model, home, store)
    local = with_model(resolved, found.section)
    inputs = check_inputs(local, manager)
    check_free_disk(home, 0, resolved.config.limits.min_free_gb, "a run")
    from posttrain.pipelines.run.data_checks import check_texts  # it imports torch

    with resolved.loaded.located():
        check_forks(resolved.config, home)
        texts = check_texts(local, manager, inputs.task, home / "models")
    return Validation(
        config=resolved.config,
        order=tuple(resolved.order),
        plugins=resolved.plugins,
        problems=inputs.problems,
        notes=(*inputs.notes, *check_model(local, manager), *texts.notes),
        warnings=tuple(texts.warnings),
    )
