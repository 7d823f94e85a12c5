"""The token microscope over a step of a stage, and the pages that the stage logs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from posttrain.core.analysis.evidence import StepEvidence, read_step, steps_in
from posttrain.core.analysis.microscope import (
    LARGE,
    OWN_NAME,
    Microscope,
    Weigh,
    look,
    notes_of,
)
from posttrain.core.analysis.token_weights import TokenWeights, reads_logits, token_weights
from posttrain.core.analysis.what_if import WhatIf, objective_under, usual
from posttrain.core.config.rl_stage import RlStage
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.pipelines.rl.build import build_objective, update_settings
from posttrain.pipelines.stage.context import StageContext
from posttrain.pipelines.stage.inputs import StageInputs
from posttrain.pipelines.stages.answer_losses import losses_on_answers

FOLDER = "microscope"
"""Of the pages among the files of a stage's MLflow run."""
MAX_PAGE_MB = 16.0
"""Size from which a page is not logged."""


def microscope_of(
    there: StageInputs,
    evidence: StepEvidence,
    title: str,
    asked: Sequence[WhatIf] = (),
    *,
    with_usual: bool = True,
) -> Microscope:
    """A step under its stage's own loss, under `asked` and the usual ones.

    Raises `ConfigError` for what is asked and cannot be built, `RunError` for what cannot be
    computed from the evidence.
    """
    names = [OWN_NAME, *(what.text for what in asked)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"what-if '{twice}' is on the page already; name each once")
    if isinstance(there.stage, RlStage):
        return _of_rollout(there, there.stage, evidence, title, asked, with_usual)
    losses = losses_on_answers(there)
    own = losses.own(evidence)
    chosen = {what.text: _named(what, losses.under(what)) for what in asked}
    fits = {what.text: losses.under(what) for what in losses.usual() if with_usual}
    return look(evidence, own.tokens, chosen, fits, title=title, answers=own)


def _named(what: WhatIf, weigh: Weigh) -> Weigh:
    """`weigh`, whose refusal says what was asked."""

    def weighed(evidence: StepEvidence) -> TokenWeights:
        try:
            return weigh(evidence)
        except ConfigError as error:
            raise ConfigError(f"what-if '{what.text}': {error}; leave it out") from error

    return weighed


def _of_rollout(
    there: StageInputs,
    stage: RlStage,
    evidence: StepEvidence,
    title: str,
    asked: Sequence[WhatIf],
    with_usual: bool,
) -> Microscope:
    own = build_objective(there, stage)
    if not own.terms and own.distillation is None:
        raise ConfigError(
            f"stage '{there.name}' has no loss on its rollout, so its tokens have no weights"
        )
    settings = update_settings(there, stage, evidence.step)

    def weigh(what: WhatIf) -> Weigh:
        longest = stage.generation.max_response_length
        objective = objective_under(what, own, there.manager, longest)
        return partial(token_weights, objective=objective, settings=settings)

    chosen = {what.text: weigh(what) for what in asked}
    fits, refused = dict[str, Weigh](), list[str]()
    for what in usual(own, there.manager) if with_usual else ():
        try:
            fits[what.text] = weigh(what)
        except ConfigError as error:
            refused.append(f"{what.text} is left out: {error}")
    notes = [*refused, *notes_of(evidence, own, settings)]
    weights = token_weights(evidence, own, settings)
    return look(evidence, weights, chosen, fits, title=title, notes=notes)


def log_pages(context: StageContext) -> None:
    """Log the pages of the stage's first and last kept step, if any is kept.

    A page that cannot be made, or is too large, is a warning: the stage is done without it.
    """
    keeper = context.evidence
    if keeper is None:
        return
    keeper.flush()
    kept = _with_weights(context, steps_in(keeper.folder))
    for step in sorted({kept[0], kept[-1]}) if kept else []:
        try:
            _log_page(context, read_step(keeper.folder, step))
        except (PosttrainError, OSError, RuntimeError, ValueError) as error:
            context.warn(f"{context.name}: no microscope page of step {step}: {error}")


def _with_weights(context: StageContext, steps: Sequence[int]) -> list[int]:
    """The steps whose tokens have weights: those of a divergence alone are not always measured."""
    stage = context.stage
    if not isinstance(stage, RlStage):
        return list(steps)
    own = build_objective(context, stage)
    if own.terms or not reads_logits(own):
        return list(steps)
    return [n for n in steps if update_settings(context, stage, n).measures_slopes(n)]


def _log_page(context: StageContext, evidence: StepEvidence) -> None:
    large = int(evidence.batch.response_mask.sum()) >= LARGE
    title = f"{context.run.name} · stage {context.name} · step {evidence.step}"
    text = microscope_of(context, evidence, title, with_usual=not large).page()
    size = len(text.encode()) / 1e6
    if size > MAX_PAGE_MB:
        context.warn(
            f"{context.name}: the microscope page of step {evidence.step} is not logged: it "
            f"has {size:.0f} MB, more than {MAX_PAGE_MB:.0f}; `posttrain inspect` makes it"
        )
        return
    with tempfile.TemporaryDirectory(prefix="posttrain-microscope-") as folder:
        path = Path(folder) / f"step-{evidence.step:06d}.html"
        path.write_text(text, encoding="utf-8")
        context.tracker.log_file(path, FOLDER)
