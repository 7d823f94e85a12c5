"""The microscope over a past step: its evidence, its stage's own loss, and what somebody asks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.config.base import Component
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.config.schema import RunConfig
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.core.evidence.step import StepEvidence, read_step, steps_in
from posttrain.core.math.masking import masked
from posttrain.core.microscope.page import page
from posttrain.core.microscope.report import LARGE, OWN_NAME, Report, Variant, make_report
from posttrain.core.microscope.what_if import WhatIf, objective_under, usual
from posttrain.core.plugin_manager import PluginManager
from posttrain.core.reports.page import write_html
from posttrain.core.training.objective import Objective
from posttrain.pipelines.rl.build import build_objective, update_settings
from posttrain.pipelines.stages.context import StageContext
from posttrain.pipelines.stages.inputs import PluginT

FOLDER = "microscope"
"""Of the pages among the files of a stage's MLflow run."""
MAX_PAGE_MB = 16.0
"""Size from which a page is not logged."""


@dataclass(frozen=True, slots=True)
class PastStage:
    """An RL stage of a run, as its config says it was."""

    run: RunConfig
    name: str
    manager: PluginManager

    @property
    def stage(self) -> RlStage:
        """Its section of the config."""
        found = self.run.stages[self.name]
        assert isinstance(found, RlStage), "evidence is of rl stages alone"
        return found

    def build(self, contract: type[PluginT], component: Component) -> PluginT:
        """The plugin that a component of the config names."""
        return self.manager.build(contract, component.name, component.fields())


def report_of(
    past: PastStage,
    evidence: StepEvidence,
    title: str,
    asked: Sequence[WhatIf] = (),
    *,
    with_usual: bool = True,
) -> Report:
    """The report of a step under its stage's own loss, under `asked` and the usual ones.

    Raises `ConfigError` for what is asked and cannot be built, `RunError` for what cannot be
    computed from the evidence.
    """
    own = build_objective(past, past.stage)
    if not own.terms:
        raise ConfigError(
            f"stage '{past.name}' has no loss on its rollout, so its tokens have no weights"
        )
    chosen = [_variant(past, what, own) for what in asked]
    names = [OWN_NAME, *(variant.name for variant in chosen)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"what-if '{twice}' is on the page already; name each once")
    others = usual(own, past.manager) if with_usual else []
    fits, refused = [], []
    for what in others:
        try:
            fits.append(_variant(past, what, own))
        except ConfigError as error:
            refused.append(f"{what.text} is left out: {error}")
    settings = update_settings(past, past.stage)
    return make_report(evidence, own, settings, chosen, fits, title=title, notes=refused)


def _variant(past: PastStage, what: WhatIf, own: Objective) -> Variant:
    longest = past.stage.generation.max_response_length
    return Variant(what.text, objective_under(what, own, past.manager, longest))


def figures(evidence: StepEvidence) -> dict[str, float]:
    """What a list of steps tells of each: means over responses, over tokens with loss, in nats."""
    batch, mask = evidence.batch, evidence.batch.mask.bool()
    found = {"responses": float(len(batch)), "tokens": float(mask.sum())}
    for name, column in (("reward", batch.rewards), ("correct", batch.acc)):
        known = None if column is None else column[column.isfinite()]
        if known is not None and known.numel():
            found[name] = float(known.double().mean())
    found["truncated"] = float(batch.truncated.double().mean())
    read = mask & (evidence.seen_by >= 0)[:, None]
    if read.any():
        gap = masked(evidence.seen_logprobs - batch.column("old_logprobs"), read).clamp(-20, 20)
        count = float(read.sum())
        found["entropy"] = float(masked(evidence.seen_entropy, read).double().sum()) / count
        found["kl_old"] = float((gap.expm1() - gap).double().sum()) / count
    return found


def steps_with_figures(folder: Path) -> Mapping[int, Mapping[str, float]]:
    """The steps that have evidence, with what is told of each."""
    return {step: figures(read_step(folder, step)) for step in steps_in(folder)}


def log_pages(context: StageContext) -> None:
    """Give the tracker the pages of the stage's first and last kept step, if any is kept.

    A page that cannot be made, or is too large, is a warning: the stage is done without it.
    """
    keeper = context.evidence
    if keeper is None:
        return
    keeper.flush()
    kept = steps_in(keeper.folder)
    past = PastStage(context.run, context.name, context.manager)
    for step in sorted({kept[0], kept[-1]}) if kept else []:
        try:
            _log_page(context, past, read_step(keeper.folder, step))
        except (PosttrainError, OSError, RuntimeError, ValueError) as error:
            context.warn(f"{context.name}: no microscope page of step {step}: {error}")


def _log_page(context: StageContext, past: PastStage, evidence: StepEvidence) -> None:
    large = int(evidence.batch.response_mask.sum()) >= LARGE
    title = f"{context.run.name} · stage {context.name} · step {evidence.step}"
    report = report_of(past, evidence, title, with_usual=not large)
    with tempfile.TemporaryDirectory(prefix="posttrain-microscope-") as folder:
        path = Path(folder) / f"step-{evidence.step:06d}.html"
        write_html(path, page(report))
        size = path.stat().st_size / 1e6
        if size > MAX_PAGE_MB:
            context.warn(
                f"{context.name}: the microscope page of step {evidence.step} is not logged: it "
                f"has {size:.0f} MB, more than {MAX_PAGE_MB:.0f}; `posttrain inspect` makes it"
            )
            return
        context.tracker.log_file(path, FOLDER)
