"""Chat template to token ids and back: the only place that tokenises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.errors import ResourceError
from posttrain.core.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTokenizer:
    """A tokenizer with what training needs: prompts, responses with their end, padding."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        if tokenizer.eos_token_id is None:
            raise ResourceError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no end-of-sequence token: set "
                "eos_token in its tokenizer_config.json"
            )
        self.eos_token_id: int = int(tokenizer.eos_token_id)
        pad = tokenizer.pad_token_id
        self.pad_token_id: int = self.eos_token_id if pad is None else int(pad)
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, path: Path, system_prompt: str | None = None) -> ChatTokenizer:
        # Late: transformers takes seconds, and commands that only read a config import this module.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ResourceError(
                f"model directory '{path}' has no usable tokenizer: {str(error).splitlines()[0]}"
            ) from error
        return cls(tokenizer, system_prompt)

    def token_text(self, token: int) -> str:
        """The text of one token id by itself; of a special token its name."""
        if token not in self._token_texts:
            self._token_texts[token] = str(self.tokenizer.decode([token]))
        return self._token_texts[token]

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the prompt, up to where the assistant's answer begins."""
        return self.encode_chat([{"role": "user", "content": problem.prompt}])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's next answer begins.

        A model without a chat template gets the messages' texts, a line each. The system prompt of
        the run is put first unless the messages bring their own.
        """
        if self.tokenizer.chat_template is None:
            text = "".join(message["content"] + "\n" for message in messages)
            return tuple(self.tokenizer(text)["input_ids"])
        chat_messages = [dict(message) for message in messages]
        if self.system_prompt is not None and chat_messages[0]["role"] != "system":
            chat_messages.insert(0, {"role": "system", "content": self.system_prompt})
        chat = self.tokenizer.apply_chat_template(
            chat_messages, add_generation_prompt=True, tokenize=False
        )
        # The template writes the special tokens itself.
        return tuple(self.tokenizer(str(chat), add_special_tokens=False)["input_ids"])

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole response, its end-of-sequence token included."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return (*ids, self.eos_token_id)

    def encode_text(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids of `text` alone, in which special tokens are plain text unless `special`.

        The piece is never joined to what stands before it, so that nobody's tokens change.
        """
        found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=not special)
        return tuple(found["input_ids"])

    def decode_response(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
