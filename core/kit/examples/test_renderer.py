from posttrain.core.contracts import NoConfig
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.renderer import Example
from posttrain.core.kit.tiny import make_byte_tokenizer
from posttrain.core.types import Message


def test_it_keeps_what_renderers_promise() -> None:
    assert_keeps_contract(Example)


def test_a_conversation_by_hand() -> None:
    tokenizer = make_byte_tokenizer()
    renderer = Example(NoConfig())
    renderer.setup(tokenizer, ())
    rendered = renderer.render([Message("user", "Q"), Message("assistant", "A")])
    text = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    assert tokenizer.decode(list(rendered.token_ids)) == text
    sampled = [t for t, m in zip(rendered.token_ids, rendered.sampled, strict=True) if m]
    assert tokenizer.decode(sampled) == "A<|im_end|>"
