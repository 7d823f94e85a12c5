"""The process between us and the program: it starts it, watches it, and kills all of it.

It runs in a bare interpreter. On stdin it gets a job, on stdout it writes one JSON object, and it
kills everything and ends when the pipe `alive` is closed at its other end: its parent is gone.
"""

from __future__ import annotations

import binascii
import fcntl
import json
import os
import pwd
import select
import signal
import sys
import time
from collections.abc import Collection

from posttrain.core.sandbox import kernel
from posttrain.core.sandbox.confine import Ends, become_program, drop_to
from posttrain.core.sandbox.job import Job, load

_PAGE = os.sysconf("SC_PAGE_SIZE")
_GIVE_UP_S = 5.0
_CLEAN_S = 10.0


class Tree:
    """Descendants of this process. With `uid`, which nothing else has, killing is one call."""

    def __init__(self, uid: int | None) -> None:
        self.uid = uid
        self.left = 0

    def members(self) -> list[int]:
        found: list[int] = []
        waiting = [os.getpid()]
        while waiting:
            pid = waiting.pop()
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as file:
                        waiting += map(int, file.read().split())
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            found.append(pid)
        return found[1:]

    def resident_bytes(self, without: Collection[int] = ()) -> int:
        """Sum of resident memory; pages that are shared count once for each process."""
        pages = 0
        for pid in set(self.members()).difference(without):
            try:
                with open(f"/proc/{pid}/statm") as file:
                    pages += int(file.read().split()[1])
            except (FileNotFoundError, ProcessLookupError):  # as above
                continue
        return pages * _PAGE

    def kill(self, child: int) -> int | None:
        """Kill and reap all; the wait status of `child`. `left` counts what would not die."""
        status: int | None = None
        limit = time.monotonic() + _GIVE_UP_S
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.left = 0
                return status
            if pid == child:
                status = how
            elif pid == 0:
                if time.monotonic() > limit:
                    self.left = len(self.members())
                    return status
                self._strike()
                time.sleep(0.001)

    def _strike(self) -> None:
        if self.uid is not None:
            self._strike_uid(self.uid)
            return
        self.strike_all_but(())

    def strike_all_but(self, kept: Collection[int]) -> None:
        """Send SIGKILL to all but these."""
        # A stopped process cannot fork while the others are looked for.
        seen: set[int] = set()
        while new := set(self.members()).difference(seen, kept):
            seen |= new
            for pid in new:
                _send(pid, signal.SIGSTOP)
        for pid in seen:
            _send(pid, signal.SIGKILL)

    def _strike_uid(self, uid: int) -> None:
        helper = os.fork()
        if helper == 0:
            try:
                drop_to(uid)
                os.kill(-1, signal.SIGKILL)  # all of this uid but the caller itself
            except OSError:  # none is left
                pass
            finally:
                os._exit(0)
        os.waitpid(helper, 0)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended
        pass


_LOOK_S = 0.05
_DRAIN_S = 0.2


class Stream:
    """The read end of a pipe, and what came out of it, up to `limit` bytes."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor = descriptor
        self.limit = limit
        self.parts: list[bytes] = []
        self.size = 0
        self.open = True

    def read(self) -> bool:
        """Take what is there; whether there may be more. Bytes beyond the limit are counted."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.open = False
            return False
        self.parts.append(data[: max(0, self.limit - self.size)])
        self.size += len(data)
        return True

    def text(self) -> str:
        return binascii.b2a_base64(b"".join(self.parts)).decode()


def main() -> None:
    """Run the job on stdin; `alive` is the descriptor named by the only argument."""
    alive = int(sys.argv[1])
    os.set_inheritable(alive, False)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    job = load(sys.stdin.buffer.read())
    box = scratch = folder = ""
    uid = own_uid()
    if job.level == "rlimits":
        folder, box, scratch = make_folders(job, uid)
    try:
        answer = _supervise(job, uid, alive, box, scratch)
    finally:
        if folder:
            remove_folder(folder)
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to tidy up


def own_uid() -> int | None:
    """For root: a uid that nothing else has, since the kernel counts processes per uid.

    Pids are unique among the living, so uids made of them are too. The range begins where those
    that systemd hands out end; in a container with fewer uids it is one below 60000.
    """
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    for uid in (0x70000000 + os.getpid(), 30000 + os.getpid() % 30000):
        if any(first <= uid < first + count for first, _, count in ranges) and _is_free(uid):
            return uid
    raise OSError("running as root in a user namespace that maps no free uid")


