"""From a fork of the guard to the running program, at each level of isolation.

Only /usr (and the interpreter's folders) is there, read-only, with a few devices, the box with the
program, and a scratch folder in memory. There is no /proc and no /sys.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable

from posttrain.core.sandbox import kernel
from posttrain.core.sandbox import kernel as seccomp
from posttrain.core.sandbox.job import BOX, DEVICES, MIB, SCRATCH, Job, environment, system_folders

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
        if job.session:  # the first process, which nothing inside can kill
            start()
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
    links, _ = system_folders()
    kernel.mount("root", base, "tmpfs", safe, "mode=755,size=64m,nr_inodes=4k")
    options = f"mode=700,size={job.scratch_mib * MIB},nr_inodes=4k"
    for folder in (SCRATCH, *job.folders):
        os.mkdir(base + folder)
        kernel.mount("scratch", base + folder, "tmpfs", safe, options)
    for path, target in links.items():
        os.symlink(target, base + path)
    for path in job.shown():
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


class Ends:
    """Descriptors for the child. `report` carries `status N` and `error TEXT` lines to the guard.

    `status` is where bubblewrap writes its JSON.
    """

    def __init__(self, stdin: int, stdout: int, stderr: int, report: int, status: int) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.report = report
        self.status = status


def become_program(job: Job, uid: int | None, ends: Ends, box: str, scratch: str) -> None:
    """Confine this process as `job.level` says and execute the program.

    `uid` is the one to change to, None when this process is unprivileged already. `box` and
    `scratch` are folders of the host, used at the level `rlimits` only.
    """
    try:
        os.setsid()
        for target, source in enumerate((ends.stdin, ends.stdout, ends.stderr)):
            os.dup2(source, target)
        _close_all_but({ends.report, ends.status})
        if uid is not None:
            drop_to(uid)
        # After the change of uid, which clears both.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if job.level == "bubblewrap":
            if not job.session:
                _set_limits(job)
            _bubblewrap(job, ends)
        elif job.level == "namespaces":
            run_in_jail(job, ends.report, lambda: _start(job, ends, BOX, SCRATCH, 1))
        else:
            os.chdir(scratch)
            others = 0 if uid is not None else threads_of(os.getuid())
            _start(job, ends, box, scratch, others)
    except BaseException as error:  # also a fault of ours must reach the guard, not the program
        os.write(ends.report, f"error {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(127)


def drop_to(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or uid == 0:
        raise OSError(f"could not change to uid {uid}")


def _start(job: Job, ends: Ends, box: str, scratch: str, others: int) -> None:
    try:
        if not job.session:
            _set_limits(job)
            resource.setrlimit(resource.RLIMIT_NPROC, (job.processes + others,) * 2)
        # Python ignores SIGPIPE and SIGXFSZ, which execve would hand on.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        kernel.set_filter(seccomp.program(sockets=job.level != "rlimits"))
        os.execve(job.python, job.command(box), environment(scratch))
    except BaseException as error:  # as above
        os.write(ends.report, f"error {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(127)


def limits_of(job: Job) -> dict[str, tuple[int, int]]:
    """Every limit that counts per process; the number of processes is set where it counts."""
    return {
        "RLIMIT_CPU": (job.cpu_s, job.cpu_s + 1),
        "RLIMIT_AS": (job.memory_mib * MIB,) * 2,
        "RLIMIT_FSIZE": (job.file_mib * MIB,) * 2,
        "RLIMIT_NOFILE": (job.open_files,) * 2,
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_MSGQUEUE": (0, 0),
    }


def _set_limits(job: Job) -> None:
    for name, (soft, hard) in limits_of(job).items():
        which = getattr(resource, name)
        _, most = resource.getrlimit(which)
        if most != resource.RLIM_INFINITY:  # only root may go up again
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))


def _close_all_but(keep: set[int]) -> None:
    lowest = 3
    for descriptor in sorted(keep):
        os.closerange(lowest, descriptor)
        lowest = descriptor + 1
    os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))


def threads_of(uid: int) -> int:
    """Threads of `uid` on this machine: RLIMIT_NPROC counts them all, whoever started them."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return count


def _sealed(content: bytes) -> int:
    """A descriptor from which `content` can be read by whoever inherits it."""
    descriptor = os.memfd_create("box", 0)
    with open(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _bubblewrap(job: Job, ends: Ends) -> None:
    links, _ = system_folders()
    line = [job.bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    line += ["--hostname", "sandbox", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    for folder in (SCRATCH, *job.folders):
        line += ["--perms", "0700", "--size", str(job.scratch_mib * MIB), "--tmpfs", folder]
    for path in job.shown():
        line += ["--ro-bind", path, path]
    for path, target in links.items():
        line += ["--symlink", target, path]
    for name in DEVICES:
        line += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, content in job.contents().items():
        line += ["--perms", "0444", "--file", str(_sealed(content)), f"{BOX}/{name}"]
    line += ["--seccomp", str(_sealed(seccomp.program(sockets=True)))]
    os.set_inheritable(ends.status, True)
    line += ["--json-status-fd", str(ends.status), "--remount-ro", "/", "--chdir", SCRATCH]
    line += ["--clearenv"]
    for name, value in environment(SCRATCH).items():
        line += ["--setenv", name, value]
    if job.session:  # bwrap still waits outside, and ends with its parent
        line += ["--as-pid-1", "--", *job.command(BOX)]
    else:
        # prlimit runs inside, where processes are counted per user namespace; bwrap's init is one.
        line += ["--", "/usr/bin/prlimit", f"--nproc={job.processes + 1}", *job.command(BOX)]
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execve(job.bwrap, line, {})
