"""What presets promise."""

from __future__ import annotations

import json

from posttrain.core.config.presets import axes_of
from posttrain.core.kit.checks import Subject, check, expect, expect_equal


@check("what it sets is YAML, the same each time, and fits its kind of stage", "algorithm")
def _fields(subject: Subject) -> None:
    preset = subject.build()
    fields = preset.expand()
    expect_equal(json.loads(json.dumps(fields)), json.loads(json.dumps(preset.expand())), "fields")
    expect(fields, "it sets nothing")
    expect(preset.stage in ("rl", "preference"), f"`stage` is {preset.stage!r}")


@check("each axis names an installed plugin with settings that it takes", "algorithm")
def _axes(subject: Subject) -> None:
    expect(axes_of(subject.build(), subject.manager), "it names no plugin")
