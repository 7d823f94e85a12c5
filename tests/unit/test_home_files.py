"""Every JSON file that a home holds: one of another shape is refused by its name, or ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import posttrain
from posttrain.core.analysis.evidence import step_files, steps_in
from posttrain.core.data.cursor import Cursor, PinnedModel, read_cursor, write_cursor
from posttrain.core.errors import PosttrainError, ResourceError, RunError
from posttrain.core.kit.tiny import make_tiny_model
from posttrain.core.runtime.files import whole_folder, write_text
from posttrain.core.runtime.processes import owner
from posttrain.core.store.ancestry import Family
from posttrain.core.store.approval import (
    APPROVAL_FILE,
    Answer,
    keep_answer,
    kept_answer,
    read_answer,
    write_answer,
)
from posttrain.core.store.artifacts import Artifact, ArtifactStore, StageResult
from posttrain.core.store.locks import locked
from posttrain.core.store.manifests import MANIFEST, tree_digests
from posttrain.core.store.run_record import RECORD, RunRecorder, find_run
from posttrain.core.tracking.journal import Journal, JournalRow, read_journal
from posttrain.core.tracking.registry import TAG_ROLLED_BACK, RegisteredVersion
from posttrain.core.training.checkpoint import (
    SCHEMA_VERSION,
    check_whole,
    complete_checkpoints,
    read_step,
)
from posttrain.core.training.step_record import STEPS, StepRecord, StepRecorder, read_record
from posttrain.pipelines.analysis.past_run import open_record, open_run, read_unchanged
from posttrain.pipelines.api.fork import make_fork
from posttrain.pipelines.rl.recording import TRACKED_FILE, tracked_rows
from posttrain.pipelines.services.layout import Layout, Ports
from posttrain.pipelines.services.processes import find
from tests.helpers.made_runs import RUN, made_run

ANSWER = Answer(True, "ada@host", "reads well", "2026-01-02T03:04:05+00:00", "terminal")
STATE = {
    "version": SCHEMA_VERSION,
    "step": 3,
    "parts": {"kl": {"coef": 0.5}},
    "history": [{"step": 1.0}],
    "optimizers": {".": {"step_count": 3, "precision": "float32", "sha256": {}}},
    "reference": {},
}
STEP = StepRecord(3, {"mask": "ab"}, {"policy/0": "cd"}, {"mask": [1, 2]}, {"lr": 0.1})


@dataclass(frozen=True, slots=True)
class Kept:
    """A file, how it is written, and what reads it; `lines`: each line is JSON of its own."""

    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    lines: bool = False
    ignored: bool = False


def write_stage(home: Path) -> None:
    store = ArtifactStore(home)
    partial = store.begin("sft")
    (partial / "model").mkdir()
    artifact = Artifact("model", str(partial / "model"), "d" * 64, "sft", parents=("p",))
    result = StageResult("sft", "sft", "ran", (artifact,), {"sft/loss": 1.0}, 2.0)
    store.commit(partial, result, "a" * 64, {"steps": "3"}, {})


def read_stage(home: Path) -> object:
    """What `run`, `plan` and `blame` read; a damaged stage is a miss, and its reason is shown."""
    store = ArtifactStore(home)
    found, reason = store.lookup("sft", "a" * 64)
    store.previous_parts("sft")
    Family(home)
    if found is None:
        raise PosttrainError(reason)
    return found


def write_state(home: Path) -> None:
    (home / "step-000003").mkdir()
    (home / "step-000003" / "state.json").write_text(json.dumps(STATE))


def read_state(home: Path) -> object:
    check_whole(home / "step-000003")
    return read_step(home / "step-000003")


def write_rounds(home: Path) -> None:
    cursor = Cursor(1, frozenset({"a"})).begin(["b"], PinnedModel("p", "d", "m", "r"))
    write_cursor(home / "cursor.json", cursor)


def write_journal(home: Path) -> None:
    journal = Journal(home / "metrics-rl.jsonl")
    for step in (1, 2):
        journal.append(JournalRow(step, 5, {"lr": 0.1}))


def write_steps(home: Path) -> None:
    recorder = StepRecorder(home, every=1, values=False, environment={"a": "b"}, keep_through=0)
    with (recorder.folder / STEPS).open("a") as stream:
        row = {k: v for k, v in asdict(STEP).items() if k != "environment"}
        stream.write(f"{json.dumps(row)}\n")


def write_service(home: Path) -> None:
    kept = {"pid": os.getpid(), "started": psutil.Process().create_time(), "by": owner()}
    (home / "prefect.json").write_text(json.dumps(kept))


def write_ports(home: Path) -> None:
    Layout(home).prepare()
    Layout(home).keep_ports(Ports())


KEPT = {
    "manifest": Kept(f"sft-{'a' * 16}/{MANIFEST}", write_stage, read_stage),
    "run record": Kept(
        f"runs/r1/{RECORD}",
        lambda home: RunRecorder(home, "r1", "n", "2026", "").stage("sft", "a"),
        lambda home: find_run(home, "r1"),
    ),
    "cursor": Kept("cursor.json", write_rounds, lambda home: read_cursor(home / "cursor.json")),
    "checkpoint": Kept("step-000003/state.json", write_state, read_state),
    "gate": Kept(
        "gate-k.json",
        lambda home: keep_answer(home, "gate", "k", ANSWER),
        lambda home: kept_answer(home, "gate", "k"),
    ),
    "approval": Kept(APPROVAL_FILE, lambda home: write_answer(home, ANSWER, {}), read_answer),
    "journal": Kept(
        "metrics-rl.jsonl",
        write_journal,
        lambda home: read_journal(home / "metrics-rl.jsonl"),
        lines=True,
    ),
    "steps": Kept(STEPS, write_steps, read_record, lines=True),
    "ports": Kept("services/ports.json", write_ports, lambda home: Layout(home).ports()),
    "service": Kept("prefect.json", write_service, lambda home: find(home / "prefect.json")),
    "tracked answers": Kept(
        TRACKED_FILE,
        lambda home: (home / TRACKED_FILE).write_text(json.dumps({"0": []})),
        lambda home: tracked_rows(home, 1, []),
        ignored=True,
    ),
}


def mutations(value: Any) -> list[Any]:
    """`value` with each of its parts gone or of another type, wherever it is."""
    found: list[Any] = []
    if isinstance(value, dict):
        for key, part in value.items():
            found += [{**value, key: other} for other in mutations(part)]
            found.append({k: v for k, v in value.items() if k != key})
    elif isinstance(value, list) and value:
        found += [[other, *value[1:]] for other in mutations(value[0])]
    return [
        *found,
        *(o for o in (None, 7, "text", [[1]], {"x": [1]}) if type(o) is not type(value)),
    ]


WHOLE = {
    "empty": b"",
    "cut": b'{"step": 1, "ver',
    "not UTF-8": b'{"step": "\xff\xfe\xfa"}',
    "UTF-16": '{"step": 1}'.encode("utf-16"),
    "zeros": b"\0" * 64,
    "deep": b"[" * 100_000,
    "number": b"3",
    "text": b'"x"',
    "list": b"[]",
    "null": b"null",
    "object": b"{}",
    "long number": b"1" * 5000,
}


def outcome(kept: Kept, home: Path) -> str:
    """Nothing, or what was refused; any other error than ours fails the test."""
    try:
        kept.read(home)
    except PosttrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", KEPT)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    KEPT[name].write(tmp_path)
    assert outcome(KEPT[name], tmp_path) == ""


@pytest.mark.parametrize("damage", [*WHOLE, "a folder"])
@pytest.mark.parametrize("name", KEPT)
def test_a_file_that_is_no_such_file_is_refused_by_name(
    name: str, damage: str, tmp_path: Path
) -> None:
    kept = KEPT[name]
    kept.write(tmp_path)
    path = tmp_path / kept.file
    path.unlink()
    if damage == "a folder":
        path.mkdir()
        if name in ("manifest", "steps", "checkpoint"):  # there is no such file then
            outcome(kept, tmp_path)
            return
    else:
        path.write_bytes(WHOLE[damage] + b"\n" * (kept.lines and damage != "empty"))
    refused = outcome(kept, tmp_path)
    expected = not (kept.lines and damage == "empty")
    expected = expected and (not kept.ignored or damage == "a folder")
    named = path.name in refused or path.parent.name in refused
    assert named if expected else not refused, refused


@pytest.mark.parametrize("name", KEPT)
def test_parts_of_another_type_are_refused_by_the_files_name(name: str, tmp_path: Path) -> None:
    kept = KEPT[name]
    kept.write(tmp_path)
    path = tmp_path / kept.file
    text = path.read_text("utf-8")
    *before, last = text.splitlines() if kept.lines else [text]
    changes = mutations(json.loads(last))
    refusals = []
    for changed in changes:
        path.write_text("".join(f"{line}\n" for line in (*before, json.dumps(changed))))
        refused = outcome(kept, tmp_path)
        assert not refused or str(path.parent) in refused, (changed, refused)
        refusals.append(bool(refused))
    # What a part of a plugin holds, or an optional answer, may be anything.
    assert kept.ignored or sum(refusals) > len(changes) / 2


def test_the_last_line_of_a_journal_may_be_cut_and_no_other(tmp_path: Path) -> None:
    write_journal(tmp_path)
    path = tmp_path / "metrics-rl.jsonl"
    whole = path.read_text()
    path.write_text(f'{whole}{{"step": 3, "ti')
    assert [row.step for row in read_journal(path)] == [1, 2]
    first, second = whole.splitlines()
    path.write_text(f"{first[:-4]}\n{second}\n")
    with pytest.raises(PosttrainError, match=r"metrics-rl\.jsonl:1 is not what a run wrote"):
        read_journal(path)


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda path: path.write_text(path.read_text()[:-400]), "was changed after the run wrote"),
        (lambda path: path.write_text(""), "was changed after the run wrote"),
        (lambda path: path.unlink(), "cannot be read: .*config.yaml: No such file"),
    ],
)
def test_nothing_is_computed_under_a_config_that_is_not_the_runs(
    tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    (tmp_path / "model").mkdir()
    home, store = tmp_path / "home", tmp_path / "home" / "artifacts"
    made_run(home, tmp_path / "model")
    assert open_record(RUN, home, store).resolved.config.name == "tiny"
    damage(find_run(home, RUN).config)
    for opened in (open_record, open_run):
        with pytest.raises(ResourceError, match=says):
            opened(RUN, home, store)
    with pytest.raises(ResourceError, match=says):
        make_fork(RUN, home, step=1, stage="rl", overrides=[])


def test_evidence_that_was_removed_is_missed(tmp_path: Path) -> None:
    """A summary of the steps that are left would pass for one of the run."""
    (tmp_path / "model").mkdir()
    home, store = tmp_path / "home", ArtifactStore(tmp_path / "home" / "artifacts")
    record, identity = made_run(home, tmp_path / "model"), "e" * 64
    partial = store.begin("rl")
    (partial / "evidence").mkdir()
    for step in (1, 2):
        for path in step_files(partial / "evidence", step):
            path.write_text(path.name)
    done = StageResult("rl", "rl", "ran", (), {}, 1.0)
    store.commit(partial, done, identity, {}, tree_digests(partial))
    record.stage("rl", identity)
    for path in step_files(store.folder("rl", identity) / "evidence", 2):
        path.unlink()
    found = open_record(RUN, home, store.root).evidence("rl")
    assert found.steps == (1, 2)
    with pytest.raises(
        RunError, match=r"evidence of step 2 was changed after the run: .*step-0000"
    ):
        read_unchanged(found, 2)


def test_other_names_in_a_folder_of_steps_are_no_steps(tmp_path: Path) -> None:
    write_state(tmp_path)
    for name in ("step-old", "step-", "step-1e9", "step-000003.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
        (tmp_path / f"{name}.safetensors").write_text("")
    assert complete_checkpoints(tmp_path) == [tmp_path / "step-000003"]
    assert steps_in(tmp_path) == []


def test_a_lock_file_with_anything_in_it_is_a_lock_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"\xff\xfe" * 40)
    with locked(path):
        path.write_bytes(b"\xff\xfe" * 40)
        said: list[str] = []

        class GivenUp(Exception):
            """Ends the wait."""

        def check() -> None:
            raise GivenUp

        with pytest.raises(GivenUp), locked(path, waits=said.append, check=check):
            raise AssertionError("two hold it")
        assert len(said) == 1


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"by": 3}', "[" * 100_000])
def test_a_tag_that_was_changed_in_mlflow_is_named(text: str) -> None:
    tags = {TAG_ROLLED_BACK: text}
    found = RegisteredVersion("sums", "2", "d", Path(), "", "", tags)
    with pytest.raises(ResourceError, match=rf"tag '{TAG_ROLLED_BACK}' of 'sums' version 2 is not"):
        assert found.rolled_back
    assert RegisteredVersion("sums", "2", "d", Path(), "", "", {}).rolled_back is None


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "cache" / "made"
    with pytest.raises(OSError, match="full"), whole_folder(final) as partial:
        (partial / "first").write_text("1")
        raise OSError("the disk is full")
    assert list(final.parent.iterdir()) == [], "nothing of it is left"
    with whole_folder(final) as partial:
        (partial / "first").write_text("1")
        assert not final.exists()
    assert [path.name for path in final.parent.iterdir()] == ["made"]
    assert (final / "first").read_text() == "1"


def test_a_link_from_a_file_system_to_another_stays(tmp_path: Path) -> None:
    """As /dev/stdout is one, in a command whose output goes to a file."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system")
    (tmp_path / "file").write_text("old")
    link = shared / f"posttrain-test-{os.getpid()}"
    link.symlink_to(tmp_path / "file")
    try:
        write_text(link, "new")
        assert link.is_symlink() and (tmp_path / "file").read_text() == "new"
    finally:
        link.unlink()


def test_a_device_or_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    """Root may rename a file over /dev/null: pages go where `--out` says."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"):
        write_text(pipe, "nobody reads")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    link.symlink_to(pipe)
    for path in (pipe, link):
        write_text(path, "text")
        assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo() and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_loaded_run_has_its_warnings_without_credentials(tmp_path: Path) -> None:
    recorder = made_run(tmp_path, make_tiny_model(tmp_path / "tiny"))
    assert posttrain.load(RUN, home=tmp_path).warnings == ()
    recorder.warn("sft: http://user:s3cr3t-Hunter2@host is away")
    recorder.stage("rm", "a" * 64)
    loaded = posttrain.load(RUN, home=tmp_path)
    assert loaded.warnings == ("sft: http://***@host is away",)
    record = recorder.folder / RECORD
    row = json.loads(record.read_text())
    del row["warnings"]  # of a version that did not keep them
    record.write_text(json.dumps(row))
    assert posttrain.load(RUN, home=tmp_path).warnings == ()
