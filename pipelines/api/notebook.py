"""The progress of a run in a notebook: one table that is updated in place, and lines below it."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

from posttrain.pipelines.run.progress import READS, describe, duration

EVERY_S = 0.3
"""Between two updates of the table; each is a message to the browser, and stays in the file."""
_BAR = (
    '<div style="width:12em;background:#8883"><div style="width:{:.0%};height:.8em;'
    'background:#4a8"></div></div>'
)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@dataclass
class _Row:
    began: float
    total: int = 0
    step: int = 0
    shown: str = ""
    ended: str = ""


class NotebookReporter(AbstractContextManager["NotebookReporter"]):
    """Shows stages as rows of an HTML table. Safe to call from several threads."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._drawn = 0.0
        self._handle: Any = None  # Any: IPython's, which is not typed

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self._handle = display(HTML(self.page()), display_id=True)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        self._draw(now=True)

    def stage_reached(self, stage: str) -> None:
        self._rows[stage] = _Row(time.monotonic(), shown=READS)
        self._draw(now=True)

    def stage_started(self, stage: str, kind: str, total_steps: int) -> None:
        row = self._rows.setdefault(stage, _Row(time.monotonic()))
        row.total, row.shown = total_steps, ""
        self._draw(now=True)

    def step_done(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        row = self._rows.get(stage)
        if row is not None:
            row.step, row.shown = step, describe(metrics) or row.shown
        self._draw()

    def stage_finished(
        self, stage: str, status: str, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """How it ended, with its final metrics; the bar of a stage that is done is full."""
        row = self._rows.setdefault(stage, _Row(time.monotonic(), 1))
        row.ended, row.shown = f"{status} in {duration(seconds)}", describe(metrics)
        if status not in ("failed", "killed"):
            row.step = row.total = row.total or 1
        self._draw(now=True)

    def say(self, text: str) -> None:
        self._lines.append(html.escape(text))
        self._draw(now=True)

    def warn(self, text: str) -> None:
        self._lines.append(f'<span style="color:#b60">warning: {html.escape(text)}</span>')
        self._draw(now=True)

    def _draw(self, *, now: bool = False) -> None:
        with self._lock:
            if self._handle is None or not (now or time.monotonic() - self._drawn > EVERY_S):
                return
            from IPython.display import HTML

            self._handle.update(HTML(self.page()))  # type: ignore[no-untyped-call]
            self._drawn = time.monotonic()

    def page(self) -> str:
        """The table and the lines as HTML; everything that a run names is escaped."""
        rows = "".join(self._row(name, row) for name, row in list(self._rows.items()))
        lines = "<br>".join(self._lines)
        return f'<table>{rows}</table><div style="font-size:90%">{lines}</div>'

    def _row(self, name: str, row: _Row) -> str:
        state = row.ended or f"{duration(time.monotonic() - row.began)}"
        count = f"{row.step}/{row.total}" if row.total > 1 else ""
        bar = _BAR.format(min(1.0, row.step / row.total) if row.total else 0.0)
        cells = (html.escape(name), bar, count, html.escape(row.shown), html.escape(state))
        return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
