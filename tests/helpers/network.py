"""A network namespace behind a bridge: another machine, to which the link can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def can_cut() -> bool:
    """Whether this user may make network namespaces."""
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"pt-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.SubprocessError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Namespace:
    """`here` and `there` are the addresses of its two ends; `inside` starts a command in it."""

    name: str
    here: str
    there: str

    @property
    def inside(self) -> tuple[str, ...]:
        return "ip", "netns", "exec", self.name

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Self]:
        """One with its own bridge; both are gone after the block."""
        number = os.getpid() % 250
        made = cls(f"pt{os.getpid()}", f"10.231.{number}.1", f"10.231.{number}.2")
        bridge, outer, inner = f"ptb{os.getpid()}", f"pto{os.getpid()}", f"pti{os.getpid()}"
        try:
            _ip("netns", "add", made.name)
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{made.here}/24", "dev", bridge)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", outer, "master", bridge)
            _ip("link", "set", inner, "netns", made.name)
            for link in (bridge, outer):
                _ip("link", "set", link, "up")
            _ip("-n", made.name, "addr", "add", f"{made.there}/24", "dev", inner)
            for link in ("lo", inner):
                _ip("-n", made.name, "link", "set", link, "up")
            yield made
        finally:
            for words in (
                ("netns", "del", made.name),
                ("link", "del", outer),
                ("link", "del", bridge),
            ):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*words)

    def cut(self) -> None:
        """No packet passes any more; both ends still have a carrier."""
        _ip("link", "set", f"pto{os.getpid()}", "nomaster")
