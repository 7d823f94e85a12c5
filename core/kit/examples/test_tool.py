from posttrain.core.contracts import NoConfig
from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.tool import Example


def test_it_keeps_what_tools_promise() -> None:
    assert_keeps_contract(Example)


def test_calls_by_text_and_by_json() -> None:
    tool = Example(NoConfig())
    assert tool.call("a1 b").text == "2"
    assert tool.call_json({"text": "abc"}).text == "3"
    assert tool.call(" ").failed
