"""The public names of `posttrain`: what they cost, that their signatures stay, that they are
documented.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import posttrain

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"


def signatures() -> list[str]:
    """Each public name with its signature, and those of `Run`'s members, as the page lists them."""
    found = []
    for name in posttrain.__all__:
        value = getattr(posttrain, name)
        if inspect.isfunction(value):
            found.append(f"posttrain.{name}{signature(value)}")
        elif issubclass(value, Exception):
            found.append(f"posttrain.{name}({value.__base__.__name__})")
        else:
            found.append(f"posttrain.{name}")
            found += [f"posttrain.{name}.{line}" for line in members(value)]
    return found


def signature(function: Callable[..., object]) -> str:
    """With annotations as they are written."""
    return re.sub(r"'([^']+)'", r"\1", str(inspect.signature(function)))


def members(cls: type) -> list[str]:
    """The public members of a class; fields of a dataclass by their type."""
    fields = [
        f"{name}: {kind}" for name, kind in inspect.get_annotations(cls).items() if name[0] != "_"
    ]
    rest = []
    for name, value in vars(cls).items():
        if name[0] == "_" or name in inspect.get_annotations(cls):
            continue
        getter = getattr(value, "fget", None) or getattr(value, "func", None)
        if getter is not None:
            rest.append(f"{name}: {inspect.signature(getter).return_annotation}")
        elif inspect.isfunction(value):
            rest.append(f"{name}{signature(value)}")
    return [*fields, *sorted(rest)]


def test_the_page_lists_every_public_name_with_its_signature() -> None:
    """To change one on purpose: `python -m tests.unit.test_public_api` writes the list."""
    text = PAGE.read_text("utf-8")
    assert listed(text) == signatures()


def listed(text: str) -> list[str]:
    """The lines of the page's list."""
    match = re.search(r"<!-- signatures -->\n```text\n(.*?)```", text, re.DOTALL)
    assert match is not None
    return match[1].splitlines()


def test_every_public_name_has_a_docstring() -> None:
    for name in posttrain.__all__:
        value = getattr(posttrain, name)
        assert inspect.getdoc(value), name
    run = posttrain.Run
    for name, value in vars(run).items():
        if not name.startswith("_"):
            assert inspect.getdoc(value), f"Run.{name}"


def test_names_for_type_checkers_are_those_that_are_loaded() -> None:
    source = (Path(posttrain.__file__)).read_text("utf-8")
    imported = source.split("if TYPE_CHECKING:")[1].split("__all__")[0]
    assert set(re.findall(r"\b[A-Za-z]\w+\b(?=,|\n)", imported)) >= set(posttrain.__all__)
    assert set(posttrain._PLACES) == set(posttrain.__all__)
    assert set(posttrain.__all__) <= set(dir(posttrain))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = posttrain.nothing  # type: ignore[attr-defined]


def test_importing_it_loads_nothing_heavy() -> None:
    program = (
        "import sys, posttrain\n"
        "heavy = ('torch', 'pydantic', 'mlflow', 'prefect', 'transformers', 'pandas', 'rich')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.alone
def test_importing_it_takes_less_than_a_tenth_of_a_second() -> None:
    program = (
        "import time\nbegan = time.perf_counter()\nimport posttrain\n"
        "print(time.perf_counter() - began)"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        seconds.append(float(done.stdout))
        time.sleep(0.1)
    assert min(seconds) < 0.1


def main() -> None:
    """Write the list of the page from the code."""
    lines = "\n".join(signatures())
    text = re.sub(
        r"(<!-- signatures -->\n```text\n).*?```",
        lambda match: f"{match[1]}{lines}\n```",
        PAGE.read_text("utf-8"),
        flags=re.DOTALL,
    )
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()


def test_small_numbers_of_overrides_stay_numbers() -> None:
    from posttrain.core.config.positions import read_value
    from posttrain.pipelines.api.calls import as_overrides

    given = {"a": 1e-5, "b": [1e30, "1e-05", None, True], "c": {"d": "x: y"}, "e": "two\nlines"}
    read = dict(text.split("=", 1) for text in as_overrides(given))
    assert {name: read_value(text) for name, text in read.items()} == given
