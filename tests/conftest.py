"""Fixtures that all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from posttrain.core.plugin_manager import PluginManager

if TYPE_CHECKING:
    from tests.helpers.services import Services

REPO = Path(__file__).resolve().parents[1]
# So that `from tests.helpers import ...` works however pytest was started.
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

# The first call of a torch kernel can take more than a second.
settings.register_profile("posttrain", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("posttrain")


@pytest.fixture(scope="session")
def manager() -> PluginManager:
    """Every installed plugin, loaded through entry points as in a real run."""
    return PluginManager()


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    """Real PostgreSQL, Prefect, MLflow and a worker, for as long as the tests run."""
    from tests.helpers.services import running_services

    with running_services() as running:
        yield running
