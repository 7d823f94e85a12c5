"""Search in local text files: the passages that share most with the query, by BM25."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Tool, ToolResult
from posttrain.core.errors import DataError
from posttrain.core.runtime.files import irregular

K1, B = 1.2, 0.75
MAX_QUERY_CHARS = 1000


class SearchConfig(PluginConfig):
    """Settings of `search`."""

    path: Path = Field(description="a text file (UTF-8), or a folder of *.txt and *.md files")
    passage: Literal["line", "paragraph"] = Field(
        default="paragraph", description="what is found and shown: a line, or lines up to a blank"
    )
    top: int = Field(default=3, ge=1, le=50, description="passages shown, at most")
    max_chars: int = Field(default=500, ge=1, description="characters shown of each passage")


class SearchTool(Tool[SearchConfig]):
    """Score = sum over query words of idf(w) f(w) (k1 + 1) / (f(w) + k1 (1 - b + b n / mean n)).

    f(w) counts w in the passage of n words; idf(w) = ln(1 + (N - n_w + 0.5) / (n_w + 0.5)), n_w of
    N passages with w; k1 = 1.2, b = 0.75. Words are runs of letters and digits, in lower case.
    Equal scores are in the order of the files. Files are read when the tool is built.
    Source: Robertson and Zaragoza 2009, BM25 and beyond, with the idf of Lucene.
    """

    name = "search"
    Config = SearchConfig
    description = "finds passages in a text collection that share words with the query"
    parameters: ClassVar[Mapping[str, Any]] = {  # Any: JSON values
        "type": "object",
        "properties": {"query": {"type": "string", "description": "words to look for"}},
        "required": ["query"],
    }

    def __init__(self, config: SearchConfig) -> None:
        super().__init__(config)
        self._passages = _read(config)
        self._counts = [Counter(_words(passage)) for passage in self._passages]
        self._places: dict[str, list[int]] = {}
        for index, counts in enumerate(self._counts):
            for word in counts:
                self._places.setdefault(word, []).append(index)
        self._lengths = [counts.total() for counts in self._counts]
        self._mean = sum(self._lengths) / len(self._lengths) or 1.0

    def call(self, arguments: str) -> ToolResult:
        """The best passages, one after another; an empty query is a failure, no match is not."""
        words = set(_words(arguments[:MAX_QUERY_CHARS]))
        if not words:
            return ToolResult("error: the query has no word", failed=True)
        scores: dict[int, float] = {}
        for word in sorted(words):
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self._passages) - len(places) + 0.5) / (len(places) + 0.5))
            for index in places:
                count = self._counts[index][word]
                norm = K1 * (1 - B + B * self._lengths[index] / self._mean)
                scores[index] = scores.get(index, 0.0) + rarity * count * (K1 + 1) / (count + norm)
        best = sorted(scores, key=lambda index: (-scores[index], index))[: self.config.top]
        found = [self._passages[index][: self.config.max_chars] for index in best]
        return ToolResult("\n".join(found) or "nothing found")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _read(config: SearchConfig) -> list[str]:
    """The passages of all files, by file name and place."""
    path = config.path.expanduser()
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".md") and f.is_file())
    try:
        kind = "" if path.is_dir() else irregular(path)
        if kind:
            raise DataError(f"tool 'search': '{path}' is {kind}, not a text file; correct `path`")
        texts = [file.read_text("utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"tool 'search': '{path}' cannot be read as UTF-8 text: {error}; correct `path`"
        ) from error
    separator = r"\n" if config.passage == "line" else r"\n\s*\n"
    parts = [part.strip() for text in texts for part in re.split(separator, text)]
    passages = [part for part in parts if part]
    if not passages:
        raise DataError(
            f"tool 'search': '{path}' holds no text, expected a text file, or a folder with *.txt "
            "or *.md files: correct `path`"
        )
    return passages
