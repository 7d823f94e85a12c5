"""Stop strings: which token completes one in the decoded text of a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens without a character of their own (a part of one, a special token) that may stand among
# those of a stop string.
SPARE_TOKENS = 16


class StopStrings:
    """Strings that end a response, looked for at its end only.

    Only the last tokens are decoded, as many as the longest string may take, so a response costs
    the same at every token. A string that began in the prompt is not completed by the response.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str]) -> None:
        self.decode, self.strings = decode, tuple(strings)
        self.window = max(map(len, self.strings)) + SPARE_TOKENS

    def completed_by_last(self, ids: Sequence[int]) -> bool:
        """Whether a string stands in the text of `ids` that did not before the last one."""
        text = self.decode(ids[-self.window :])
        return any(string in text for string in self.strings)
