"""The first process of a long-lived sandbox: it runs commands one after another. See `session`.

It is the main program inside, in a bare interpreter that knows the standard library only. Requests
come on stdin and answers go to stdout, as frames: two lengths, a JSON object, and bytes. The
commands cannot reach these descriptors. The deadline of last resort, the limit of memory and the
final kill do not rest on this process: they are the guard's, outside.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import tarfile
import time
from typing import Any

Header = Any  # a JSON object
LENGTHS = struct.Struct(">II")
DRAIN_S = 0.2
"""Seconds of reading what a command wrote before it ended."""
CWD = 9
SHELLS = ("/usr/bin/bash", "/bin/bash", "/usr/bin/sh", "/bin/sh")
# Where the shell ends is where the next one begins; a program that replaces it says nothing.
SCRIPT = f"trap 'pwd >&{CWD}' EXIT\neval \"$1\""
SKIPPED = (stat.S_IFSOCK, stat.S_IFBLK, stat.S_IFCHR)


def pack(header: Header, payload: bytes = b"") -> bytes:
    """A frame."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def unpack(data: bytearray) -> tuple[Header, bytes] | None:
    """The first frame in `data`, which is taken out of it; None while it is not whole."""
    if len(data) < LENGTHS.size:
        return None
    header, payload = LENGTHS.unpack_from(data)
    middle = LENGTHS.size + header
    if len(data) < middle + payload:
        return None
    found = json.loads(bytes(data[LENGTHS.size : middle])), bytes(data[middle : middle + payload])
    del data[: middle + payload]
    return found


