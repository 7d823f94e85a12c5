"""Libraries that would talk between our own lines."""

from __future__ import annotations

import logging

import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars

from posttrain.core.redaction import redact_logs


def quiet_libraries() -> None:
    """Our own progress display is the only one: libraries' bars and notices would break it up."""
    disable_progress_bars()
    redact_logs()
    # Prefect's sender of logs writes to stderr itself when its server cannot store them (a full
    # disk), after the run's own last line. Python advises the switch for what users run.
    logging.raiseExceptions = False
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
