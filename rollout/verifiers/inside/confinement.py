"""What a process gives up before it runs a model's program: resources, privileges, system calls.

`confine` can't be undone. Linux on x86-64 or AArch64; everything goes through libc with ctypes, so
that it runs inside a bare sandbox.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CLONE_THREAD = 0x00010000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446

# System calls with the same number on both machines (those added since 2019).
_COMMON = {"pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426}
_COMMON |= {"io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430}
_COMMON |= {"fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435}
_COMMON |= {"pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "fchmodat2": 452}
_COMMON |= {"process_mrelease": 448, "setxattrat": 463}
_X86_64 = {
    "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "semget": 64,
    "shmget": 29, "msgget": 68, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94,
    "ptrace": 101, "syslog": 103, "setpgid": 109, "setsid": 112, "rt_sigqueueinfo": 129,
    "utime": 132, "mknod": 133, "personality": 135, "setpriority": 141, "sched_setparam": 142,
    "sched_setscheduler": 144, "pivot_root": 155, "prctl": 157, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "tkill": 200,
    "sched_setaffinity": 203, "clock_settime": 227, "tgkill": 234, "utimes": 235, "mq_open": 240,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
    "migrate_pages": 256, "mknodat": 259, "fchownat": 260, "futimesat": 261, "fchmodat": 268,
    "unshare": 272, "move_pages": 279, "utimensat": 280, "rt_tgsigqueueinfo": 297,
    "perf_event_open": 298, "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "finit_module": 313, "sched_setattr": 314, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "execveat": 322, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
    "fremovexattr": 16, "ioprio_set": 30, "mknodat": 33, "umount2": 39, "mount": 40,
    "pivot_root": 41, "chroot": 51, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55,
    "quotactl": 60, "utimensat": 88, "acct": 89, "personality": 92, "unshare": 97,
    "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
    "syslog": 116, "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119,
    "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138,
    "setpriority": 140, "reboot": 142, "setpgid": 154, "setsid": 157, "sethostname": 161,
    "setdomainname": 162, "prctl": 167, "settimeofday": 170, "mq_open": 180, "msgget": 186,
    "semget": 190, "shmget": 194, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219,
    "clone": 220, "execve": 221, "swapon": 224, "swapoff": 225, "migrate_pages": 238,
    "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "prlimit64": 261,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
    "sched_setattr": 274, "memfd_create": 279, "bpf": 280, "execveat": 281, "userfaultfd": 282,
    "kexec_file_load": 294,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}

_READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute (shared libraries), read file, read folder
_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_ALL_SINCE_5 = (1 << 16) - 1
_SPECIAL_FILES = (1 << 6) | (1 << 9) | (1 << 10) | (1 << 11)  # devices, sockets, pipes by name


def supported() -> str:
    """Return why the restricted level can't run here, or "" when it can."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return f"system calls are filtered on Linux x86_64 or aarch64, not {platform.machine()}"
    if landlock_abi() < 1:
        return "the kernel has no Landlock"
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        return "the kernel has no seccomp filters"
    return ""


def landlock_abi() -> int:
    """Return the kernel's Landlock version, 0 when there is none."""
    return max(0, _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent (process id) dies."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Forbid other processes of this user to trace this process or read its memory."""
    _check(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def limit(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Set the resource limits of this process."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def confine(parent: int, read: Iterable[str], write: str, landlock: bool) -> None:
    """Give up privileges, other files (with Landlock) and all system calls that reach others.

    Args:
        parent: process whose death ends this one.
        read: files and folders that stay readable.
        write: folder that stays writable.
        landlock: restrict files; False inside a mount namespace that shows nothing else.

    Raises:
        OSError: the kernel refused a step.
    """
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _drop_capabilities()
    die_with_parent(parent)  # after the capabilities: changing them forgets it
    if landlock:
        _restrict_files(read, write)
    _filter_system_calls()


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what} was refused by the kernel")
    return result


def _drop_capabilities() -> None:
    for capability in range(64):  # refused without privileges, which is as good
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("<Ii", 0x20080522, 0)
    _check(_LIBC.capset(header, bytes(24)), "capset")


def _restrict_files(read: Iterable[str], write: str) -> None:
    abi = landlock_abi()
    everything = _ALL_BY_ABI.get(abi, _ALL_BY_ABI[3] if abi == 4 else _ALL_SINCE_5)
    network = 3 if abi >= 4 else 0  # bind and connect, with no exception
    scoped = 3 if abi >= 6 else 0  # abstract sockets and signals stay inside
    attributes = struct.pack("<QQQ", everything, network, scoped)[
        : 8 if abi < 4 else 16 if abi < 6 else 24
    ]
    ruleset = _check(_LIBC.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    for path in read:
        _allow(ruleset, path, _READ if os.path.isdir(path) else _READ & ~(1 << 3))
    _allow(ruleset, write, everything & ~(_SPECIAL_FILES | 1))
    _check(_LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("<Qi", access, fd)
    _check(_LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock rule for {path}")
    os.close(fd)


def _filter_system_calls() -> None:
    audit, numbers = _MACHINES[platform.machine()]
    program = _program(audit, {**numbers, **_COMMON}, os.getpid())
    code = ctypes.create_string_buffer(b"".join(program))
    fprog = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    result = _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, fprog, 0, 0)
    _check(result, "PR_SET_SECCOMP")


def _program(audit: int, numbers: dict[str, int], pid: int) -> list[bytes]:
    """Return the BPF program: seccomp_data holds nr at 0, arch at 4, the arguments from 16 on."""

    def load(offset: int) -> bytes:
        return struct.pack("<HBBI", 0x20, 0, 0, offset)

    def jump_if_equal(value: int, yes: int, no: int) -> bytes:
        return struct.pack("<HBBI", 0x15, yes, no, value)

    def give(value: int) -> bytes:
        return struct.pack("<HBBI", 0x06, 0, 0, value)

    first = load(16)  # low half of the first argument
    denied, allowed = give(_ERRNO | _EPERM), give(_ALLOW)
    program = [load(4), jump_if_equal(audit, 1, 0), give(_KILL), load(0)]
    # the x32 interface has numbers of its own
    program += [struct.pack("<HBBI", 0x35, 0, 1, 0x40000000), give(_KILL)]
    own = {"tgkill": pid, "kill": pid, "prlimit64": 0}  # allowed on oneself
    for name, value in own.items():
        program += [jump_if_equal(numbers.pop(name), 0, 4), first]
        program += [jump_if_equal(value, 0, 1), allowed, denied]
    program += [jump_if_equal(numbers.pop("prctl"), 0, 4), first]
    program += [jump_if_equal(_PR_SET_PDEATHSIG, 0, 1), denied, allowed]
    program += [jump_if_equal(numbers.pop("clone"), 0, 4), first]
    program += [struct.pack("<HBBI", 0x45, 0, 1, _CLONE_THREAD), allowed, denied]
    program += [jump_if_equal(numbers.pop("clone3"), 0, 1), give(_ERRNO | _ENOSYS)]
    for number in numbers.values():
        program += [jump_if_equal(number, 0, 1), denied]
    return [*program, allowed]
