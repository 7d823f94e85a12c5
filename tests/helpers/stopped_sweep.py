"""Runs a sweep in a work pool whose judge stops one variant: `python -m` this CONFIG HOME POOL."""

from __future__ import annotations

import sys
from pathlib import Path

from posttrain.pipelines.run.prefect_env import configure_client
from posttrain.pipelines.sweep.branches import Branch, sweep_of
from posttrain.pipelines.sweep.driver import Driver
from posttrain.pipelines.sweep.record import SweepRecord
from posttrain.pipelines.sweep.sweeping import SweepOptions

STOPPED = "faster"


class StopsIt:
    """A variant of the tiny model is hardly ever surely behind, so this one is said to be."""

    def seen(self, record: SweepRecord, branch: Branch, stage: str, step: int) -> str:
        """As in `Judge`."""
        return f"stopped at step {step}" if branch.variant == STOPPED and step > 0 else ""


def main() -> None:
    """Print the record."""
    config, home, pool = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    configure_client(home)
    from posttrain.pipelines.deploy.work_pool import WorkPool

    sweep, store = sweep_of([config], [], home=home), home / "artifacts"
    placement = WorkPool(pool, {}, sweep, SweepOptions(home, store))
    driver = Driver(sweep, home, store, str(store), placement, judge=StopsIt())
    try:
        driver.run(sweep.branches)
    finally:
        driver.close()
    print(driver.record.model_dump_json())


if __name__ == "__main__":
    main()
