"""Every installed plugin, as test parameters and ready-built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config.schema import BUILT_IN
from posttrain.core.contracts import CONTRACTS
from posttrain.core.plugin_manager import PluginEntry, PluginManager

MANAGER = PluginManager()
TERMINAL_TASKS = Path(__file__).resolve().parents[2] / "examples" / "terminal_tasks"

# Fields of plugins that have no useful default.
REQUIRED: dict[tuple[str, str], dict[str, object]] = {
    ("aggregator", "seq-mean-token-sum-norm"): {"norm_length": 8},
    ("environment", "openenv"): {"url": "http://127.0.0.1:9"},
    ("environment", "mcp"): {"servers": [{"command": ["no-such-server"]}]},
    ("reward", "llm_judge"): {
        "base_url": "http://127.0.0.1:9/v1",  # nobody listens on the discard port
        "model": "none",
        "cache": None,
        "max_retries": 0,
    },
    ("task", "jsonl"): {"path": "problems.jsonl"},
    ("environment", "agent"): {"command": ["agent"]},
    ("task", "verifiers"): {"python": "python", "taskset": "sums"},
    ("tool", "search"): {"path": "texts"},
    ("task", "parquet"): {"path": "problems.parquet"},
    ("task", "terminal"): {"path": str(TERMINAL_TASKS)},
    ("task", "rows"): {"path": "problems.jsonl"},
    ("task", "gsm8k"): {"path": "gsm8k"},
    ("task", "hub"): {"dataset": "somebody/something"},
    **{("stage", kind): {"kind": kind} for kind in BUILT_IN},
    ("stage", "benchmark"): {"kind": "benchmark", "suites": ["lm_eval:arc_easy"]},
}


def of_kind(*kinds: str) -> list[Any]:
    """Installed plugins of these kinds (all when none is named), as test parameters."""
    return [
        pytest.param(entry, id=f"{entry.kind}-{entry.name}")
        for entry in MANAGER.entries()
        if not kinds or entry.kind in kinds
    ]


def build(entry: PluginEntry) -> Any:
    fields = REQUIRED.get((entry.kind, entry.name))
    return MANAGER.build(CONTRACTS[entry.kind], entry.name, fields)
