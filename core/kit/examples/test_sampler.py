from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.sampler import Example, ExampleConfig
from posttrain.core.kit.samplers import PROMPTS, Script


def test_it_keeps_what_samplers_promise():
    assert_keeps_contract(Example)


def test_groups_that_are_all_right_are_left_out():
    script = Script()
    found = Example(ExampleConfig(oversample=2.0)).sample(script.request())
    assert len(found.groups) == PROMPTS
    assert all(set(script.verify(group)) == {0.0, 1.0} for group in found.groups)
