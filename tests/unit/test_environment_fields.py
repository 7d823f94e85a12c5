"""The limits that a stage sets for an environment, and the fields of environments themselves."""

from __future__ import annotations

from posttrain.core.config.sections import EnvironmentComponent
from posttrain.core.plugin_manager import PluginManager


def test_no_limit_takes_the_name_of_a_plugin_s_field() -> None:
    """Both are written in one place, and the limit would win without a word."""
    limits = set(EnvironmentComponent.model_fields) - {"name"}
    for entry in PluginManager().entries("environment"):
        assert not limits & set(entry.cls.Config.model_fields), entry.name
