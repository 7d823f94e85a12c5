"""Fail on words that people outside this project would not understand.

Reads every line of text files, and comments, docstrings and string literals of Python files;
identifiers are not text. A line that contains `words: allow` is left out.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOW = "words: allow"
WRITE = {  # pattern: what to write instead; whole words, case ignored
    r"told": "reported, logged or said",
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix",
    r"sureness": "policy entropy",
    r"beside": "next to, with or in addition to",
    r"laws?": "distribution",
    r"uncut": "untruncated",
    r"talks? nonsense": "returns an invalid score",
    r"(?:given|known|sampled) products": "linear outputs",
    r"worth the same": "equal reward",
    # "There is no X", "is no longer" and the like are plain English.
    r"(?<!there )(?<!there\n)is no(?= (?!longer|more|less|better|need|way|one)[a-z])": "is not a",
}
WORDS = re.compile("|".join(rf"(\b{pattern}\b)" for pattern in WRITE), re.IGNORECASE)
INSTEAD = list(WRITE.values())
SUFFIXES = {".md", ".yaml", ".toml", ".sql", ".py"}
NAMES = {"Makefile", "Dockerfile", "run", "with-password"}
TEXT_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def files(paths: list[str]) -> list[Path]:
    """Text and Python files that git tracks, or would track, below `paths`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = (ROOT / name for name in sorted(set(listed.split("\0")) - {""}))
    return [
        path
        for path in found
        if path.is_file() and not path.is_symlink() and path.name != Path(__file__).name
        if path.suffix in SUFFIXES or path.name in NAMES
    ]


def texts(path: Path, content: str) -> Iterator[tuple[int, str]]:
    """Pieces of text with the line on which each begins."""
    if path.suffix != ".py":
        yield 1, content
        return
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type in TEXT_TOKENS:
            yield token.start[0], token.string


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, word as written, and what to write instead."""
    content = path.read_text("utf-8")
    if not WORDS.search(content):  # most files; spares the tokenizer
        return
    lines = content.splitlines()
    for start, text in texts(path, content):
        for match in WORDS.finditer(text):
            number = start + text.count("\n", 0, match.start())
            if ALLOW not in lines[number - 1]:
                yield number, match.group(), INSTEAD[(match.lastindex or 1) - 1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fail on words to avoid in user-visible text.")
    parser.add_argument("paths", nargs="*", help="files and folders; default: the whole tree")
    parser.add_argument("--count", action="store_true", help="print counts per top-level folder")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    for path in files(options.paths):
        name = path.relative_to(ROOT)
        for number, word, instead in findings(path):
            counts[name.parts[0]] += 1
            if not options.count:
                print(f"{name}:{number}: {word!r}: write {instead}")
    if options.count:
        for folder, count in sorted(counts.items()):
            print(f"{count:6} {folder}")
    if counts:
        print(f"{counts.total()} words to replace", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
