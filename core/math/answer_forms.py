"""Whether a text has a form that is harmless to evaluate: nothing in it can be code, or be huge.

Some of reasoning-gym's scorers call `eval` on the answer, or SymPy's `parse_expr`, which does.
What a model wrote may reach them only if it is of one of these forms.
"""

from __future__ import annotations

import ast
import re

from posttrain.core.math.answers import bracket_depth

MAX_CHARS = 2000
MAX_DEPTH = 50
WORDS = re.compile(r"[\w\s]*")
ARITHMETIC = re.compile(r"[0-9\s+\-*/().]*")
NUMBER = re.compile(r"[0-9]{13,}")
# Lower-case letters one by one: names of SymPy's functions are longer, or upper-case.
POLYNOMIAL = re.compile(
    r"(?:[0-9\s+\-()]|\*(?!\*)|(?<![a-z])[a-z](?![a-z])(?:\s*\*\*\s*[0-9]{1,2}(?![0-9]))?)*"
)


def is_data(text: str) -> bool:
    """Words and numbers without any sign between them, or a Python literal, such as [[0], [1]]."""
    if _too_large(text):
        return False
    if WORDS.fullmatch(text):
        return True
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def is_arithmetic(text: str) -> bool:
    """Numbers of at most twelve digits, + - * / and brackets; no powers."""
    small = not _too_large(text) and NUMBER.search(text) is None
    return small and "**" not in text and ARITHMETIC.fullmatch(text) is not None


def is_polynomial(text: str) -> bool:
    """Sums and products of such numbers and of variables of one letter, to powers up to 99."""
    small = not _too_large(text) and NUMBER.search(text) is None
    return small and POLYNOMIAL.fullmatch(text) is not None


def _too_large(text: str) -> bool:
    return len(text) > MAX_CHARS or bracket_depth(text) > MAX_DEPTH
