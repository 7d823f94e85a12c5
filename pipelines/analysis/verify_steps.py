"""`verify`, of one stage's steps: its records with one another, steps computed again, rewards
scored again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from posttrain.core.analysis.evidence import FOLDER as EVIDENCE
from posttrain.core.analysis.evidence import StepEvidence, read_step, steps_in
from posttrain.core.analysis.report import listed
from posttrain.core.analysis.rescoring import TOLERANCE
from posttrain.core.config.rl_stage import RL_KINDS, RlStage
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.rewards.checking import is_failure
from posttrain.core.rewards.scoring import Scorer, asked_of, score_samples, shaped_sum
from posttrain.core.runtime.reporter import Reporter
from posttrain.core.store.attestation import Check
from posttrain.core.training.digests import block_digests, tensor_digest
from posttrain.core.training.step_record import (
    POLICY,
    StepRecord,
    example_tensors,
    rollout_tensors,
    values_path,
)
from posttrain.core.types import Score
from posttrain.pipelines.analysis.past_run import PastRun
from posttrain.pipelines.analysis.replay import CHANGED, Replay
from posttrain.pipelines.analysis.replay_comparison import (
    ComparedStep,
    Difference,
    StepSource,
)
from posttrain.pipelines.analysis.verify_stage import StageFiles, shown_steps
from posttrain.pipelines.rl.scorer import build_scorer

EXACT, CLOSE, APART = "exact", "close", "apart"
CLASSES = {
    EXACT: "bit for bit",
    CLOSE: "same tokens, masks and rewards; log-probs within 0.01, other numbers within 1 %",
    APART: "further apart than that",
}
_WHOLE = {"prompt_ids", "response_ids", "response_mask", "policy_version", "mask", "token_ids"}
_WHOLE |= {"lengths", "labels", "rewards"}
FINAL = "weights after the last step"
_LOGPROBS, _SHARE = 0.01, 0.01
Kept = tuple[str, Mapping[str, Tensor]]
"""The name of a file, and the tensors in it that were recorded."""
_OF_MACHINE = ("torch", "transformers", "processor", "device", "precision", "CPU threads")


# --- the records with one another ----------------------------------------------------------------


def check_record(stage: StageFiles, source: StepSource) -> Check:
    """The kept tensors and the evidence of each step, with the digests of the step's line."""
    problems, looked = [], 0
    evidence = stage.folder / EVIDENCE
    with_evidence = set(steps_in(evidence))
    for step, record in source.recorded.items():
        try:
            path = values_path(source.folder, step)
            kept: list[Kept] = [(path.name, load_file(path))] if path.is_file() else []
            if step in with_evidence:
                kept.append(_of_evidence(evidence, step, stage.made.kind, record))
        except (PosttrainError, SafetensorError, OSError) as error:
            problems.append(f"step {step}: {error}")
            continue
        for where, tensors in kept:
            looked += len(tensors)
            differing = [n for n, t in tensors.items() if tensor_digest(t) != record.batch.get(n)]
            problems += [f"step {step}: {name} in {where} is not {step}'s" for name in differing]
    what = f"record of {len(source.recorded)} steps"
    how = f"digest of {looked} kept tensors, with each step's line"
    return stage.check(what, how, problems, "" if looked else "no tensors were kept (keep.values)")


def _of_evidence(folder: Path, step: int, kind: str, record: StepRecord) -> Kept:
    """The step's file of evidence."""
    batch = read_step(folder, step).batch
    if kind in RL_KINDS:
        tensors = rollout_tensors(batch)
    else:  # of pairs other tensors are recorded; the files' own digests are checked for all
        tensors = {n: t for n, t in example_tensors(batch).items() if n in record.batch}
    return f"evidence/step-{step:06d}.safetensors", tensors


def check_final_weights(stage: StageFiles, source: StepSource) -> Check | None:
    """The saved model with the digests that the last step recorded; None where it has no such."""
    record = source.recorded.get(source.last_step)
    if record is None or not record.weights:
        return None
    what = FINAL
    if source.model is None:
        why = "the weights are sharded or were merged with an adapter before they were saved"
        return stage.not_checked(what, "digests of the last step", why)
    try:
        with safe_open(source.model, framework="pt") as stored:
            names = [n for n in record.weights if n.removeprefix(f"{POLICY}/") in stored.keys()]
            saved = {name: stored.get_tensor(name.removeprefix(f"{POLICY}/")) for name in names}
    except (SafetensorError, OSError) as error:
        problem = f"{source.model.name} cannot be read: {error}"
        return stage.check(what, "digests of the last step", [problem])
    if any(str(t.dtype) != "torch.float32" for t in saved.values()):
        why = "the saved weights are rounded, the record is of the float32 masters"
        return stage.not_checked(what, "digests of the last step", why)
    found = block_digests(saved, source.last_step)
    total = sum(tensor.numel() for tensor in saved.values())
    read = sum(min(tensor.numel(), 16_384) for tensor in saved.values())
    how = f"digests of step {source.last_step}, which cover {100 * read / max(1, total):.0f} %"
    problems = [
        f"{name} is not as recorded" for name in names if found[name] != record.weights[name]
    ]
    return stage.check(what, how, problems, "" if names else "no recorded weight is in the model")


