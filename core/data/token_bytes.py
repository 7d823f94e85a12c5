"""The bytes that each token of a tokenizer writes, by which two tokenisations are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core.data.chat import special_tokens
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import ResourceError
from posttrain.core.math.alignment import NO_GROUP, align

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "▁"  # how SentencePiece writes a space


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`pieces` has for each id what it writes; None for control tokens and ids of no token.

    `names` are the control tokens' own, by id; tokens that end a response, `ends`, are among them.
    `end` is the one of them with which a response is written.
    """

    pieces: tuple[bytes | None, ...]
    names: dict[int, str]
    ends: frozenset[int]
    end: int

    @classmethod
    def of(cls, chat: ChatTokenizer) -> TokenBytes:
        """Raises `ResourceError` where a text is not its tokens' pieces one after another."""
        tokenizer: PreTrainedTokenizerBase = chat.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        spelling = None if backend is None else _spelling(json.loads(backend.to_str())["decoder"])
        if spelling is None:
            raise ResourceError(
                f"the tokenizer of '{tokenizer.name_or_path}' is neither byte-level nor "
                "SentencePiece's, so which bytes a token writes is not known; use a teacher and a "
                "policy whose tokenizers are (most since 2023 are)"
            )
        added = tokenizer.added_tokens_decoder
        names = {index: name for name, index in special_tokens(tokenizer).items()}
        names = {i: n for i, n in names.items() if i not in added or added[i].special}
        vocabulary = tokenizer.get_vocab()
        ends = set(chat.end_token_ids)  # which some models do not mark as special
        names |= {index: token for token, index in vocabulary.items() if index in ends}
        pieces: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
        for token, index in vocabulary.items():
            if index in names:
                continue
            pieces[index] = token.encode() if index in added else spelling(token)
        return cls(tuple(pieces), names, frozenset(ends), chat.turn_end.token)

    def readable(self, ids: Sequence[int]) -> list[bytes]:
        """What `ids` write, up to the first control token."""
        found = []
        for token in ids:
            piece = self.pieces[token] if token < len(self.pieces) else None
            if piece is None:
                break
            found.append(piece)
        return found


def _decoders(decoder: Any) -> Iterator[dict[str, Any]]:
    """The steps of a decoder as tokenizers' files have it. Any: JSON."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoders(step)
        return
    yield decoder


def _spelling(decoder: Any) -> Any:
    """The function from a token's string to its bytes; None where there is none."""
    steps = list(_decoders(decoder))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    spaces = (step["content"] == " " for step in steps if step["type"] == "Replace")
    if "Metaspace" in kinds or any(spaces):
        return _sentence_piece
    return str.encode if kinds == {"Fuse"} else None


def _byte_level(token: str) -> bytes | None:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:  # added without being marked as such
        return None


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, the others come after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def matched_tokens(own: TokenBytes, other: TokenBytes) -> Tensor:
    """Pairs of ids [M, 2] of tokens in both: of equal bytes, or control tokens of equal names.

    The tokens that end a response are a pair too, where no name has paired either already. Each id
    is in one pair at most. Of several that write the same the last is taken: SentencePiece has
    single bytes in front of characters.
    """
    written = [{t: i for i, t in enumerate(each.pieces) if t} for each in (own, other)]
    named = [{name: i for i, name in each.names.items()} for each in (own, other)]
    pairs = [(written[0][t], i) for t, i in written[1].items() if t in written[0]]
    pairs += [(named[0][name], i) for name, i in named[1].items() if name in named[0]]
    if all(own.end != mine and other.end != theirs for mine, theirs in pairs):
        pairs.append((own.end, other.end))
    return torch.tensor(sorted(pairs, key=itemgetter(1)), dtype=torch.int64).view(-1, 2)


@dataclass(frozen=True, slots=True)
class ReadAnew:
    """A response in another model's tokens, `ids` with its end, and the groups of both sides.

    `groups` are of the tokens that were given, `other_groups` of `ids`: -1 = in none.
    """

    ids: tuple[int, ...]
    groups: list[int]
    other_groups: list[int]


@dataclass(frozen=True, slots=True)
class Rereader:
    """Reads what was written in tokens of `own` as `tokenizer` does, whose bytes are `other`.

    The end of a response that both read to it is a group of its own, the last one.
    """

    own: TokenBytes
    tokenizer: ChatTokenizer
    other: TokenBytes

    @classmethod
    def of(cls, own: ChatTokenizer, other: ChatTokenizer) -> Rereader:
        """Raises `ResourceError` as `TokenBytes.of`."""
        return cls(TokenBytes.of(own), other, TokenBytes.of(other))

    def read(self, ids: Sequence[int]) -> ReadAnew:
        """The text of `ids` up to the first control token, or to where it stops being text."""
        pieces = self.own.readable(ids)
        written = b"".join(pieces)
        text = _whole_characters(written)
        given = self.tokenizer.encode_response(text.decode())
        others = self.other.readable(given)
        # A tokenizer that changes the text, by its normal form or an unknown token, agrees so far.
        common = len(commonprefix([text, b"".join(others)]))
        if others and others[0].startswith(b" "):
            without = [others[0][1:], *others[1:]]  # SentencePiece may put a space in front
            shorter = len(commonprefix([text, b"".join(without)]))
            if shorter > common:
                others, common = without, shorter
        sides = align(*([end for end in _ends(each) if end <= common] for each in (pieces, others)))
        groups, other_groups = _filled(sides[0], len(ids)), _filled(sides[1], len(given))
        ended = len(pieces) == len(ids) - 1 and ids[-1] in self.own.ends
        if ended and common == len(written) and len(others) == len(given) - 1:
            groups[-1] = other_groups[-1] = max(groups) + 1
        return ReadAnew(given, groups, other_groups)


def _whole_characters(written: bytes) -> bytes:
    """The longest beginning of `written` that is UTF-8."""
    try:
        written.decode()
    except UnicodeDecodeError as error:
        return written[: error.start]
    return written


def _ends(pieces: Sequence[bytes]) -> list[int]:
    return list(accumulate(map(len, pieces)))


def _filled(groups: list[int], length: int) -> list[int]:
    return [*groups, *[NO_GROUP] * (length - len(groups))]
