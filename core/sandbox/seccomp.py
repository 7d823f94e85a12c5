"""The system call filter: what no program in a sandbox needs, and what would widen its limits.

Memory that belongs to no process (memfd, System V segments) escapes the limits on memory, nested
user namespaces give file systems of unlimited size, and the rest would help attacks on the kernel.
The filter is a classic BPF program as seccomp(2) describes it, for x86-64 and aarch64.
"""

from __future__ import annotations

import errno
import os
import struct

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
_CLONE, _CLONE3 = (56, 220), (435, 435)
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def supported() -> bool:
    return os.uname().machine in _AUDIT


def program(*, sockets: bool) -> bytes:
    """The filter as an array of sock_filter; without `sockets`, socket(2) is refused too."""
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
    # The flags of clone3 are behind a pointer; libc falls back to clone, whose flags are not.
    code += when(_EQUAL, _CLONE3[column], _ERROR | errno.ENOSYS)
    code += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16)]
    code += when(_ANY_BIT, _NEW_NAMESPACES, denied)
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
