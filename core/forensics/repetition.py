"""How much a response repeats itself, and which responses are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from posttrain.core.forensics.responses import Response

NGRAM = 3
"""Tokens in a row that are compared."""


def repetition(token_ids: Sequence[int], n: int = NGRAM) -> float | None:
    """1 - distinct n-grams / n-grams of a response; None if it is shorter than n tokens."""
    grams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def same_text(text: str) -> str:
    """What two texts that differ in white space alone have in common."""
    return " ".join(text.split())


def repeated_in_group(responses: Sequence[Response]) -> list[Response]:
    """Those whose text another response to the same prompt sample has too; empty ones count."""
    counts = Counter((r.group, same_text(r.text)) for r in responses)
    return [r for r in responses if counts[r.group, same_text(r.text)] > 1]


def repeated_across_prompts(responses: Sequence[Response]) -> list[Response]:
    """Those whose text answers another prompt as well."""
    prompts: dict[str, set[str]] = {}
    for response in responses:
        prompts.setdefault(same_text(response.text), set()).add(response.prompt)
    return [r for r in responses if len(prompts[same_text(r.text)]) > 1]
