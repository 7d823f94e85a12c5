from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.reward import Example, ExampleConfig
from posttrain.core.kit.rewards import sample_of


def test_it_keeps_what_rewards_promise() -> None:
    assert_keeps_contract(Example)


def test_shorter_responses_score_more() -> None:
    short, long = sample_of("a", tokens=range(16)), sample_of("b", tokens=range(99))
    scores = Example(ExampleConfig(max_tokens=64)).score([short, long])
    assert [score.value for score in scores] == [0.75, 0.0]
