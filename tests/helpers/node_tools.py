"""Tools that wait, fail or end their process, for tests of environments on nodes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pydantic import Field

from posttrain.core.contracts import PluginConfig, Tool, ToolResult


class WaitingConfig(PluginConfig):
    """Settings of `waiting`."""

    seconds: float = Field(default=0.0, description="what each call takes")
    folder: Path | None = Field(default=None, description="where calls leave marks")


class Waiting(Tool[WaitingConfig]):
    """Says its argument twice, after a while and whatever harm the argument asks for."""

    name = "waiting"
    Config = WaitingConfig
    description = "doubles"
    at_once = 5000

    def call(self, arguments: str) -> ToolResult:
        time.sleep(self.config.seconds)
        if arguments == "exit":
            os._exit(3)
        if arguments.startswith("once") and self._mark(arguments) == 1:
            raise OSError("not this time")
        if arguments == "never":
            self._mark(arguments)
            raise OSError("never")
        if arguments == "pid":
            return ToolResult(str(os.getpid()))
        return ToolResult(arguments * 2)

    def _mark(self, name: str) -> int:
        """Note this call; how many there were by now."""
        if self.config.folder is None:
            return 0
        with (self.config.folder / name).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return len((self.config.folder / name).read_text().splitlines())


class Single(Waiting):
    """The same for one call at a time."""

    name = "single"
    at_once = 1
