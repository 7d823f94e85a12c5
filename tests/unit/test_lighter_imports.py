"""Libraries that are loaded with less work are the same libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from typing import Any

from posttrain.core.runtime.lighter_imports import distributions_of_packages, install

LATER = ("sklearn.metrics", "scipy.optimize")
LOAD = """
import hashlib, importlib.metadata, inspect, json, sys
{first}
import transformers.generation.candidate_generator as generator
import transformers.loss.loss_utils
import transformers.models
import torch._library.simple_registry as registry
import torch._library.utils as library
loaded = [name for name in {later} if name in sys.modules]
top, models = (vars(sys.modules[name]) for name in ("transformers", "transformers.models"))
missing = top["_object_missing_backend"].items()
rows = sys.modules["transformers.loss.loss_rt_detr"].linear_sum_assignment([[1, 0], [0, 2]])[1]
curve = generator.roc_curve([0, 1, 1], [0.1, 0.2, 0.9])[:2]
print(json.dumps({{
    "names": [sorted(each["_class_to_module"].items()) for each in (top, models)],
    "missing": sorted((name, sorted(map(str, backends))) for name, backends in missing),
    "assigned": [int(row) for row in rows],
    "curve": [list(map(float, part)) for part in curve],
    "source": hashlib.sha256(inspect.getsource(generator).encode()).hexdigest(),
    "loader": type(generator.__spec__.loader).__name__,
    "python's own": importlib.metadata.packages_distributions.__module__,
    "operators": sorted((name, kernel.source) for name, entry in registry.singleton._data.items()
                        for kernel in entry.fake_impl.kernels),
    "callers": library.get_source.__module__,
    "left": [name for name in {later} if sys.modules[name].__spec__ is None],
    "loaded": loaded,
}}))
"""


def loaded(first: str) -> dict[str, Any]:
    """What a process sees of the libraries."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(first=first, later=LATER)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_transformers_is_the_same_and_loads_neither_sklearn_nor_most_of_scipy() -> None:
    usual, lighter = loaded(""), loaded("import posttrain.core")
    assert usual.pop("loaded") == list(LATER)
    assert lighter.pop("loaded") == []
    assert (usual.pop("callers"), lighter.pop("callers")) == (
        "torch._library.utils",
        install.__module__,
    )
    assert len(usual["names"][0]) > 3_000
    assert len(usual["operators"]) > 50
    assert lighter == usual


def test_packages_have_the_distributions_that_python_finds() -> None:
    found, usual = distributions_of_packages(), packages_distributions()
    assert {name: sorted(of) for name, of in found.items()}.items() >= {
        name: sorted(usual[name]) for name in ("torch", "transformers", "yaml", "sklearn")
    }.items()
    assert found.keys() & usual.keys() == found.keys()


def test_it_is_installed_once() -> None:
    install()
    assert sum(type(finder).__module__ == install.__module__ for finder in sys.meta_path) == 1
