"""Points, intervals, sets and lists in answers, and inequalities as intervals."""

from __future__ import annotations

import re


def parts(answer: str) -> tuple[str, str, list[str]]:
    r"""The brackets around an answer and what stands between its outermost commas.

    ("(", "]", ["0", "1"]) for "(0,1]"; no brackets for a list without them. A comma between digits
    separates, unless others have a blank after them, or it is written {,}.
    """
    text = re.sub(r"(?<=[0-9])\\[,! ](?=[0-9]{3}(?![0-9]))", "", answer)
    text = re.sub(r"\\(?:[,;:! ]|q?quad(?![a-z]))", " ", text).strip()
    text = text.replace("\\{", "\x01").replace("\\}", "\x02")
    left = right = ""
    if text[:1] in ("(", "[", "]", "\x01") and text[-1:] in (")", "]", "[", "\x02"):
        if _closes_at_end(text[1:-1]):
            left, right, text = text[0], text[-1], text[1:-1]
    text = text.replace("{,}", "")
    if re.search(r"[0-9],\s+|\s,|,\\", text):
        text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    found, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{\x01":
            depth += 1
        elif character in ")]}\x02":
            depth -= 1
        elif depth == 0 and character in ",;":
            found.append(text[start:index])
            start = index + 1
    found.append(text[start:])
    if (left, right) == ("]", "["):
        left, right = "(", ")"
    elif left == "]":
        left = "("
    elif right == "[":
        right = ")"
    names = {"\x01": "{", "\x02": "}"}
    plain = [one.replace("\x01", "\\{").replace("\x02", "\\}").strip() for one in found]
    return names.get(left, left), names.get(right, right), plain


def _closes_at_end(inside: str) -> bool:
    """Whether the brackets within the outer pair are closed among themselves."""
    depth = 0
    for character in inside:
        depth += (character in "([{\x01") - (character in ")]}\x02")
        if depth < 0:
            return False
    return depth == 0


_BELOW, _ABOVE = r"(?:\\leq?(?:slant)?(?![a-z])|<=?)", r"(?:\\geq?(?:slant)?(?![a-z])|>=?)"
_LESS = re.compile(rf"[a-zA-Z]\s*({_BELOW})([^<>=]+)|([^<>=a-zA-Z]+)({_ABOVE})\s*[a-zA-Z]")
_MORE = re.compile(rf"[a-zA-Z]\s*({_ABOVE})([^<>=]+)|([^<>=a-zA-Z]+)({_BELOW})\s*[a-zA-Z]")
_BETWEEN = re.compile(
    rf"((?:(?!\\leq?(?![a-z]))[^<>=])+?)\s*({_BELOW})\s*[a-zA-Z]\s*({_BELOW})([^<>=]+)"
)


_RANGE = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
_OR = re.compile(
    r"(?:\s|,|\\q?quad(?![a-z])|\\[ ,;])*"
    r"(?:\\text\s*\{\s*,?\s*or\s*\}|\\(?:lor|vee)(?![a-z])|\sor\s)"
    r"(?:\s|\\q?quad(?![a-z])|\\[ ,;])*"
)
_DESCENDING = re.compile(rf"([^<>=a-zA-Z]+?)\s*({_ABOVE})\s*([a-zA-Z])\s*({_ABOVE})([^<>=a-zA-Z]+)")
_ABSOLUTE = re.compile(rf"\|\s*([a-zA-Z])\s*\|\s*({_BELOW})([^<>=]+)")
_UNEQUAL = re.compile(r"[a-zA-Z]\s*\\neq?(?![a-z])([^<>=,]+)")


def as_interval(answer: str) -> str:
    r"""An inequality in one letter as the interval that it means, several with "or" between them as
    the union, and a ratio of three or more as the point of its quotients by the first; other
    answers as they are.
    """
    either = _OR.split(answer) if len(answer) < 200 else [answer]
    if len(either) > 1:
        ranges = [as_interval(one) for one in either]
        return r" \cup ".join(ranges) if all(map(_RANGE.fullmatch, ranges)) else answer
    ratio = answer.split(":")
    if len(ratio) > 2:
        return "(" + ", ".join(rf"\frac{{{one}}}{{{ratio[0]}}}" for one in ratio) + ")"
    text = answer.replace(r"\lt", "<").replace(r"\gt", ">").strip()
    if member := re.fullmatch(r"[a-zA-Z]\s*\\in(?![a-z])\s*(.+)", text):
        return member[1]
    if other := _UNEQUAL.fullmatch(text):
        return rf"(-\infty, {other[1].strip()}) \cup ({other[1].strip()}, \infty)"
    if size := _ABSOLUTE.fullmatch(text):
        text = f"-({size[3]}) {size[2]} {size[1]} {size[2]} {size[3]}"
    if down := _DESCENDING.fullmatch(text):
        signs = [r"<" if sign == ">" else r"\le" for sign in (down[4], down[2])]
        text = f"{down[5]} {signs[0]} {down[3]} {signs[1]} {down[1]}"
    if both := _BETWEEN.fullmatch(text):
        low, high = ("(" if both[2] == "<" else "["), (")" if both[3] == "<" else "]")
        return f"{low}{both[1].strip()}, {both[4].strip()}{high}"
    if less := _LESS.fullmatch(text):
        sign, bound = (less[1], less[2]) if less[1] else (less[4], less[3])
        return rf"(-\infty, {bound.strip()}{')' if sign in '<>' else ']'}"
    if more := _MORE.fullmatch(text):
        sign, bound = (more[1], more[2]) if more[1] else (more[4], more[3])
        return rf"{'(' if sign in '<>' else '['}{bound.strip()}, \infty)"
    return answer
