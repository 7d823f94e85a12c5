"""The system calls that Python 3.11 has no names for. Each raises `OSError` on failure."""

from __future__ import annotations

import ctypes
import os

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
