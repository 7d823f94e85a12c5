"""Stage `preference`: DPO, IPO, KTO and their relatives, on pairs or on labelled answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from posttrain.core.config.supervised_stages import PreferenceStage
from posttrain.core.contracts import PreferenceLoss
from posttrain.core.data.preference import LabelledAnswer, mismatched_answers
from posttrain.core.data.tokenization import ChatTokenizer
from posttrain.core.math.intervals import wilson
from posttrain.core.models.loading import load_policy, save_model
from posttrain.core.runtime.device import peak_memory_gb, trim_heap
from posttrain.core.tracking.plots import preference_curves
from posttrain.core.training.optim import MasterOptimizer
from posttrain.core.training.preference import BothFallingAlarm, PreferenceLearner, Rows
from posttrain.core.training.preference_objective import PreferenceObjective, PreferenceTerm
from posttrain.core.training.preference_scores import Scoring
from posttrain.pipelines.stages.context import StageContext, StageOutput
from posttrain.pipelines.stages.preference_data import (
    gather_labelled,
    gather_pairs,
    mini_batches,
)


def run_preference(context: StageContext) -> StageOutput:
    """Train the input model on preferences, and rank answers to unseen prompts."""
    stage = context.stage
    assert isinstance(stage, PreferenceStage)
    tokenizer = context.tokenizer()
    objective = build_objective(context, stage)
    gather = gather_pairs if objective.data == "pairs" else gather_labelled
    train, held_out = gather(context, stage, tokenizer)
    schedule = mini_batches(context, stage, len(train))
    if objective.needs_kl_completions:
        _check_labelled(context, stage, train, schedule)
    run = _PreferenceRun(context, stage, _learner(context, stage, objective, tokenizer), held_out)
    metrics = run.train(train, schedule)
    save_model(run.learner.model, tokenizer.tokenizer, context.out / "model")
    title = f"{context.run.name}: {context.name}"
    plots = preference_curves(run.history, run.rankings, title, context.out / "plots")
    for path in plots:
        context.tracker.log_file(path, "plots")
    return StageOutput({"model": context.out / "model", "report": context.out / "plots"}, metrics)


def build_objective(context: StageContext, stage: PreferenceStage) -> PreferenceObjective:
    """The stage's losses and how their scores are made."""
    scoring = Scoring(
        f_divergence=stage.f_divergence,
        alpha=stage.f_alpha,
        ld_alpha=stage.ld_alpha,
        wpo=stage.wpo,
    )
    terms = tuple(
        PreferenceTerm(context.build(PreferenceLoss, term), term.coef) for term in stage.loss_terms
    )
    return PreferenceObjective(terms, scoring, stage.reference_free)


def _learner(
    context: StageContext,
    stage: PreferenceStage,
    objective: PreferenceObjective,
    tokenizer: ChatTokenizer,
) -> PreferenceLearner:
    """The policy, and its frozen copy when a loss is relative to one."""
    reference = None
    if objective.needs_reference:
        reference = load_policy(context.model_dir, context.runtime)
        reference.requires_grad_(False)
    return PreferenceLearner(
        model=load_policy(context.model_dir, context.runtime),
        objective=objective,
        pad_token_id=tokenizer.pad_token_id,
        micro_batch_size=stage.micro_batch_size,
        reference=reference,
        check=context.check,
    )


@dataclass
class _PreferenceRun:
    """A preference stage in progress."""

    context: StageContext
    stage: PreferenceStage
    learner: PreferenceLearner
    held_out: Rows
    history: list[dict[str, float]] = field(default_factory=list)
    rankings: list[dict[str, float]] = field(default_factory=list)

    def train(self, rows: Rows, schedule: Sequence[Sequence[int]]) -> dict[str, float]:
        """All optimizer steps; returns the last one's metrics and the held-out ranking."""
        context, stage = self.context, self.stage
        optimizer = MasterOptimizer(self.learner.model, stage.optimizer, len(schedule))
        alarm = BothFallingAlarm(stage.both_falling_alarm, stage.both_falling_window)
        context.started(len(schedule))
        metrics: dict[str, float] = {}
        for step, chosen in enumerate(schedule, start=1):
            context.check()
            metrics = self.learner.step([rows[i] for i in chosen], optimizer)
            trim_heap()
            metrics["memory/peak_gb"] = peak_memory_gb()
            warning = alarm.after(step, metrics)
            if warning is not None:
                context.warn(f"{context.name}: {warning}")
            every = stage.evaluate_every
            if step == len(schedule) or (every and step % every == 0):
                metrics |= self.rank(step)
            context.log_step(step, metrics)
            self.history.append({"step": float(step), **metrics})
        optimizer.close()
        sizes = {
            "pref/num_rows": float(len(rows)),
            "pref/num_held_out_rows": float(len(self.held_out)),
        }
        ranked = {key: value for key, value in metrics.items() if key.startswith("pref/held_out")}
        context.tracker.log_summary(ranked | sizes)
        return metrics | sizes

    def rank(self, step: int) -> dict[str, float]:
        """Held-out accuracy of the policy after `step` steps, with its 95 % interval."""
        ranking = self.learner.rank(self.held_out)
        low, high = wilson(ranking.hits, ranking.total)
        unit = "pair" if ranking.by_pairs else "row"
        found = {
            f"pref/held_out_{unit}_accuracy": ranking.hits / ranking.total,
            "pref/held_out_low": low,
            "pref/held_out_high": high,
            "pref/held_out_margin": ranking.gap,
        }
        self.rankings.append({"step": float(step), **found})
        return found


def _check_labelled(
    context: StageContext, stage: PreferenceStage, rows: Rows, schedule: Sequence[Sequence[int]]
) -> None:
    """Fail before the first step when a mini-batch has one prompt, warn when labels are uneven."""
    labelled = [row for row in rows if isinstance(row, LabelledAnswer)]
    for chosen in schedule:
        mismatched_answers([labelled[i] for i in chosen])
    wanted = sum(row.desirable for row in labelled)
    unwanted = len(labelled) - wanted
    for term in stage.loss_terms:
        fields = term.fields()
        share = wanted * float(str(fields.get("desirable_weight", 1.0)))
        other = unwanted * float(str(fields.get("undesirable_weight", 1.0)))
        if share and other and not 1 <= share / other <= 4 / 3:
            context.warn(
                f"{context.name}: {wanted} wanted and {unwanted} unwanted answers weigh "
                f"{share:g} to {other:g} in '{term.name}', where between 1:1 and 4:3 is advised; "
                f"set desirable_weight to {other / wanted:.3g}, or undesirable_weight to "
                f"{share / unwanted:.3g}"
            )