# --- steps computed again ------------------------------------------------------------------------


@dataclass
class Recomputed:
    """How the drawn steps of a stage came out; `reached` is the class, empty where none was."""

    check: Check
    reached: str = ""
    compared: list[int] = field(default_factory=list)


def recompute(stage: StageFiles, run: PastRun, steps: list[int], reporter: Reporter) -> Recomputed:
    """Compute the drawn steps again from the real inputs, with all recorded ones on the way."""
    name, compared, notes = stage.made.stage, dict[int, ComparedStep](), list[str]()
    how = f"{shown_steps(steps)} computed again and compared, tensor by tensor"
    waiting, source = sorted(steps), None
    try:
        while waiting:
            replay = Replay(run, reporter)
            result = replay.step(waiting[-1], name)
            compared |= {one.step: one for one in result.steps}
            notes += [note for note in result.notes if note not in notes]
            waiting = [step for step in waiting if step <= result.from_step]
            source = replay.source
    except RunError as error:
        return Recomputed(stage.check(_what(steps), how, [str(error)]))
    except PosttrainError as error:
        return Recomputed(stage.not_checked(_what(steps), how, str(error)))
    assert source is not None
    return judge(stage, source, steps, [compared[step] for step in sorted(compared)], notes, how)


def check_by_last_step(stage: StageFiles, source: StepSource, done: Recomputed) -> Check | None:
    """The saved model, if the last step was computed again and equal in all that was compared."""
    last = source.last_step
    if source.model is None or last not in done.compared or done.reached != EXACT:
        return None
    return stage.check(FINAL, f"every value, with those of step {last} computed again", [])


def _what(steps: Sequence[int]) -> str:
    return f"{len(steps)} step{'s' if len(steps) != 1 else ''} recomputed"


def judge(
    stage: StageFiles,
    source: StepSource,
    steps: list[int],
    compared: list[ComparedStep],
    notes: list[str],
    how: str,
) -> Recomputed:
    elsewhere = _machine(notes)
    seen = [one.step for one in compared]
    reached = EXACT
    for one in compared:
        record = source.recorded[one.step]
        reached = max(reached, class_of(one, record), key=list(CLASSES).index)
    differences = [difference for one in compared for difference in one.differences]
    how += f" (with those on the way: {listed(seen)})" if seen != steps else ""
    if reached == EXACT:
        return Recomputed(stage.check(_what(steps), how, []), reached, seen)
    if reached == CLOSE and elsewhere:
        detail = f"within the class '{CLOSE}' ({CLASSES[CLOSE]}), since {'; '.join(notes)}"
        return Recomputed(
            Check(f"{stage.place}: {_what(steps)}", how, "equal", detail), CLOSE, seen
        )
    if elsewhere and _other_samples(differences):
        why = (
            "this machine samples other tokens, so nothing after them can be compared: verify on a "
            f"machine like the run's ({'; '.join(notes)})"
        )
        return Recomputed(stage.not_checked(_what(steps), how, why), reached, seen)
    problems = [str(difference) for difference in differences]
    return Recomputed(stage.check(_what(steps), how, problems), reached, seen)


def _machine(notes: list[str]) -> bool:
    """Whether the processor, its use or the libraries are not as they were."""
    changed = [note.partition(": ")[2] for note in notes if note.startswith(CHANGED)]
    facts = [fact for text in changed for fact in text.split("; ")]
    return any(fact.startswith(tuple(f"{name} " for name in _OF_MACHINE)) for fact in facts)


def _other_samples(differences: Sequence[Difference]) -> bool:
    """Whether the first step that differs differs in its sampled tokens."""
    first = differences[0].step if differences else 0
    return any(d.name == "response_ids" for d in differences if d.step == first)


def class_of(compared: ComparedStep, record: StepRecord) -> str:
    """The class that a step reached; weights whose values were not kept are judged by metrics."""
    if not compared.differences:
        return EXACT
    return CLOSE if all(_close(d, record) for d in compared.differences) else APART


def _close(difference: Difference, record: StepRecord) -> bool:
    name, gap = difference.name, difference.max_abs
    if name in _WHOLE:
        return False
    if name.startswith("metric "):
        value = abs(record.metrics[name.removeprefix("metric ")])
        return gap is not None and gap <= _SHARE * max(1.0, value)
    if name in record.batch:
        return gap is not None and gap <= (_LOGPROBS if "logprobs" in name else _SHARE)
    return gap is None or gap <= _SHARE


