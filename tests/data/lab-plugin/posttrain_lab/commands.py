"""A command."""

from posttrain.core.hooks import hookimpl


def lab_note(text: str) -> None:
    """Print a note."""
    print(f"lab: {text}")


@hookimpl
def posttrain_commands():
    return [lab_note]
