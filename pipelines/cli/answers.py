"""Answers to gates: from the command line, from a person at the terminal, or to be given later."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.core.approval import Answer, ApprovalRequest
    from posttrain.pipelines.gates import Ask
    from posttrain.pipelines.progress import PlainReporter, RichReporter


def given_answers(
    approve: Sequence[str] | None, reject: Sequence[str] | None, reason: str
) -> dict[str, Answer]:
    """Answers of `--approve` and `--reject`, by stage; raises `ConfigError` for both at once."""
    from posttrain.core.approval import Answer, this_person

    both = set(approve or ()) & set(reject or ())
    if both:
        raise ConfigError(f"--approve and --reject both name '{sorted(both)[0]}'; give one of them")
    if reason and not approve and not reject:
        raise ConfigError("--reason is the reason of an answer: add --approve STAGE")
    who = this_person()
    named = [(stage, True) for stage in approve or ()]
    named += [(stage, False) for stage in reject or ()]
    return {stage: Answer.now(approved, who, reason, "command line") for stage, approved in named}


def terminal_ask(reporter: PlainReporter | RichReporter, *, as_json: bool) -> Ask | None:
    """What asks the person at the terminal; None where nobody is."""
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None

    def ask(request: ApprovalRequest) -> Answer | None:
        with reporter.paused():
            return _prompt(request)

    return ask


def _prompt(request: ApprovalRequest) -> Answer | None:
    """Show the evidence, read the decision and its reason; None at the end of the input."""
    from posttrain.core.approval import Answer, this_person

    print(f"\n=== stage '{request.stage}' asks for approval ===\n\n{request.markdown}")
    try:
        word = ""
        while word not in ("approve", "reject"):
            word = input("approve or reject? ").strip().lower()
        reason = input("why? ")
    except EOFError:
        print()
        return None
    return Answer.now(word == "approve", this_person(), reason, "terminal")


def answering_command(
    configs: Sequence[Path],
    overrides: Sequence[str] | None,
    home: Path,
    store: Path | None,
    stage: str,
) -> dict[str, str]:
    """The commands that continue this run with an answer, by decision."""
    words = ["posttrain", "run", *map(str, configs)]
    for override in overrides or ():
        words += ["--set", override]
    words += ["--home", str(home)]
    if store is not None:
        words += ["--store", str(store)]
    return {
        decision: shlex.join([*words, f"--{decision}", stage, "--reason", "..."])
        for decision in ("approve", "reject")
    }
