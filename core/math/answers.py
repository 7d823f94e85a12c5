"""Final answers in text: where they are, and the plain forms in which they are compared.

Nothing here raises on any text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction

from posttrain.core.math.numbers import VULGAR, ascii_digits, is_number, numbers_in, stated_numbers

_REMARK = re.compile(r"\\pmod\s*\{[^{}]*\}|\(\s*\\?[A-Za-z][^()]*\)|\b(?:mod|modulo)\s+[0-9]+")


def last_number(text: str) -> str | None:
    r"""The number in the last \boxed{}, else the last of the text without remarks in parentheses.

    "7 (mod 12)" is 7, "(0,100)" is 100.
    """
    boxed = last_boxed(text)
    for place in (boxed or "", _REMARK.sub(" ", text), text):
        numbers = stated_numbers(place)
        if numbers:
            return numbers[-1]
    return None


_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CURRENCY = re.compile(r"\\?\$|[€£¥₹¢]")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\[,;:! ]| )(?=[0-9]{3}(?![0-9]))")
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_MIXED = re.compile(r"([+-]?)\s*([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_SCIENTIFIC = re.compile(rf"([+-]?{_NUMBER})[eE]([+-]?[0-9]+)")
# A letter that is a factor, not a unit: 5 x, 2 i, 3 e.
_FACTOR = r"(?:[abceijknpqrtuvwxyzXYZ]|[xyz]+)(?![A-Za-z])"
_PER = "s|sec|second|min|minute|h|hr|hour|day|week|month|year|kg|L"
# "18", "-3/4", "50 %", "5 apples", "12 cm^2": a number, perhaps a fraction, perhaps with its unit.
_WITH_UNIT = re.compile(
    rf"([+-]?\s*{_NUMBER}(?:\s*/\s*[0-9]+)?)"
    rf"(?:\s*(\\?%)|\s+(?!{_FACTOR})[A-Za-z][A-Za-z .]*(?:(?<=[A-Za-z])\^?[23])?(?:/(?:{_PER}))?"
    r"|\s*(?![万亿])[\u4e00-\u9fff]+)?"
)
_TWO_NUMBERS = re.compile(r"[0-9.]\s+[0-9.]")
_POWER = r"(?:\^|\*\*)\s*[{(]*\s*[0-9]"
_HUGE = re.compile(
    rf"[0-9]\s*[)}}]*\s*{_POWER}[0-9]*\s*[)}}]*\s*{_POWER}|{_POWER}[0-9]{{4}}|[0-9]{{4}}\s*[)}}]*\s*!"
)
_WORDS = re.compile(r"(?![A-Za-z](?:\s*-\s*[A-Za-z])+\Z)[A-Za-z][A-Za-z' -]+")  # not a - b
TEXT = r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*"
# "5 \text{ hours } 30 \text{ minutes}": the parser reads the first number alone.
_TWO_QUANTITIES = re.compile(
    rf"[0-9}}]\s*(?:\\[,;! ]\s*)*{TEXT}\{{(?!\s*(?:or|and)\s*\}})[^{{}}]*\}}"
    rf"(?:{TEXT}\{{[^{{}}]*\}}|\\[,;! ]|[A-Za-z\s])*[0-9]"
    rf"|[0-9]\s+(?!(?:or|and)\s)(?:[A-Za-z]{{2,}},?\s+)+[0-9]"
)
_BOUND = re.compile(r"\b(?:or (?:more|less|fewer|greater|larger)|at (?:least|most))\b")  # no unit
_UNIT_IN_LIST = re.compile(
    rf"(?<=[0-9}}])\s*(?:\\[,;! ]\s*)*{TEXT}\{{[^{{}}]*\}}(?=\s*(?:[,;]|\\times|\\cdot)\s*[-0-9])"
)


def after_marker(text: str, marker: str) -> str | None:
    """What stands between the last `marker` and the end of its line; None without one."""
    _, found, tail = text.rpartition(marker)
    return tail.strip().partition("\n")[0].rstrip() if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}, braces balanced; None without one.

    None as well if the last box is never closed, as in a truncated response: what an earlier box
    holds is not the final answer.
    """
    boxes = {match.end() for match in _BOXED.finditer(text)}
    opened: list[int] = []
    start, end = -1, -1
    for index, character in enumerate(text):
        if character not in "{}" or (index and text[index - 1] == "\\"):
            continue
        if character == "{":
            opened.append(index + 1)
        elif opened:
            inside = opened.pop()
            if inside in boxes and inside > start:  # of nested ones, the inner one
                start, end = inside, index
    unfinished = any(begin in boxes for begin in opened)
    return None if start < 0 or unfinished else text[start:end]


