"""Text that is never read as control tokens, whatever it says."""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from posttrain.core.data.chat import special_tokens
from posttrain.core.errors import DataError
from posttrain.core.types import Message, ToolSchema

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

USUAL_FORM = re.compile(r"<[|｜].*[|｜]>|</?\w+>|\[/?[A-Z_]{3,}\]")
"""Added tokens that control a model, although not all tokenizers mark them as special."""
MARKUP = re.compile(
    r"</?(table|caption|t[rhd]|thead|tbody|tfoot|h\d|[ou]l|li|[bius]|em|su[bp]|"
    r"strong|code|blockquote)>"
)
"""Added tokens that are ordinary text (Gemma has them)."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and where each token's text begins and ends."""

    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


class ControlTokens:
    """The control tokens of a tokenizer: how text is kept apart from them, and is encoded.

    Text of users, tools and schemas holds none: neither special tokens, nor added tokens that the
    chat template writes (`<think>`, `<tool_call>`) or that are among `names`. Text of the
    assistant's may hold the latter.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        names: Collection[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        known = {n: i for n, i in special_tokens(tokenizer).items() if _can_be_kept_apart(n)}
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        strict = {n for n, i in known.items() if n in special or i in end_token_ids}
        template = str(tokenizer.chat_template or "")
        written = {n for n in known if n in template or n in names or _usual(n)}
        self.ids = {name: known[name] for name in strict | written}
        self._of_assistants, self._of_others = _any_of(strict), _any_of(self.ids)

    def protect(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[list[Message], list[ToolSchema], dict[str, str]]:
        """Messages and tools with placeholders in place of control tokens, and what they stand for.

        The mapping is empty when nothing had to be replaced.
        """
        said = json.dumps([_strings(m) for m in messages] + list(tools), ensure_ascii=False)
        salt = next(n for n in range(len(said) + 1) if f"zQ{n}Q" not in said)
        back: dict[str, str] = {}
        names: dict[str, str] = {}

        def placeholder(found: re.Match[str]) -> str:
            name = found[0]
            if name not in names:
                names[name] = f"zQ{salt}Q{len(names)}Qz"
                back[names[name]] = name
            return names[name]

        def others(text: str) -> str:
            return self._of_others.sub(placeholder, text)

        def kept(message: Message) -> Message:
            own = self._of_assistants if message.role == "assistant" else self._of_others
            calls = tuple(
                replace(call, name=others(call.name), arguments=_mapped(others, call.arguments))
                for call in message.tool_calls
            )
            return replace(
                message,
                content=own.sub(placeholder, message.content),
                reasoning=own.sub(placeholder, message.reasoning),
                tool_calls=calls,
                name=others(message.name),
                tool_call_id=others(message.tool_call_id),
            )

        return [kept(m) for m in messages], [_mapped(others, t) for t in tools], back

    def encode(
        self,
        text: str,
        back: Mapping[str, str],
        places: Sequence[int] = (),
        *,
        add_special_tokens: bool = False,
    ) -> tuple[Encoded, list[int]]:
        """The tokens of a rendered text, and `places` in it by the tokens' offsets.

        Placeholders become plain text again. Without any, these are the tokenizer's own tokens.
        """
        if not back:
            return self._own(text, add_special_tokens), list(places)
        plain = re.compile("|".join(map(re.escape, back)))
        if not self.tokenizer.is_fast:
            return self._by_pieces(text, back, plain, places)
        pieces: list[str] = []
        ends, moved, at, size = [0], [0], 0, 0
        either = re.compile(f"{plain.pattern}|{self._of_others.pattern}")
        nonces = self._renamed[1]
        for found in either.finditer(text):
            new = back.get(found[0]) or nonces[found[0]]
            pieces += [text[at : found.start()], new]
            size += found.start() - at + len(new)
            at = found.end()
            ends.append(at)
            moved.append(size - at)
        pieces.append(text[at:])
        backend, _, real = self._renamed
        made = backend.encode("".join(pieces), add_special_tokens=add_special_tokens)
        ids = tuple(real.get(token, token) for token in made.ids)
        positions = [place + moved[bisect_right(ends, place) - 1] for place in places]
        return Encoded(ids, tuple(made.offsets)), positions

    def encode_content(self, message: Message, after: str = "") -> tuple[int, ...]:
        """The tokens of a message's content alone, and of the format's text `after` it."""
        (safe,), _, back = self.protect([message], ())
        return self.encode(safe.content + after, back)[0].token_ids

    def _own(self, text: str, add_special_tokens: bool) -> Encoded:
        fast = self.tokenizer.is_fast
        made = self.tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=fast
        )
        ids = tuple(made["input_ids"])
        if fast:
            return Encoded(ids, tuple(made["offset_mapping"]))
        return Encoded(ids, self._found_offsets(ids))

    def _found_offsets(self, ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Offsets of a tokenizer that knows none, by the lengths of what its tokens decode to."""
        ends = [len(str(self.tokenizer.decode(list(ids[:n])))) for n in range(len(ids) + 1)]
        return tuple(zip(ends, ends[1:], strict=False))

    def _by_pieces(
        self, text: str, back: Mapping[str, str], plain: re.Pattern[str], places: Sequence[int]
    ) -> tuple[Encoded, list[int]]:
        """As `encode`, for tokenizers written in Python: piece by piece between control tokens."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for piece in re.split(f"({self._of_others.pattern})", text):
            size = len(piece)
            if piece in self.ids:
                ids.append(self.ids[piece])
                offsets.append((at, at + size))
            elif piece:
                said = plain.sub(lambda found: back[found[0]], piece)
                made = self.tokenizer(said, add_special_tokens=False, split_special_tokens=True)
                if set(made["input_ids"]) & set(self.ids.values()):
                    raise DataError(
                        f"the text {said[:60]!r} holds control tokens, which this model's "
                        "tokenizer cannot write as plain text: remove them from the data"
                    )
                ids += made["input_ids"]
                offsets += [(at, at + size)] * len(made["input_ids"])
            at += size
        return Encoded(tuple(ids), tuple(offsets)), list(places)

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """A copy of the tokenizer in which control tokens have other names that no text holds.

        With it the new names, and the ids of its added tokens in the tokenizer itself.
        """
        from tokenizers import Tokenizer

        key = secrets.token_hex(8)  # nobody can write these names; no token depends on them
        nonces = {name: f"\ue000{key}{i}\ue001" for i, name in enumerate(sorted(self.ids))}
        values = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in values["added_tokens"]:
            token["content"] = nonces.get(token["content"], token["content"])
        model = values["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {nonces.get(name, name): i for name, i in vocabulary.items()}
        elif isinstance(vocabulary, list):  # Unigram: pieces with scores
            model["vocab"] = [[nonces.get(name, name), score] for name, score in vocabulary]
        if model.get("unk_token") in nonces:
            model["unk_token"] = nonces[model["unk_token"]]
        values["truncation"] = values["padding"] = None
        made = Tokenizer.from_str(json.dumps(values))
        real = {
            made.token_to_id(nonces.get(name, name)): token
            for name, token in special_tokens(self.tokenizer).items()
        }
        return made, nonces, {k: v for k, v in real.items() if k is not None}


def _can_be_kept_apart(name: str) -> bool:
    """Whether a token's name is not an ordinary word or sign (some tokenizers pad with "!")."""
    return len(name) > 2 and not name.replace("▁", "").isalnum()


def _usual(name: str) -> bool:
    return bool(USUAL_FORM.fullmatch(name)) and not MARKUP.fullmatch(name)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    found = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, found)) or r"(?!)")


def _strings(message: Message) -> list[Any]:  # Any: JSON values
    calls = [[call.name, call.arguments] for call in message.tool_calls]
    return [message.content, message.reasoning, message.name, message.tool_call_id, calls]


def _mapped(change: Callable[[str], str], value: Any) -> Any:  # Any: a JSON value
    """The value with every text in it changed, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(k)): _mapped(change, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(change, item) for item in value]
    return value
