"""Progress as lines of a log: what a deployed run shows in Prefect."""

from __future__ import annotations

import logging

from rich.console import Console

from posttrain.pipelines.progress import PlainReporter


class LogReporter(PlainReporter):
    """The lines of `PlainReporter`, written to a logger. Safe to call from several threads."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> None:
        super().__init__(Console(quiet=True))
        self._logger = logger

    def _line(self, text: str) -> None:
        self._logger.info(text)

    def warn(self, text: str) -> None:
        self._logger.warning(text)
