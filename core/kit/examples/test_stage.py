from posttrain.core.kit.checks import assert_keeps_contract
from posttrain.core.kit.examples.stage import Example, ExampleConfig
from posttrain.core.kit.stages import ScriptedRun


def test_it_keeps_what_stages_promise():
    assert_keeps_contract(Example)


def test_long_prompts_are_left_out(tmp_path):
    config = ExampleConfig(kind="example", num_problems=20, max_chars=2)
    found = Example(config).run(ScriptedRun(tmp_path, {}))
    assert found.metrics == {"plugin/kept": 10.0}  # "0," to "9,"