def _is_free(uid: int) -> bool:
    """Whether no account has this uid: all processes of it will be killed."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return True
    return False


def make_folders(job: Job, uid: int | None) -> tuple[str, str, str]:
    import tempfile  # not at the other levels: it takes time to load

    folder = tempfile.mkdtemp(prefix="posttrain-sandbox-")
    box, scratch = folder + "/box", folder + "/scratch"
    os.mkdir(box)
    os.mkdir(scratch)
    for name, content in job.contents().items():
        with open(f"{box}/{name}", "wb") as file:
            file.write(content)
        os.chmod(f"{box}/{name}", 0o444)
    if uid is not None:
        os.chmod(folder, 0o711)
        os.chmod(box, 0o755)
        os.chown(scratch, uid, uid)
    return folder, box, scratch


def remove_folder(folder: str) -> None:
    """Remove `folder`, whatever modes its folders were given; symbolic links are not followed.

    Nothing that the program made can stop this: however deep folders are nested, each is moved up
    before it is read, so neither path, stack nor descriptors grow. What takes too long goes on in
    a process of its own, and what cannot be removed stays.
    """
    import tempfile  # as above

    try:
        trash = tempfile.mkdtemp(prefix="posttrain-sandbox-")
        os.rename(folder, f"{trash}/0")
        left = _empty(trash, ["0"], time.monotonic() + _CLEAN_S)
        if left and os.fork() == 0:
            os.closerange(0, 1 << 16)  # whoever reads the answer does not wait for this process
            os.setsid()
            _empty(trash, left, None)
            os._exit(0)
    except OSError:  # the program moved its own folder away
        return


def _empty(trash: str, names: list[str], limit: float | None) -> list[str]:
    """Remove these folders in `trash`, and `trash` itself; those left at the time `limit`."""
    count = 1 + max(map(int, names))
    top = os.open(trash, os.O_RDONLY | os.O_DIRECTORY)
    while names:
        name = names.pop()
        os.chmod(name, 0o700, dir_fd=top)
        here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        with os.scandir(here) as found:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        for entry, is_folder in inside:
            if limit is not None and time.monotonic() > limit:
                return [*names, name]
            if not is_folder:
                os.unlink(entry, dir_fd=here)
                continue
            os.chmod(entry, 0o700, dir_fd=here)  # to move a folder takes the right to write in it
            names.append(str(count))
            os.rename(entry, names[-1], src_dir_fd=here, dst_dir_fd=top)
            count += 1
        os.close(here)
        os.rmdir(name, dir_fd=top)
    os.close(top)
    if not names:
        os.rmdir(trash)
    return names


def _stdin(job: Job) -> int:
    """What the program reads: nothing, or a sealed copy of the given bytes."""
    if job.stdin is None:
        return os.open("/dev/null", os.O_RDONLY)
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(os.dup(descriptor), "wb") as file:
        file.write(binascii.a2b_base64(job.stdin))
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _supervise(job: Job, uid: int | None, alive: int, box: str, scratch: str) -> dict[str, object]:
    pipes = [os.pipe() for _ in range(4)]
    for reader, _ in pipes:
        os.set_blocking(reader, False)
    stdin = _stdin(job)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        ends = Ends(stdin, pipes[0][1], pipes[1][1], pipes[2][1], pipes[3][1])
        become_program(job, uid, ends, box, scratch)
    for _, writer in pipes:
        os.close(writer)
    os.close(stdin)
    out, err, report, status = (Stream(pipes[i][0], 1 << 16) for i in range(4))
    out.limit = err.limit = job.output_kib << 10
    tree = Tree(uid)
    ended = _watch(job, child, alive, (out, err), tree, began)
    seconds = time.monotonic() - began
    wait_status = tree.kill(child)
    limit = time.monotonic() + _DRAIN_S
    for stream in (out, err, report, status):
        while stream.read() and stream.size <= stream.limit and time.monotonic() < limit:
            pass
    if max(out.size, err.size) > out.limit:
        ended = "output"
    lines = b"".join(report.parts).decode(errors="replace").splitlines()
    exit_code, error = _exit_code(job, wait_status, lines, b"".join(status.parts))
    return {
        "ended": ended,
        "exit_code": exit_code,
        "error": error,
        "stdout": out.text(),
        "stderr": err.text(),
        "seconds": seconds,
        "left": tree.left,
    }


def _watch(
    job: Job, child: int, alive: int, outputs: tuple[Stream, Stream], tree: Tree, began: float
) -> str:
    """Wait for the end: `exit`, `timeout`, `output`, `memory`, or `orphan` when we are alone."""
    poll = select.poll()
    ending = os.pidfd_open(child)
    poll.register(ending, select.POLLIN)
    poll.register(alive, 0)
    streams = {stream.descriptor: stream for stream in outputs}
    for descriptor in streams:
        poll.register(descriptor, select.POLLIN)
    look = began
    while True:
        now = time.monotonic()
        if now >= began + job.wall_s:
            return "timeout"
        if now >= look:
            if tree.resident_bytes() > job.memory_mib << 20:
                return "memory"
            look = now + _LOOK_S
        wait = min(look, began + job.wall_s) - now
        events = dict(poll.poll(max(1, int(wait * 1000))))
        if alive in events:
            return "orphan"
        for descriptor in streams.keys() & events.keys():
            streams[descriptor].read()
            if streams[descriptor].size > streams[descriptor].limit:
                return "output"
            if not streams[descriptor].open:
                poll.unregister(descriptor)
        if ending in events:
            return "exit"


def _exit_code(
    job: Job, wait_status: int | None, report: list[str], status: bytes
) -> tuple[int | None, str]:
    """The program's exit code (minus a signal's number), and what went wrong on our side."""
    errors = [line[6:] for line in report if line.startswith("error ")]
    if errors:
        return None, errors[0]
    if job.level == "bubblewrap":
        for line in status.decode(errors="replace").splitlines():
            # bubblewrap says 128 + n for signal n, as a shell does.
            code = json.loads(line).get("exit-code")
            if code is not None:
                return (128 - code if code > 128 else code), ""
        return None, "bubblewrap did not start the program"
    if job.level == "namespaces":
        found = [int(line[7:]) for line in report if line.startswith("status ")]
        wait_status = found[0] if found else None
    if wait_status is None:
        return None, "the program's end was not reported"
    return os.waitstatus_to_exitcode(wait_status), ""


if __name__ == "__main__":
    main()