# --- rewards scored again ------------------------------------------------------------------------


def rescore(stage: StageFiles, run: PastRun, steps: Sequence[int]) -> Iterator[Check]:
    """The kept responses of the drawn steps under the run's own rewards and verifier."""
    name = stage.made.stage
    config = run.resolved.config.stages[name]
    if config.kind not in RL_KINDS or not isinstance(config, RlStage):
        return
    there = [step for step in steps if step in steps_in(stage.folder / EVIDENCE)]
    how = f"kept responses of {shown_steps(there)} scored again" if there else "scored again"
    if not there:
        why = f"no responses were kept of {shown_steps(list(steps))} (keep.evidence_mb)"
        yield stage.not_checked("rewards", how, why)
        return
    try:
        inputs = run.stage_inputs(name, run.resolved, run.inputs(name))
        tokenizer = inputs.tokenizer()
        scorer = build_scorer(inputs, config, tokenizer)
        found = _Rescored(scorer)
        with scorer.pool or nullcontext():
            for step in there:
                found.add(read_step(stage.folder / EVIDENCE, step))
    except RunError as error:
        yield stage.check("rewards", how, [str(error)])
        return
    except PosttrainError as error:
        yield stage.not_checked("rewards", how, str(error))
        return
    yield from found.checks(stage, how)


@dataclass
class _Rescored:
    """What differs by reward, and how many scores were compared."""

    scorer: Scorer
    problems: dict[str, list[str]] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)

    def add(self, evidence: StepEvidence) -> None:
        batch, scorer = evidence.batch, self.scorer
        asked = {i: w for i, w in enumerate(scorer.rewards) if w.reward.deterministic}
        rewards = list(asked.values())
        columns = score_samples(rewards, batch.samples, scorer.pool) if rewards else []
        for (place, reward), column in zip(asked.items(), columns, strict=True):
            for row, now in enumerate(column):
                then, name = batch.scores[row][place], reward.name
                self._compare(name, evidence.step, row, then.value, now.value, (then, now))
                if then.value is not None and reward.only_if is None:
                    kept = float(batch.column("reward_components")[row, place])
                    self._compare(f"{name} in the batch", evidence.step, row, then.value, kept)
        firsts, acc = batch.first_branches(), batch.column("acc")
        for row, sample in enumerate(batch.samples):
            if acc[row].isnan() or (firsts is not None and firsts[row] != row):
                continue  # an episode that failed has no verdict, a branch that of the first
            verdict = scorer.task.verdict(sample.problem, sample.text, sample.outcome)
            self._compare("verdict", evidence.step, row, float(acc[row]), verdict.correct)
        self._total(evidence)

    def _total(self, evidence: StepEvidence) -> None:
        """The summed reward of each response that was scored, from its components."""
        batch, scorer = evidence.batch, self.scorer
        if batch.first_branches() is not None:
            return
        total, _ = shaped_sum(
            batch.column("reward_components"),
            scorer.rewards,
            scorer.clip,
            on_missing=scorer.on_missing,
            asked=asked_of(scorer.rewards, batch.problems),
        )
        for row, scored in enumerate(batch.column("scored").tolist()):
            if scored:
                then = float(batch.column("rewards")[row])
                self._compare("sum", evidence.step, row, then, float(total[row]))

    def _compare(
        self,
        name: str,
        step: int,
        row: int,
        then: float | None,
        now: float | None,
        scores: tuple[Score, ...] = (),
    ) -> None:
        if any(map(is_failure, scores)):  # a time limit or a crash need not come again
            return
        problems = self.problems.setdefault(name, [])
        self.compared[name] = self.compared.get(name, 0) + 1
        if (then is None) != (now is None) or (
            then is not None
            and now is not None
            and abs(then - now) > TOLERANCE * max(1.0, abs(then))
        ):
            what = "is unscored" if then is None else f"is {then:g}"
            problems.append(
                f"step {step}, response {row}: {name} {what} in the record, "
                f"{'unscored' if now is None else f'{now:g}'} now"
            )

    def checks(self, stage: StageFiles, how: str) -> Iterator[Check]:
        for weighted in self.scorer.rewards:
            if not weighted.reward.deterministic:
                why = "it gives one response different scores, so it is not asked again"
                yield stage.not_checked(f"reward {weighted.name}", "scored again", why)
        problems = [text for texts in self.problems.values() for text in texts]
        count = sum(self.compared.values())
        yield stage.check(
            f"rewards ({count} scores)",
            how,
            problems,
            "" if count else "no score could be compared",
        )