class Server:
    """Answers requests until there are no more."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests, self.answers = requests, answers
        self.ended, wake = os.pipe()
        for descriptor in (self.ended, wake):
            os.set_blocking(descriptor, False)
        # A handler, since children of a process that ignores the signal cannot be waited for.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        data = bytearray()
        while True:
            request = unpack(data)
            if request is None:
                if self.requests in self._ready(None):
                    part = os.read(self.requests, 1 << 20)
                    if not part:
                        return
                    data += part
                self._reap(0)
                continue
            try:
                answer = getattr(self, "do_" + request[0]["op"])(*request)
            except (OSError, ValueError, KeyError, MemoryError, tarfile.TarError) as error:
                answer = pack({"error": f"{type(error).__name__}: {error}"[:300]})
            left = memoryview(answer)
            while left:
                left = left[os.write(self.answers, left) :]

    def do_begin(self, request: Header, payload: bytes) -> bytes:
        """Take the limits, make the folders, and put the files there."""
        self.base: str = request["base"]
        self.scratch: list[str] = request["scratch"]
        self.limits = request["limits"]
        self.environment = request["environment"]
        self.shell = next(path for path in SHELLS if os.path.exists(path))
        if payload:
            self._extract(payload)
        for name in request["folders"]:
            os.makedirs(self._place(name), exist_ok=True)
        return pack({"shell": self.shell})

    def do_put(self, request: Header, payload: bytes) -> bytes:
        self._extract(payload)
        return pack({})

    def do_get(self, request: Header, payload: bytes) -> bytes:
        """A file's bytes, up to a limit; what is not a file is an error."""
        path = self._place(request["path"])
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is not a file")
            return pack({}, file.read(request["limit"]))

    def do_snapshot(self, request: Header, payload: bytes) -> bytes:
        """The scratch folders as a tar file; modes are kept, also those that forbid reading."""
        made, shut = io.BytesIO(), dict[str, int]()
        try:
            with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
                self._add_all(tar, request["limit"], shut)
        finally:
            for path in reversed(list(shut)):
                os.chmod(path, shut[path])
        return pack({}, made.getvalue())

    def _add_all(self, tar: tarfile.TarFile, left: int, shut: dict[str, int]) -> None:
        """Add all files, of `left` bytes at most; `shut` gets the modes of what is opened."""
        own = {os.lstat(path).st_dev for path in self.scratch}
        waiting = [os.path.relpath(path, self.base) for path in self.scratch]
        while waiting:
            name = waiting.pop()
            path = os.path.join(self.base, name)
            try:
                found = os.lstat(path)
                if stat.S_IFMT(found.st_mode) in SKIPPED or found.st_dev not in own:
                    continue  # an interpreter's folder may be shown inside one of these
                entry = tar.gettarinfo(path, name)
                needed = 0o700 if entry.isdir() else 0o400
                if (entry.isdir() or entry.isreg()) and entry.mode & needed != needed:
                    os.chmod(path, needed)
                    shut[path] = entry.mode
                elif entry.islnk():  # its file may have been made readable
                    first = os.path.join(self.base, entry.linkname)
                    entry.mode = shut.get(first, entry.mode)
                data = b""
                if entry.isreg():
                    data = _contents(path, left)
                    entry.size = len(data)
                elif entry.isdir():
                    waiting += [os.path.join(name, each) for each in os.listdir(path)]
            except FileNotFoundError:  # a process removed it just now
                continue
            left -= 512 + len(data)
            if left < 0:
                raise ValueError("there are too many files, or they are too large")
            tar.addfile(entry, io.BytesIO(data))

    def do_run(self, request: Header, payload: bytes) -> bytes:
        """Run a command to its end, or to its time limit."""
        began = time.monotonic()
        output, writer = os.pipe()
        folder, folder_writer = os.pipe()
        for descriptor in (output, folder):
            os.set_blocking(descriptor, False)
        child = os.fork()
        if child == 0:
            self._become(request, writer, folder_writer)
        os.close(writer)
        os.close(folder_writer)
        said = Output(output, request["output"])
        status, late = None, False
        while status is None:
            left = began + request["wall_s"] - time.monotonic()
            if left <= 0:
                late = True
                _kill_group(child)
            ready = self._ready(1.0 if late else left, said)
            if output in ready:
                said.read()
            status = self._reap(child)
        limit = time.monotonic() + DRAIN_S
        while said.read() and time.monotonic() < limit:
            pass
        try:
            cwd = os.read(folder, 4096).decode(errors="surrogateescape").rstrip("\n")
        except BlockingIOError:  # something that goes on holds the pipe, and the shell said nothing
            cwd = ""
        for descriptor in (output, folder):
            os.close(descriptor)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        header = {
            "exit_code": code,
            "late": late,
            "seconds": time.monotonic() - began,
            "omitted": said.omitted,
            "head": len(said.head),
            "cwd": self._inner(cwd) if cwd.startswith(self.base) else request["cwd"],
        }
        return pack(header, bytes(said.head + said.tail))

    def _become(self, request: Header, writer: int, folder: int) -> None:
        """Turn this process, a fork, into the shell that runs the command."""
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, null), (1, writer), (2, writer), (CWD, folder)):
                os.dup2(source, target)
            cwd = self._folder(request["cwd"])
            for name, (soft, hard) in self.limits.items():
                which = getattr(resource, name)
                _, most = resource.getrlimit(which)
                if most != resource.RLIM_INFINITY:  # only root may go up again
                    soft, hard = min(soft, most), min(hard, most)
                resource.setrlimit(which, (soft, hard))
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            variables = {**self.environment, "PWD": cwd}
            command = request["command"].encode("utf-8", "replace")
            os.execve(self.shell, [self.shell, "-c", SCRIPT, self.shell, command], variables)
        except BaseException as error:  # the command's output says it, as a shell would
            os.write(1, f"{self.shell}: {error}\n".encode())
        finally:
            os._exit(126)

    def _folder(self, wanted: str) -> str:
        """Go there; where it is gone, to the first scratch folder."""
        for path in (self._place(wanted), self.scratch[0]):
            try:
                os.chdir(path)
                return path
            except OSError:
                continue
        raise OSError(f"there is no {wanted}")

    def _place(self, path: str) -> str:
        """Where the path /app/x is: at some levels / is not the session's own, and base is."""
        return f"{self.base}/{path.lstrip('/')}" if self.base != "/" else path

    def _inner(self, place: str) -> str:
        """The path of which `place` is the place."""
        return "/" + place[len(self.base) :].lstrip("/")

    def _extract(self, payload: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(payload)) as tar:
            if hasattr(tarfile, "fully_trusted_filter"):
                tar.extraction_filter = tarfile.fully_trusted_filter
            tar.extractall(self.base)  # what it holds was in this or in another sandbox

    def _ready(self, seconds: float | None, said: Output | None = None) -> list[int]:
        """Which of the requests or of `said` can be read, after `seconds` at most."""
        wanted = [self.ended]
        if said is None:
            wanted.append(self.requests)
        elif said.open:
            wanted.append(said.descriptor)
        ready, _, _ = select.select(wanted, [], [], seconds if seconds is None else max(0, seconds))
        if self.ended in ready:
            os.read(self.ended, 1 << 12)
        return ready

    def _reap(self, child: int) -> int | None:
        """Collect what has ended; the status of `child`, if it is among it."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == child:
                found = status


class Output:
    """What a command writes: the beginning and the end of it, `limit` bytes together."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor, self.half = descriptor, limit // 2
        self.head, self.tail = bytearray(), bytearray()
        self.omitted, self.open = 0, True

    def read(self) -> bool:
        """Take what is there; whether there may be more."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.open = False
            return False
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        beyond = max(0, len(self.tail) - self.half)
        self.omitted += beyond
        del self.tail[:beyond]
        return True


def _contents(path: str, limit: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        return file.read(limit + 1)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError as error:
        if error.errno != errno.ESRCH:
            raise


def main() -> None:
    """Serve on what stdin and stdout are, and keep both from the commands."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Server(requests, answers).serve()


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
