"""A run's own Prefect server: this module's class owns the process, `prefect_program` runs in it.

Loading Prefect's server takes 3 s of another core, so the process is started before anything else
of a run and waits: it touches the home only when the run begins.
"""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ResourceError
from posttrain.pipelines.run.prefect_env import prefect_settings

if TYPE_CHECKING:
    import prefect.context

START_SECONDS = 120
"""At least; Prefect's 20 are too few on a busy machine."""
STOP_SECONDS = 5.0
FLUSH_INTERVAL = "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL"
"""Seconds in which events are stored: 5 by Prefect's default, and a run waits for its last."""
REGISTER = "PREFECT_SERVER_REGISTER_BLOCKS_ON_START"
"""Entries of Prefect's block types in a new database: half a second, and no run reads them. The
server behind `posttrain ui` makes them."""

_running: list[OwnServer] = []


def _forget_exit_calls() -> None:
    """Drop what Prefect's workers do at the end of the process; they are done.

    Their calls raise in a process that is forked from this one, which then ends with exit code 1.
    """
    from prefect._internal.concurrency.services import _QueueServiceBase

    calls: Any = threading._threading_atexits  # type: ignore[attr-defined] # Any: not public
    calls[:] = [
        c for c in calls if not isinstance(getattr(c.func, "__self__", None), _QueueServiceBase)
    ]


class OwnServer:
    """A server for the length of this process, unless the user has configured one.

    The process ends with this one, however this one ends. Prefect's client would start a server at
    the first flow, wait for it, and leave it behind if this process is killed.
    """

    def __init__(self, home: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.RLock()
        self._before: prefect.context.SettingsContext | None = None
        self._begun = False
        if os.environ.get("PREFECT_API_URL"):
            return
        environment = {
            FLUSH_INTERVAL: "0.5",
            REGISTER: "false",
            **os.environ,
            **prefect_settings(home),
            # What Prefect gives to a server that its client starts.
            **{"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
            "PREFECT__SERVER_FINAL": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONSAFEPATH": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "posttrain.pipelines.run.prefect_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal is for the run
        )
        # Registered before Prefect is imported, so it runs after Prefect has sent its last records.
        atexit.register(self.stop)

    def begin(self) -> None:
        """Let it make its database and listen, unless a file of settings names another server.

        `configure_prefect` comes first: this imports Prefect. Of several runs one after another the
        first begins it.
        """
        if self._process is None or self in _running:
            return
        self._begun = True
        from prefect.settings import get_current_settings

        settings = get_current_settings()
        if settings.api.url is not None or not settings.server.ephemeral.enabled:
            self._process.kill()
            self.stop()
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"begin\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `wait` reports that

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """End it at once where the block raises before a run begins: it may still be loading."""
        try:
            yield
        except BaseException:
            if self._process is not None and not self._begun:
                self._process.kill()
                self.stop()
            raise

    def wait(self) -> None:
        """Until it answers; from then on it is the server of Prefect's clients in this process."""
        if self._process is None or self in _running:
            return
        import prefect.context
        from prefect.settings import (
            PREFECT_API_URL,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
            get_current_settings,
        )

        seconds = max(START_SECONDS, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        port = self._process.stdout.readline().strip() if ready else b""
        if not port:
            code = self._process.poll()
            state = f"no answer within {seconds} s" if code is None else f"exit code {code}"
            raise ResourceError(
                f"Prefect's own server did not start ({state}): see what it printed above, or set "
                "PREFECT_API_URL to a server that runs"
            )
        # For all threads; the environment stays free of an address that ends with this process.
        self._before = prefect.context.GLOBAL_SETTINGS_CONTEXT
        prefect.context.GLOBAL_SETTINGS_CONTEXT = prefect.context.SettingsContext(
            profile=prefect.context.get_settings_context().profile,
            settings=get_current_settings().copy_with_update(
                updates={
                    PREFECT_API_URL: f"http://127.0.0.1:{port.decode()}/api",
                    # Heartbeats say that a run is alive, to a server that ends with it; joining
                    # their thread takes a second.
                    PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
                }
            ),
        )
        _running.append(self)

    def wait_for_events(self, flow_run_id: str) -> None:
        """Until the end of the flow run is stored among the events, as what came before it is then.

        A stopped server was once seen to lose a run's last two seconds of events. Prefect's code
        can cancel a write that is under way; whether that was the cause was not shown.
        """
        if self._process is not None:
            from posttrain.pipelines.run.flow_records import wait_for_the_end

            wait_for_the_end(flow_run_id)

    def leave(self) -> None:
        """End it where the process goes on: its next run has a server of its own.

        Prefect's clients in this process send what they still have, and forget the address.
        """
        if self in _running:
            import prefect.context
            from prefect.events.worker import EventsWorker
            from prefect.logging.handlers import APILogWorker

            for worker in (EventsWorker, APILogWorker):
                worker.drain_all(timeout=STOP_SECONDS, at_exit=False)
            _forget_exit_calls()
            prefect.context.GLOBAL_SETTINGS_CONTEXT = self._before  # type: ignore[assignment]
            _running.remove(self)
        self.stop()
        atexit.unregister(self.stop)

    def stop(self) -> None:
        """End it as SIGTERM does, and wait; may be called twice.

        At the exit two threads may: whichever is second waits too, as the process ends after it and
        would leave a server that hangs.
        """
        with self._stopping:
            process = self._process
            if process is None:
                return
            assert process.stdin is not None
            try:
                with suppress(BrokenPipeError):
                    process.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
            finally:
                process.kill()
                process.wait()
                self._process = None


def running() -> list[OwnServer]:
    """The run's own server, if Prefect's clients in this process talk to one."""
    return list(_running)
