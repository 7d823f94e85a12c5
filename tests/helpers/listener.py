"""A server of stand-in answers that takes many connections at once."""

from __future__ import annotations

from http.server import ThreadingHTTPServer


class Listener(ThreadingHTTPServer):
    """Threads end with the test; the default queue of 5 drops connections when 20 come at once."""

    request_queue_size = 64
    daemon_threads = True
