"""What every plugin promises, whatever its kind."""

from __future__ import annotations

import json
import pickle
import re
import sys
from importlib import import_module

from pydantic import ValidationError

from posttrain.core.contracts import CONTRACTS
from posttrain.core.kit.checks import Subject, check, expect, expect_equal
from posttrain.core.runtime.plugin_files import file_of


def fields_of(subject: Subject) -> dict[str, object]:
    """The settings that it has no default for; a stage's own name is one of them."""
    kind = {"kind": subject.entry.name} if subject.entry.kind == "stage" else {}
    return {**kind, **subject.fields}


@check("settings survive the way through JSON")
def _through_json(subject: Subject) -> None:
    config = subject.cls.Config.model_validate(fields_of(subject))
    again = json.loads(json.dumps(config.model_dump(mode="json")))
    expect_equal(subject.cls.Config.model_validate(again), config, "its config after JSON")


@check("an unknown field is refused")
def _unknown_field(subject: Subject) -> None:
    try:
        subject.cls.Config.model_validate({**fields_of(subject), "no_such_field": 1})
    except ValidationError as error:
        expect("no_such_field" in str(error), "the refusal does not name the field")
        return
    expect(False, "its Config takes any field: derive it from PluginConfig, with no other settings")


@check("every field has a description")
def _descriptions(subject: Subject) -> None:
    silent = [n for n, info in subject.cls.Config.model_fields.items() if not info.description]
    expect(not silent, f"write Field(description=...) for {silent}")


@check("the docstring has a formula or a source")
def _docstring(subject: Subject) -> None:
    doc = subject.cls.__doc__ or ""
    expect(
        doc.strip() and doc != (CONTRACTS[subject.entry.kind].__doc__ or ""),
        "the class has no docstring of its own: say what it computes, and where it is from",
    )
    text = doc + (sys.modules[subject.cls.__module__].__doc__ or "")
    expect(
        re.search(r"[Ss]ources?\b|[Ff]ormula| = |arXiv:", text),
        "neither the docstring of the class nor of its module has a formula ('R = ...') or a "
        "source ('Source: ...')",
    )


@check("another process can import it and take its settings")
def _pickles(subject: Subject) -> None:
    cls = subject.cls
    expect(
        "<locals>" not in cls.__qualname__ and cls.__module__ != "__main__",
        "the class is made inside a function or a script: define it at the top of a module",
    )
    if file_of(cls.__module__) is None:
        found = import_module(cls.__module__)
        expect(hasattr(found, cls.__qualname__), f"{cls.__module__} has no {cls.__qualname__}")
    fields = cls.Config.model_validate(fields_of(subject)).model_dump(mode="json")
    expect_equal(pickle.loads(pickle.dumps(fields)), fields, "its settings, pickled")  # noqa: S301
