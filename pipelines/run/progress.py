"""What a run shows while it goes on: live bars, plain lines, a log file, Prefect."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from posttrain.core.runtime.reporter import Reporter

# Metric keys worth a person's glance: key -> (label, format).
SHOWN: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", "{:.3f}"),
    "acc/mean": ("accuracy", "{:.1%}"),
    "eval/greedy_accuracy": ("held-out", "{:.1%}"),
    "distil/rollout_kl": ("KL to teacher", "{:.3f}"),
    "sft/loss": ("loss", "{:.4f}"),
    "sft/held_out_loss": ("held-out loss", "{:.4f}"),
    "rm/pair_accuracy": ("pairs right", "{:.1%}"),
    "rm/held_out_pair_accuracy": ("held-out pairs", "{:.1%}"),
    "rewards/accuracy": ("pairs right", "{:.1%}"),
    "pref/held_out_pair_accuracy": ("held-out pairs", "{:.1%}"),
    "prm/step_accuracy": ("steps right", "{:.1%}"),
    "prm/held_out_step_accuracy": ("held-out steps", "{:.1%}"),
    "loss/preference": ("loss", "{:.4f}"),
    "loss/process_reward": ("loss", "{:.4f}"),
    "loss/total": ("loss", "{:.4f}"),
    "throughput/rollout_tokens_per_s": ("tokens/s", "{:.0f}"),
}
READS = "reads its inputs"
MAX_LINES = 50
"""A stage of more steps than this prints every n-th of them in a plain log."""


def describe(metrics: Mapping[str, float]) -> str:
    """The shown metrics among `metrics` as `label value`, two blanks apart; a label comes once."""
    parts: dict[str, str] = {}
    for key, (label, form) in SHOWN.items():
        if key in metrics and label not in parts:
            parts[label] = f"{label} {form.format(metrics[key])}"
    return "  ".join(parts.values())


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class PlainReporter(AbstractContextManager["PlainReporter"]):
    """One line per step, at most about `MAX_LINES` a stage. Safe to call from several threads."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}
        self._began: dict[str, float] = {}
        self._first: dict[str, int] = {}

    def __exit__(self, *_: object) -> None: ...

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing else is printed meanwhile."""
        with self._lock:
            yield

    def _line(self, text: str) -> None:
        with self._lock:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage_reached(self, stage: str) -> None:
        self._line(f"[{stage}] {READS}")

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        self._totals[stage], self._began[stage] = total_steps, time.monotonic()
        self._first.pop(stage, None)
        steps = f", {total_steps} steps" if total_steps else ""
        self._line(f"[{stage}] started ({kind}{steps})")

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of the step and the time left, when it is this step's turn."""
        total = self._totals.get(stage, 0)
        if stage not in self._first:  # a resumed stage does not start at 1
            self._first[stage], self._began[stage] = step, time.monotonic()
        first = self._first[stage]
        every = -(-total // MAX_LINES) or 1
        if step % every and step not in (first, total):
            return
        parts = [f"[{stage}] step {step}/{total}" if total else f"[{stage}] step {step}"]
        parts += [text for text in [describe(metrics)] if text]
        if first < step < total:
            spent = time.monotonic() - self._began[stage]
            parts.append(f"left {duration(spent / (step - first) * (total - step))}")
        self._line("  ".join(parts))

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        shown = describe(metrics)
        self._line(f"[{stage}] {status} in {duration(seconds)}" + (f"  {shown}" if shown else ""))

    def say(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")


class RichReporter(AbstractContextManager["RichReporter"]):
    """A live list of stages, each with a bar over its steps, its metrics and the time left."""

    def __init__(self, console: Console) -> None:
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.fields[stage]}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}", markup=False, style="cyan"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            # Steps may take a minute each: the default of 30 s would never see two of them.
            speed_estimate_period=1800,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The live list is taken away meanwhile."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def _task(self, stage: str, total: int | None = None) -> TaskID:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, stage=stage, shown="")
        return self._tasks[stage]

    def stage_reached(self, stage: str) -> None:
        self._progress.update(self._task(stage), shown=READS)

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        task = self._task(stage)
        self._progress.update(task, total=total_steps or None, shown="")

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        task = self._task(stage)
        self._progress.update(task, completed=step)
        if text := describe(metrics):
            self._progress.update(task, shown=text)

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Fill the bar unless the stage failed or was killed, and show how it ended."""
        task = self._task(stage, 1)
        shown = f"{status} in {duration(seconds)}  {describe(metrics)}".rstrip()
        if status in ("failed", "killed"):
            self._progress.stop_task(task)
            self._progress.update(task, shown=shown)
            return
        total = next(t.total for t in self._progress.tasks if t.id == task) or 1
        self._progress.update(task, total=total, completed=total, shown=shown)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        self._progress.console.print(f"warning: {text}", style="yellow", markup=False)


def make_reporter(*, json: bool, plain: bool) -> PlainReporter | RichReporter:
    """Live on a terminal, plain lines elsewhere or on request; stderr when stdout is for JSON."""
    console = Console(stderr=json)
    return RichReporter(console) if console.is_terminal and not plain else PlainReporter(console)


class LogReporter(PlainReporter):
    """The lines of `PlainReporter`, written to a logger. Safe to call from several threads."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
        super().__init__(Console(quiet=True))
        self._logger = logger

    def _line(self, text: str) -> None:
        self._logger.info(text)

    def warn(self, text: str) -> None:
        self._logger.warning(text)


class Reporters:
    """Tells each of `each`, in order."""

    def __init__(self, each: Sequence[Reporter]) -> None:
        self.each = list(each)

    def stage_reached(self, stage: str) -> None:
        for one in self.each:
            one.stage_reached(stage)

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        for one in self.each:
            one.stage_started(stage, kind, total_steps)

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        for one in self.each:
            one.step_done(stage, step, metrics)

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        for one in self.each:
            one.stage_finished(stage, status, seconds, metrics)

    def say(self, text: str) -> None:
        for one in self.each:
            one.say(text)

    def warn(self, text: str) -> None:
        for one in self.each:
            one.warn(text)


class FileReporter(LogReporter):
    """Lines with their time, appended to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        logger = logging.Logger(f"posttrain.log.{path.stem}")  # of its own: of no other's tree
        logger.addHandler(self._handler)
        super().__init__(logger)

    def close(self) -> None:
        self._handler.close()
