"""Runs with a gate and a promotion, of tiny models that are good or bad by the steps they train."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from posttrain.core.kit.tiny import BARE_TEMPLATE, make_tiny_model, make_tiny_tokenizer
from tests.helpers.pipeline import COMMAND, environment

BAD, ALSO_BAD, GOOD = 1, 2, 60
"""Steps of supervised learning after which a tiny model says no digit right, or nearly all."""


def digit_model(folder: Path) -> Path:
    """A random model that reads digits."""
    tokenizer = make_tiny_tokenizer("0123456789", BARE_TEMPLATE)
    return make_tiny_model(folder, tokenizer=tokenizer)


def common(model: str) -> dict[str, Any]:
    """What every config here has."""
    return {
        "name": "tiny",
        "engine": "transformers",
        "model": {"source": model, "dtype": "float32", "max_model_len": 64},
        "task": {"name": "digits", "places": 2, "repeats": 1, "held_out_permille": 400},
        "evaluation": {"num_problems": 32, "max_response_length": 2, "num_samples": 0},
        "limits": {"num_threads": 1},
    }


def gated_config(model_dir: Path, steps: int = BAD) -> dict[str, Any]:
    """Two evaluations, a gate between them and the promotion."""
    after = {"model": "sft", "evaluation": "after", "baseline": "before"}
    return common(str(model_dir)) | {
        "stages": {
            "before": {"kind": "evaluate", "inputs": {"model": "base"}},
            "sft": sft_stage(steps) | {"inputs": {"model": "base"}},
            "after": {"kind": "evaluate", "inputs": {"model": "sft"}},
            "gate": {"kind": "approve", "inputs": after, "samples": 2},
            "promote": {
                "kind": "promote",
                "inputs": {"model": "gate", "evaluation": "after"},
                "registered_name": "tiny",
            },
        },
    }


def sft_stage(steps: int) -> dict[str, Any]:
    """Supervised learning at a rate that a tiny model bears."""
    optimizer = {"learning_rate": 5.0e-3}
    return {"kind": "sft", "steps": steps, "batch_size": 16, "optimizer": optimizer}


def at_a_terminal(
    arguments: list[str], typed: dict[str, str], timeout: float = 200
) -> tuple[int, str]:
    """Run the command on a terminal, type an answer when its question is seen; code and screen."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment() | {"TERM": "xterm", "COLUMNS": "200"},
        start_new_session=True,
    )
    os.close(slave)
    screen, waiting, ends = b"", dict(typed), time.monotonic() + timeout
    while time.monotonic() < ends:
        readable, _, _ = select.select([master], [], [], 0.5)
        if readable:
            try:
                screen += os.read(master, 65536)
            except OSError:  # the other end was closed: the process has ended
                break
        elif process.poll() is not None:
            break
        for question in [q for q in waiting if q.encode() in screen]:
            os.write(master, f"{waiting.pop(question)}\n".encode())
    else:
        process.kill()
    os.close(master)
    return process.wait(timeout=30), screen.decode(errors="replace")
