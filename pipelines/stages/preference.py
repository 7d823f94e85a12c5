"""Stage `preference`: DPO, IPO, KTO and their relatives, on pairs or on labelled answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from posttrain.core.analysis.learning_curves import preference_curves
from posttrain.core.config.supervised_stages import PreferenceStage
from posttrain.core.data.preference import LabelledAnswer, mismatched_answers
from posttrain.core.math.intervals import wilson
from posttrain.core.runtime.device import peak_memory_gb
from posttrain.core.runtime.heap import StepHeap
from posttrain.core.training.preference import BothFallingAlarm, Ranking, Rows
from posttrain.core.training.step_tensors import preference_tensors
from posttrain.pipelines.ranks.methods import preference_objective
from posttrain.pipelines.ranks.trainer import Trainer, open_trainer
from posttrain.pipelines.rl.recording import raise_alarm
from posttrain.pipelines.stages.context import StageContext, StageOutput
from posttrain.pipelines.stages.preference_data import (
    gather_labelled,
    gather_pairs,
    mini_batches,
)
from posttrain.pipelines.stages.steps import Steps
from posttrain.pipelines.stages.trained import save_trained


def run_preference(context: StageContext) -> StageOutput:
    """Train the input model on preferences, and rank answers to unseen prompts."""
    stage = context.stage
    assert isinstance(stage, PreferenceStage)
    tokenizer = context.tokenizer()
    objective = preference_objective(context, stage)
    gather = gather_pairs if objective.data == "pairs" else gather_labelled
    train, held_out = gather(context, stage, tokenizer)
    schedule = mini_batches(context, stage, len(train))
    if objective.needs_kl_completions:
        _check_labelled(context, stage, train, schedule)
    with open_trainer(context, len(schedule)) as trainer:
        steps = Steps.begin(context, trainer, len(schedule), stage.checkpoint_every)
        run = _PreferenceRun(context, stage, trainer, held_out, steps)
        metrics = run.train(train, schedule)
        save_trained(context, trainer.trained_model(), tokenizer, "model")
    title = f"{context.run.name}: {context.name}"
    plots = preference_curves(steps.history, run.rankings, title, context.out / "plots")
    for path in plots:
        context.tracker.log_file(path, "plots")
    return StageOutput(
        {"model": context.out / "model", "report": context.out / "plots"}, metrics, steps.resumed
    )


@dataclass
class _PreferenceRun:
    context: StageContext
    stage: PreferenceStage
    trainer: Trainer
    held_out: Rows
    steps: Steps

    @property
    def rankings(self) -> list[dict[str, float]]:
        return [row for row in self.steps.history if "pref/held_out_margin" in row]

    def train(self, rows: Rows, schedule: Sequence[Sequence[int]]) -> dict[str, float]:
        """All optimizer steps; returns the last one's metrics and the held-out ranking."""
        context, stage = self.context, self.stage
        alarm = BothFallingAlarm(stage.both_falling_alarm, stage.both_falling_window)
        heap = StepHeap()
        for taken in self.steps.history:
            alarm.after(taken)  # told by the run that took the step
        metrics: dict[str, float] = {}
        for step in self.steps.remaining:
            context.check()
            chosen = [rows[i] for i in schedule[step - 1]]
            metrics = self.trainer.call("step", chosen)
            heap.step_done()
            metrics["memory/peak_gb"] = peak_memory_gb()
            text = alarm.after(metrics)
            metrics |= {"alarm/both_falling": 1.0} if alarm.ringing else {}
            if text is not None:
                raise_alarm(context, "both_falling", step, text)
            every = stage.evaluate_every
            if step == len(schedule) or (every and step % every == 0):
                metrics |= self.rank()
            self.steps.done(step, metrics, partial(preference_tensors, chosen))
        self.trainer.finish()
        sizes = {
            "pref/num_rows": float(len(rows)),
            "pref/num_held_out_rows": float(len(self.held_out)),
        }
        ranked = {key: value for key, value in metrics.items() if key.startswith("pref/held_out")}
        context.tracker.log_summary(ranked | sizes)
        return metrics | sizes

    def rank(self) -> dict[str, float]:
        """Held-out accuracy of the policy as it is now, with its 95 % interval."""
        ranking: Ranking = self.trainer.call("rank", self.held_out)
        low, high = wilson(ranking.hits, ranking.total)
        unit = "pair" if ranking.by_pairs else "row"
        return {
            f"pref/held_out_{unit}_accuracy": ranking.hits / ranking.total,
            "pref/held_out_low": low,
            "pref/held_out_high": high,
            "pref/held_out_margin": ranking.gap,
        }


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
