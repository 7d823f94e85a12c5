"""The `namespaces` level: a file system of its own and an init process, without any tool.

Only /usr (and the interpreter's folders) is there, read-only, with a few devices, the box with the
program, and a scratch folder in memory. There is no /proc and no /sys.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from posttrain.core.sandbox import kernel
from posttrain.core.sandbox.job import BOX, DEVICES, MIB, SCRATCH, Job, system_folders

_ALL_NEW = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
_INSIDE_ID = 1000


def run_in_jail(job: Job, report: int, start: Callable[[], None]) -> None:
    """Build the jail and call `start`, which never returns, in its second process.

    This process must be single-threaded and already have the uid that the program gets. It and the
    jail's init stay; `report` gets the wait status of the program.
    """
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(_ALL_NEW)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INSIDE_ID} {uid} 1")
    _write("/proc/self/gid_map", f"{_INSIDE_ID} {gid} 1")
    init = os.fork()
    if init:
        os.waitpid(init, 0)
        os._exit(0)
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # Signals from inside reach an init only where it has handlers: Python has one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _build(job)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_capabilities()
        program = os.fork()
        if program == 0:
            start()
        _reap_until(program, report)
    except OSError as error:
        os.write(report, f"error {error}\n".encode())
    finally:
        os._exit(0)


def _reap_until(program: int, report: int) -> None:
    # The init keeps nothing open that a reader of the output waits for.
    os.closerange(0, 3)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            os.write(report, f"status {status}\n".encode())
            return


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _build(job: Job) -> None:
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    # A folder to build on that nothing is taken from: it is covered in this namespace only.
    base = "/proc"
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    links, folders = system_folders()
    kernel.mount("root", base, "tmpfs", safe, "mode=755,size=64m,nr_inodes=4k")
    os.mkdir(base + SCRATCH)
    options = f"mode=700,size={job.scratch_mib * MIB},nr_inodes=4k"
    kernel.mount("scratch", base + SCRATCH, "tmpfs", safe, options)
    for path, target in links.items():
        os.symlink(target, base + path)
    for path in ["/usr", *folders, *job.prefixes]:
        os.makedirs(base + path, exist_ok=True)
        kernel.bind(path, base + path)
    os.mkdir(base + "/dev")
    for name in DEVICES:
        os.close(os.open(f"{base}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        kernel.bind(f"/dev/{name}", f"{base}/dev/{name}", device=True)
    os.mkdir(base + BOX)
    for name, content in job.contents().items():
        with open(f"{base}{BOX}/{name}", "wb") as file:
            file.write(content)
    remount = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | safe
    kernel.mount("none", base, "", remount)
    kernel.make_root(base)
    os.chdir(SCRATCH)
