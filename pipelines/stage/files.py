"""A stage's files in addition to its artifact: checkpoints, and the record of its steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from posttrain.core.analysis import evidence
from posttrain.core.config.rl_stage import TRAINING_KINDS
from posttrain.core.config.sections import KeepSection
from posttrain.core.rollout import episode_log
from posttrain.core.store.mirror import Mirror
from posttrain.core.training import step_record
from posttrain.core.training.checkpoint import newest_whole, read_step, settle
from posttrain.core.training.remote_checkpoints import RemoteCheckpoints
from posttrain.core.training.step_record import StepRecorder

OWN_ANSWERS = "own_answers.json"
"""Pairs that a stage made of its model's answers, kept next to its checkpoints."""


def checkpoint_folder(home: Path, stage: str, identity: str) -> Path:
    """Where a stage of this identity has them."""
    return home / "checkpoints" / f"{stage}-{identity[:16]}"


class StageFiles:
    """The folder of one stage; `warn` receives the text of a damaged checkpoint that is passed
    over.
    """

    def __init__(
        self,
        root: Path,
        keep: KeepSection,
        warn: Callable[[str], None],
        mirror: Mirror | None = None,
    ) -> None:
        self.root, self.keep, self._warn = root, keep, warn
        self._remote: RemoteCheckpoints | None = None
        if mirror is not None:
            self._remote = RemoteCheckpoints(mirror, root, keep.checkpoints, warn)

    def forget(self) -> None:
        """Remove what an interrupted run left: the stage starts again."""
        if self._remote is not None:
            self._remote.forget()
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if path.name == "kept":
                continue  # of a run that is done
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

    def resume_from(self) -> Path | None:
        """The checkpoint to go on from, if there is one; raises `RunError` if all are damaged.

        One that another machine pushed to a store with a URL is fetched if it is newer.
        """
        if self._remote is not None:
            self._remote.bring()
        return newest_whole(self.root, self._warn)

    def push(self, checkpoint: Path) -> None:
        """Give a new checkpoint to a store with a URL, in the background."""
        if self._remote is not None:
            self._remote.push(checkpoint)

    def recorder(self, found: Path | None, environment: Mapping[str, str]) -> StepRecorder | None:
        """Records the steps that come after `found`, unless the run wants none."""
        if not self.keep.records:
            return None
        return StepRecorder(
            self.root / step_record.FOLDER,
            every=self.keep.records,
            values=self.keep.values,
            environment=environment,
            keep_through=0 if found is None else read_step(found),
        )

    def evidence(self, found: Path | None) -> evidence.EvidenceKeeper | None:
        """Keeps the evidence of steps that come after `found`, unless the run wants none."""
        if not self.keep.evidence_mb:
            return None
        behind = 0 if found is None else read_step(found)
        folder, size = self.root / evidence.FOLDER, self.keep.evidence_mb * 1e6
        return evidence.EvidenceKeeper(folder, size, behind)

    def hand_over(self, out: Path) -> None:
        """Copy record and evidence of steps into the stage's own folder; a kill may still come."""
        if evidence.steps_in(self.root / evidence.FOLDER):
            shutil.copytree(self.root / evidence.FOLDER, out / evidence.FOLDER)
        record = self.root / step_record.FOLDER
        if (record / step_record.STEPS).is_file() and step_record.read_record(record):
            shutil.copytree(record, out / step_record.FOLDER)
        if (self.root / episode_log.FOLDER).is_dir():
            shutil.copytree(self.root / episode_log.FOLDER, out / episode_log.FOLDER)

    def settle(self) -> None:
        """The stage is done: only what a replay starts from stays."""
        settle(self.root, self.keep, extra=(OWN_ANSWERS,))
        if self._remote is not None:
            self._remote.forget()


@contextmanager
def kept_evidence(
    files: StageFiles, found: Path | None, kind: str
) -> Iterator[evidence.EvidenceKeeper | None]:
    """What keeps the evidence of a stage's steps while it runs, if it trains."""
    keeper = files.evidence(found) if kind in TRAINING_KINDS else None
    try:
        yield keeper
    finally:
        if keeper is not None:
            keeper.close()
