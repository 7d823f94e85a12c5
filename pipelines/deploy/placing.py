"""Where the branches of a sweep run, as somebody asked: here, in a work pool, or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.pipelines.sweep.branches import Sweep
    from posttrain.pipelines.sweep.places import Placement
    from posttrain.pipelines.sweep.sweeping import SweepOptions


def placed(
    home: Path, work_pool: str | None, variables: Mapping[str, object], ray: str | None
) -> Callable[[Sweep, SweepOptions], Placement] | None:
    """What places branches; None for processes of this machine.

    `variables` are those of a work pool's jobs. Raises `ConfigError` for two places at once.
    """
    if work_pool is not None and ray is not None:
        raise ConfigError(
            "a work pool and a Ray cluster are two places for the branches: give one of them"
        )
    if work_pool is None and variables:
        raise ConfigError("job variables are for the jobs of a work pool: name the work pool too")
    if ray is not None:
        from posttrain.pipelines.sweep.nodes import Nodes

        return partial(Nodes, ray)
    if work_pool is None:
        return None
    from posttrain.pipelines.services.shared_servers import (
        require_shared_mlflow,
        require_shared_prefect,
    )

    require_shared_prefect()
    require_shared_mlflow()
    from posttrain.pipelines.run.prefect_env import configure_client

    configure_client(home)

    from posttrain.pipelines.deploy.work_pool import WorkPool  # Prefect takes 2 s to import

    return partial(WorkPool, work_pool, dict(variables))