def has_unfinished_box(text: str) -> bool:
    """Whether the last box of the text is never closed."""
    return last_boxed(text) is None and _BOXED.search(text) is not None


_SIGNS = {
    "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm ",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u222a": r"\cup ", "\u2229": r"\cap ",
    "\u2208": r"\in ", "\u00b0": r"^\circ ", "\u2205": r"\emptyset ", "\u3001": ",",
    "\u2044": "/", "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}",
    "\u211a": r"\mathbb{Q}", "\u2102": r"\mathbb{C}", "\u2103": r"^\circ ", "\u2032": "'",
    "\u2261": r"\equiv ", "~": " ",
}  # fmt: skip
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|([0-9]+|[A-Za-z]))")
# Its parser reads an argument of a logarithm to a base in parentheses only.
_LOGARITHM = re.compile(
    r"\\log_\{?([0-9]+|[a-z])\}?\s*\{?((?:[0-9]+|(?<=[ }])[a-z])(?:\^(?:\{[^{}]*\}|[0-9a-z]))?)\}?"
    r"(?![0-9a-z(^])"
)
_REPEATING = re.compile(
    r"(?<![0-9.])(?P<whole>[0-9]{0,50})\.(?P<fixed>[0-9]{0,50})"
    r"(?:\\dot\s*\{?(?P<first>[0-9])\}?(?P<inner>[0-9]{0,50})\\dot\s*\{?(?P<last>[0-9])\}?"
    r"|\\(?:overline|bar|dot)\s*(?:\{\s*(?P<cycle>[0-9]{1,50})\s*\}|(?P<digit>[0-9])))"
)
# 0.1666... and 0.3636..., but 2.718281828... does not repeat.
_GOES_ON = re.compile(
    r"(?<![0-9.])([0-9]{0,50})\.(?:([0-9]{0,50}?)([0-9])\3{2,50}|([0-9]{2,20}?)\4{1,20})"
    r"(?:\s*\\[lc]?dots|\.\.\.+|\u2026)(?![0-9A-Za-z])"
)
_DEGREES = r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degree(?![a-z]))"
_LAYOUT = [  # LaTeX that changes how an answer looks, and the forms that the parser does not read
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*", ""),
    (r"\\(?:blacksquare|square|checkmark|qed)\s*\Z", ""),
    (r"\\(?:nice|s)frac(?![a-z])", r"\\frac"),
    (r"\\big(cup|cap)(?![a-z])", r"\\\1"),
    (r"(?<=[)\]}])\s*U\s*(?=[(\[\\])", r"\\cup "),
    (r"\\colon(?![a-z])", ":"),
    (r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\(?:text|math(?:rm|it|bf)|operatorname)\s*\{\s*([ie])\s*\}", r" \1"),
    (r"(?:\\text\s*|(?<![\\A-Za-z^_}]))\{\s*([-+])\s*\}", r"\1"),
    (r"\\text\s*\{\s*([-+]?[0-9][0-9.,]*)\s*\}", r"\1"),
    (r"\\(?:(?:display|text)style|bf|rm|it|sf|tt|[lL]arge|small)(?![a-zA-Z])\s*", ""),
    (r"\\(?:text)?color\s*\{[^{}]*\}|\\h(?:space|skip)\s*\{[^{}]*\}|\\underline(?![a-z])", ""),
    (r"\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}{0,2}(?![A-Za-z])", ""),
    (r"\\(mathbb|mathbf|mathrm)\s+([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
    (r"\\[cdt]?frac\s+([0-9])\s+([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (rf"{_DEGREES}(?:\s*[CF](?![A-Za-z]))?", r"^\\circ "),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
    (r"(?<![A-Za-z\\])log(?=_)", r"\\log"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi"),
    (r"\\sqrt\s*\[\s*([0-9]+)\s*\]\s*([0-9])", r"\\sqrt[\1]{\2}"),
]
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_ANGLE = re.compile(rf"({_NUMBER})\^\\circ ?")
_PRIMED = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('+)(?![A-Za-z])")
_WHOLE_TEXT = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")
_BUILDER = re.compile(
    r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![a-z])|[|:])(.*[<>=\\].*)\\\}"
)
_LEAD_WORDS = (
    r"(?:the\s+)?(?:(?:final|correct|right)\s+)?(?:answer\s*(?:is(?:\s*:)?|:|=)"
    r"|(?:answer|option|choice)\s*:?(?=\s*\}?\s*\(?[A-Z](?![A-Za-z])))"
)
_LEAD = re.compile(rf"\A\s*(?:{TEXT}\{{\s*{_LEAD_WORDS}\s*\}}|{_LEAD_WORDS})\s*(?=\S)", re.I)
# "k\pi, k \in \mathbb{Z}"
_CONDITION = re.compile(
    r"\A(.*\S)\s*(?:,|\(|\\[ ,;]|\\q?quad)\s*\(?\s*[a-z]\s*\\in\s*(?:\\mathbb\s*\{?Z\}?|Z)\s*\)?\Z"
)
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_STOPS = ".,;:?。，、；：？！ \t\n"


def normal(answer: str) -> str:
    r"""An answer in plain characters, without what stands around it: dollars, full stops, \left."""
    text = _GOES_ON.sub(r"\1.\2\\overline{\3\4}", answer).strip().rstrip(_STOPS)
    text = VULGAR.sub(" ", _OTHER_DIGIT.sub(_digit, text.replace("\uff0c", ", ")))
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", ascii_digits(text))
    text = "".join(_SIGNS.get(character, character) for character in text)
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/").replace("\u2212", "-")
    for form, plain in _LAYOUT:
        text = re.sub(form, plain, text)
    if _TRIGONOMETRY.search(text):
        text = _ANGLE.sub(r"\\frac{\1\\pi}{180}", text)
    text = _PRIMED.sub(lambda m: f"{m[1]}_{{{'prime' * len(m[2])}}}", text)
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")").replace("\\lbrace", "\\{")
    text = text.replace("\\rbrace", "\\}").replace(r"\lbrack", "[").replace(r"\rbrack", "]")
    text = _LOGARITHM.sub(r"\\log_{\1}(\2)", text).replace(r"\varnothing", r"\emptyset")
    text = _REPEATING.sub(_as_fraction, text)
    text = _CURRENCY.sub("", text).strip().strip("*_`\"'\u201c\u201d").strip()
    if inside := _WHOLE_TEXT.fullmatch(text) or _BUILDER.fullmatch(text):
        text = inside[1]
    text = _CONDITION.sub(r"\1", _LEAD.sub("", text))
    text = re.sub(r"\A(?:\\(?:[,;:! ]|q?quad(?![a-z])|approx(?![a-z]))|[\s=])+", "", text)
    return re.sub(r"(?:\\+[,;:! ]?|[.,;:?\s])+\Z", "", text) if len(text) > 1 else text


def _digit(match: re.Match[str]) -> str:
    return str(unicodedata.digit(match.group()))


def _as_fraction(match: re.Match[str]) -> str:
    """0.1\\overline{6} as (1/6): the digits that repeat are over as many nines."""
    fixed, cycle = match["fixed"], match["cycle"] or match["digit"]
    cycle = cycle or match["first"] + match["inner"] + match["last"]
    whole = f"{match['whole'] or 0}.{fixed or 0}"
    value = Fraction(int(cycle), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    return f"({Fraction(whole) + value})"


_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_IN_BASE = re.compile(
    rf"\(?([0-9A-Za-z]{{1,200}})\)?\s*_\s*\{{?\s*\(?([0-9]{{1,2}}|{'|'.join(_BASES)})\)?\s*\}}?"
)


def number_in_base(text: str) -> int | None:
    """The value of a number with its base as index (1010_2, ff_{16}); None for anything else."""
    found = _IN_BASE.fullmatch(re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", text.strip()))
    if found is None:
        return None
    base = int(found[2]) if found[2].isdigit() else _BASES.index(found[2]) + 2
    try:
        return int(found[1], base) if 2 <= base <= 36 else None
    except ValueError:
        return None


_MOD = r"\(?\s*(?:\\[pb]?mod|(?:\\text\s*\{)?\s*mod\s*\}?)\s*\{?\s*([1-9][0-9]{0,20})\s*\}?\s*\)?"
_CONGRUENCE = re.compile(rf"(?:[a-zA-Z]\s*\\equiv\s*)?(-?[0-9]{{1,20}})\s*{_MOD}")


def residue(text: str) -> tuple[int, int] | None:
    r"""Number and modulus of "7 \pmod{12}", "7 (mod 12)", "x \equiv 7 \pmod{12}"; else None."""
    found = _CONGRUENCE.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else None


_CLOCK = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?\s*(?:\\text\s*\{)?\s*([apAP])\.?[mM]\.?\s*\}?")


def time_of_day(text: str) -> int | None:
    """The minute of the day of "6 PM", "10:30 a.m."; None without AM or PM."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        return None
    return int(found[1]) % 12 * 60 + int(found[2] or 0) + 720 * (found[3] in "pP")


_TIMES_OF = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
             "万": 10**4, "亿": 10**8}  # fmt: skip
_MULTIPLE = re.compile(
    rf"({_NUMBER})\s*(?:\\text\s*\{{)?\s*({'|'.join(_TIMES_OF)})(?![a-z])([^{{}}]*)\}}?"
)


def multiplied(answer: str) -> str | None:
    """ "2 million" and "2.5 thousand dollars" as 2000000 and 2500 dollars; else None."""
    found = _MULTIPLE.fullmatch(answer) if len(answer) < 100 else None
    return f"{Fraction(found[1]) * _TIMES_OF[found[2]]}{found[3]}" if found else None


def as_latex(answer: str) -> str:
    r"""A short answer, written in any of the usual ways, as one LaTeX expression.

    Dollar signs (currency or mathematics), separators of thousands, units after a number, typeset
    minus signs and fractions (½), mixed numbers (3 1/2), scientific notation and punctuation at the
    end are put into the form LaTeX has for them; words become \text{...}. Two numbers with nothing
    between them are no answer: the result is empty.
    """
    plain = normal(answer)
    plain = _THOUSANDS.sub("", plain) if plain[:1] not in ("(", "[", "\\") else plain
    plain = plain.replace("{,}", "")
    plain = _UNIT_IN_LIST.sub("", plain)
    if _TWO_QUANTITIES.search(plain) or _BOUND.search(plain):
        words = re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r" \1 ", plain)
        return rf"\text{{{' '.join(words.lower().split())}}}"
    if unit := _WITH_UNIT.fullmatch(plain):
        number, percent = unit.groups()
        return number + (r"\%" if percent else "")
    if mixed := _MIXED.fullmatch(plain):
        sign, whole, top, bottom = mixed.groups()
        return rf"{sign}({whole} + \frac{{{top}}}{{{bottom}}})"
    if scientific := _SCIENTIFIC.fullmatch(plain):
        return rf"{scientific[1]} \times 10^{{{scientific[2]}}}"
    if _WORDS.fullmatch(plain):
        return rf"\text{{{plain.lower()}}}"
    return "" if _TWO_NUMBERS.search(plain) else plain


def without_blanks(text: str) -> str:
    """Blanks between two digits stay, as one: 1 1/2 is not 11/2, and 1 2 is not 12."""
    return " ".join(re.sub(r"(?<![0-9.])\s+|\s+(?![0-9.])", "", text).split())


def is_huge(text: str) -> bool:
    """Whether `text` has a number that nobody would write out: 9^{9^9}, 2^{100000}, 1000!.

    The usual ways to write one; there are others, so whoever computes with it needs a time limit.
    """
    return _HUGE.search(text) is not None


_FACTORIAL = re.compile(r"([0-9]{1,4})\s*!")
_INTEGER_POWER = re.compile(
    r"(-?[0-9]{1,6})\s*(?:\^|\*\*)\s*(?:\{\s*([0-9]{1,5})\s*\}|([0-9]{1,5}))"
)
_MAX_BITS = 60_000


def large_integer(text: str) -> int | None:
    """The value of n!, of a^b or of an integer written out, if it is one and not too large."""
    plain = text.strip()
    if found := _FACTORIAL.fullmatch(plain):
        return math.factorial(int(found[1])) if int(found[1]) <= 5000 else None
    if found := _INTEGER_POWER.fullmatch(plain):
        base, power = int(found[1]), int(found[2] or found[3])
        return base**power if base.bit_length() * power <= _MAX_BITS else None
    digits = _THOUSANDS.sub("", plain)
    return int(digits) if re.fullmatch(r"-?[0-9]{1,4000}", digits) else None


def bracket_depth(text: str) -> int:
    """How deep the brackets of `text` nest, at most; one that is never closed counts to the end."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


# What stands around a number in LaTeX and in prices, and is not part of it.
_DRESSING = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[,!;: ]|[$%]|\\[$%]|\{,\}(?=\d)")

_CALCULATED = re.compile(r"<<[^<>\n]*>>")  # GSM8K's <<48+24=72>>72
_UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\s*\^\s*\{?[0-9]\}?")
_EXPONENTS = re.compile(r"(?<=[0-9])[eE][+-]?[0-9]+")


def number_after(text: str, marker: str) -> str | None:
    """The first number in the line after the last `marker`; None without either.

    Of an equation it is the last side that is one number: "48 + 24 = 72", "72 = 48 + 24".
    """
    line = after_marker(text, marker)
    if line is None:
        return None
    line = _CALCULATED.sub("", line)
    sides = [stated_numbers(side) for side in _REMARK.sub(" ", line).split("=")]
    results = [side for side in sides if len(side) == 1]
    numbers = results[-1] if len(sides) > 1 and results else stated_numbers(line)
    return numbers[0] if numbers else None


def only_number_after(text: str, marker: str) -> str | None:
    """As `number_after`, when the line after the last `marker` holds the number and nothing else.

    A leading $ and a trailing % or full stop are let pass.
    """
    line = (after_marker(text, marker) or "").removeprefix("$").rstrip("%. ")
    return numbers_in(line)[0] if is_number(line) else None


def final_number(text: str) -> str | None:
    r"""The number after the last `####`, else in the last \boxed{}, else the last of the text.

    A box that holds several numbers, such as a fraction, is read as none: picking one of them would
    make a wrong answer right. Of a last box that is never closed only what it holds is read.
    """
    marked = number_after(text, "####")
    if marked is not None:
        return marked
    boxed = last_boxed(text)
    if boxed is not None:
        if inside := _WHOLE_TEXT.fullmatch(boxed.strip()):
            boxed = inside[1]
        plain = _DRESSING.sub(_undressed, _UNIT_POWER.sub("", ascii_digits(boxed)))
        stated = stated_numbers(plain)
        written = numbers_in(_EXPONENTS.sub("", plain))
        return stated[0] if len(stated) == len(written) == 1 else None
    begun = list(_BOXED.finditer(text))
    return last_number(text[begun[-1].end() :] if begun else text)


def _undressed(match: re.Match[str]) -> str:
    return "," if match.group() == "{,}" else "\\$" if match.group().endswith("$") else ""
