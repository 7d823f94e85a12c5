"""Prefect's own server, started while the rest of a run is loaded: 8 s of another core."""

from __future__ import annotations

import threading
from pathlib import Path

from posttrain.core.locks import locked


class OwnServer:
    """The server that Prefect starts for the length of a run, where none is configured.

    Prefect would start it at the first flow and wait. It is the same one, started earlier, and it
    ends with this process however that ends.
    """

    def __init__(self, home: Path) -> None:
        from prefect.settings import get_current_settings

        settings = get_current_settings()
        self._starting: threading.Thread | None = None
        if settings.api.url is not None or not settings.server.ephemeral.enabled:
            return
        # Imported here, as two threads that import at once can see half-made modules.
        from posttrain.pipelines.guarded_server import GuardedServer

        self._starting = threading.Thread(
            target=self._start,
            args=(GuardedServer(), home / "prefect" / ".lock-start"),
            daemon=True,
            name="prefect-server",
        )
        self._starting.start()

    def _start(self, server: object, lock: Path) -> None:
        try:
            # One at a time: the first start in a home makes the tables of its database.
            with locked(lock):
                server.start()  # type: ignore[attr-defined]
        except Exception:
            return  # the flow tries again, and says what is wrong

    def wait_for_events(self, flow_run_id: str) -> None:
        """Until the end of the flow run is stored among the events, as what came before it is then.

        A stopped server was once seen to lose a run's last two seconds of events. Prefect's code
        can cancel a write that is under way; whether that was the cause was not shown.
        """
        if self._starting is not None:
            from posttrain.pipelines.flow_records import wait_for_the_end

            wait_for_the_end(flow_run_id)

    def wait(self) -> None:
        """Until it answers, or has failed to start: a flow must not begin while it is starting."""
        if self._starting is not None:
            self._starting.join()
