"""An S3 server, moto's, as a process of its own, and a link to it that can be cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from posttrain.core.runtime.processes import free_ports

BUCKET = "stages"
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-these-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Link:
    """Passes connections on to a port of this machine until it is cut."""

    def __init__(self, to: int) -> None:
        self._to = to
        (self.port,) = free_ports(1)
        self._open: list[socket.socket] = []
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def restore(self) -> None:
        self._is_cut = False

    def cut(self) -> None:
        """From now on connections end, those that are open as well as new ones."""
        self._is_cut = True
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open = []

    def _accept(self) -> None:
        with socket.create_server(("127.0.0.1", self.port)) as listener:
            while True:
                ours, _ = listener.accept()
                if self._is_cut:
                    ours.close()
                    continue
                theirs = socket.create_connection(("127.0.0.1", self._to))
                self._open += [ours, theirs]
                for one, other in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


class S3Server:
    """moto's server with one bucket; `variables` lead a command there, through `link`."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **KEYS},
        )
        end = time.monotonic() + 120
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.1)
        self.link = Link(port)
        self.endpoint = f"http://127.0.0.1:{port}"
        self.files().mkdir(BUCKET)

    @property
    def variables(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.link.port}"}

    def files(self):  # type: ignore[no-untyped-def]  # fsspec has no types
        """The server's objects, past the link."""
        import s3fs

        return s3fs.S3FileSystem(
            key=KEYS["AWS_ACCESS_KEY_ID"],
            secret=KEYS["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=self.endpoint,
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
