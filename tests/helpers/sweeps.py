"""What the runs of a sweep have made, to compare sweeps that ran in different places."""

from __future__ import annotations

from pathlib import Path

from posttrain.core.store.artifacts import ArtifactStore
from posttrain.core.store.run_record import find_run


def made(home: Path, run_id: str) -> list[str]:
    """The stages of a run and the digests of what each has made; reports, with times, are not."""
    store, found = ArtifactStore(home / "artifacts"), []
    for stage, identity in find_run(home, run_id).stages.items():
        result, why = store.lookup(stage, identity)
        assert result is not None, why
        found += [
            f"{stage} {one.kind} {one.digest}" for one in result.artifacts if one.kind != "report"
        ]
    return found
