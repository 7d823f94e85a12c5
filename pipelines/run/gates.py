"""Gates of a run: where an answer comes from, and what its absence means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.core.analysis.approval_page import evidence
from posttrain.core.config.base import StageBase
from posttrain.core.config.gate_stages import ApproveStage
from posttrain.core.config.resolve import ResolvedRun
from posttrain.core.errors import ApprovalRefused, ConfigError, nearest
from posttrain.core.store.approval import (
    ALL_GATES,
    Answer,
    ApprovalRequest,
    first_asked,
    kept_answer,
    read_answer,
)
from posttrain.core.store.artifacts import Artifact, StageResult

Ask = Callable[[ApprovalRequest], Answer | None]
KEY_LENGTH = 16
"""Characters of a gate's identity in file names and in Prefect's keys."""


@dataclass(frozen=True, slots=True)
class Gates:
    """`answers` are given beforehand, by stage or for all; `ask` asks a person who is there."""

    requests: Path
    answers: Mapping[str, Answer] = field(default_factory=dict)
    ask: Ask | None = None

    def overrides(self, stage: str, kept: Answer) -> bool:
        """Whether an answer given for this very stage differs from the one that was kept."""
        given = self.answers.get(stage)
        return given is not None and given.approved != kept.approved

    def answer(
        self, name: str, stage: StageBase, inputs: Mapping[str, Artifact], identity: str
    ) -> Answer | None:
        """The answer for this model; None for a stage that is not a gate.

        Raises `ApprovalNeeded` where there is none and nobody to ask.
        In this order: given beforehand, given while nothing ran, the time is over, asked now.
        """
        if not isinstance(stage, ApproveStage):
            return None
        given = self.answers.get(name) or self.answers.get(ALL_GATES)
        given = given or kept_answer(self.requests, name, identity[:KEY_LENGTH])
        if given is not None:
            return given
        request = self.request(name, stage, inputs, identity)
        answer = request.expired() or (None if self.ask is None else self.ask(request))
        if answer is None:
            raise request.needed()
        return answer

    def request(
        self, name: str, stage: ApproveStage, inputs: Mapping[str, Artifact], identity: str
    ) -> ApprovalRequest:
        key = identity[:KEY_LENGTH]
        baseline = inputs.get("baseline")
        page, _ = evidence(
            stage.question,
            inputs["model"].digest,
            inputs["evaluation"].path,
            None if baseline is None else baseline.path,
            stage.samples,
        )
        return ApprovalRequest(
            stage=name,
            key=key,
            question=stage.question,
            markdown=page,
            asked_at=first_asked(self.requests, name, key),
            timeout_s=None if stage.timeout_hours is None else 3600 * stage.timeout_hours,
            on_timeout=stage.on_timeout,
        )


def check_passed(result: StageResult) -> None:
    """Raise `ApprovalRefused` for a gate at which the model was rejected; other stages pass."""
    if result.kind != "approve":
        return
    answer = read_answer(result.artifact("approval").path)
    if not answer.approved:
        raise ApprovalRefused(
            f"stage '{result.name}' was {answer.described()}; what was computed is kept, and "
            "--approve "
            f"{result.name} changes the answer"
        )


def check_answers(resolved: ResolvedRun, answers: Mapping[str, Answer]) -> None:
    """Raise `ConfigError` for an answer to a stage that is not a gate of this run."""
    stages = resolved.config.stages
    gates = [name for name, stage in stages.items() if isinstance(stage, ApproveStage)]
    for name in answers:
        if name not in gates and (name != ALL_GATES or not gates):
            known = f"gates: {gates}" if gates else "it has no stage of kind 'approve'"
            raise ConfigError(
                f"'{name}' is not a gate of this run{nearest(name, gates)} ({known}); "
                f"correct --approve or --reject"
            )
