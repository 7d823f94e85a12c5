"""Answers that choose one of several: A, (B), D) 12."""

from __future__ import annotations

import re

from posttrain.core.math.answers import TEXT

_CHOICE = re.compile(r"[(\[]?([A-Za-z])[)\].:]?")
_LABELLED = re.compile(
    rf"(?:{TEXT}\{{\s*)?(?:\(([A-Za-z])\)|([A-Za-z])\s*[).:])\s*(\}}?)(?:\\[ ,;]|[\s~])*(\S.*)"
)
# A second label, or a second letter right after the first: such an answer chooses nothing.
_HEDGED = re.compile(
    r"(?:\A|[\s,;/&}~])(?:\([A-J]\)|[A-J]\s*[).:](?:\W|\Z))|\A(?:or|and|[,;/&])\s*\(?[A-J](?![A-Za-z])"
)


def labelled(answer: str) -> tuple[str, str] | None:
    r"""The capital that an answer chooses and the text that it goes on with, perhaps empty.

    ("D", "12") for "D) 12", "\textbf{(D)} 12" and "D. 12"; ("D", "") for "D" and "(D)"; None for
    other answers, and for those that name several choices.
    """
    if alone := _CHOICE.fullmatch(answer):
        return alone[1].upper(), ""
    found = _LABELLED.fullmatch(answer)
    if found is None or _HEDGED.search(found[4]):
        return None
    rest = found[4] if found[3] or "{" in found[4] else found[4].rstrip("}")
    return (found[1] or found[2]).upper(), rest


def is_hedged(answer: str) -> bool:
    """Whether an answer names several choices."""
    found = _LABELLED.fullmatch(answer)
    return found is not None and _HEDGED.search(found[4]) is not None
