"""System calls that Python has no names for, and the filter of system calls.

Memory that belongs to no process (memfd, System V segments) escapes the limits on memory, nested
user namespaces give file systems of unlimited size, and the rest would help attacks on the kernel.
The filter is a classic BPF program as seccomp(2) describes it, for x86-64 and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
SECCOMP_MODE_FILTER = 2

# These two have the same number on every architecture; pivot_root has not.
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int, pointer: object = None) -> None:
    third = ctypes.byref(pointer) if isinstance(pointer, ctypes.Structure) else 0
    _check(_libc.prctl(option, ctypes.c_ulong(value), third, 0, 0), f"prctl {option}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _check(
        _libc.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
        ),
        f"mount {target}",
    )


def bind(source: str, target: str, *, device: bool = False) -> None:
    """Show `source`, with what is mounted below it, at `target`: read-only unless a device."""
    mount(source, target, "", MS_BIND | MS_REC)
    if not device:
        attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
        done = _libc.syscall(
            ctypes.c_long(_MOUNT_SETATTR),
            ctypes.c_long(_AT_FDCWD),
            ctypes.c_char_p(target.encode()),
            ctypes.c_long(_AT_RECURSIVE),
            attributes,
            ctypes.c_long(ctypes.sizeof(attributes)),
        )
        _check(done, f"mount_setattr {target}")


def make_root(folder: str) -> None:
    """Make the mount point `folder` the root of this mount namespace, and forget the old one."""
    os.chdir(folder)
    here = ctypes.c_char_p(b".")
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), here, here), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def drop_capabilities() -> None:
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one this kernel knows
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "capset")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def set_filter(code: bytes) -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, _Program(len(code) // 8, code))


_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86-64, aarch64)
_DENIED = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_FAMILIES = (1,)
"""AF_UNIX, which asyncio and multiprocessing need. No other family may be made: some, such as
AF_VSOCK and AF_ALG, reach past a network namespace or open more of the kernel."""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def supported() -> bool:
    return os.uname().machine in _AUDIT


def program(*, sockets: bool) -> bytes:
    """The filter as an array of sock_filter.

    Sockets are those of `_FAMILIES` alone. Without `sockets` socket(2) is refused for all families,
    and socketpair(2), whose ends reach nobody else, is not.
    """
    machine = os.uname().machine
    column = list(_AUDIT).index(machine)
    refuse = [pair[column] for pair in _DENIED.values()] + ([] if sockets else [_SOCKET[column]])
    denied = _ERROR | errno.EPERM

    def when(test: int, value: int, action: int) -> list[tuple[int, int, int, int]]:
        return [(test, 0, 1, value), (_RETURN, 0, 0, action)]

    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _KILL)]
    code += [(_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        code += when(_AT_LEAST, _X32, denied)
    for number in refuse:
        code += when(_EQUAL, number, denied)
    for number in (_SOCKET[column], _SOCKETPAIR[column]):
        # At another number skip the check; else compare the first argument, then load it again.
        check = [(_LOAD, 0, 0, 16)]
        for family in _FAMILIES:
            check += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
        check += [(_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT)]
        code += [(_EQUAL, 0, len(check), number), *check]
    # The flags of clone3 are behind a pointer; libc falls back to clone, whose flags are not.
    code += when(_EQUAL, _CLONE3[column], _ERROR | errno.ENOSYS)
    code += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16)]
    code += when(_ANY_BIT, _NEW_NAMESPACES, denied)
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
