"""Runs a model's program against unit tests where it can neither reach nor leave anything.

Two levels:

- "bubblewrap" (needs the `bwrap` program and permission for namespaces): own process, network, IPC
  and mount namespaces; nothing of the file system but Python's library, read only, and an own
  temporary folder.
- "restricted" (`allow_restricted=True`): the machine's own namespaces; Landlock forbids all files
  but Python's library, system libraries and the temporary folder, and all TCP and signals.

On both levels: own process group and session; limits on wall clock, CPU, memory, file size and the
temporary folder as a whole; no new privileges, no capabilities; and a filter of system calls that
forbids new processes and programs, sockets, signals to others, tracing, other processes' memory
and limits, changes of modes and owners, and objects that outlive a process. The tests run in
another process than the program: see `verifiers/inside/driver.py`.
"""

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Level = Literal["bubblewrap", "restricted"]

_INSIDE = Path(__file__).resolve().parent / "verifiers" / "inside"
# Imports the folder as a package of its own, so that nothing else of this one is in reach.
_BOOT = """
import sys, types
package = types.ModuleType("inside")
package.__path__ = [sys.argv.pop(1)]
sys.modules["inside"] = package
from inside import driver
driver.main()
"""
_POLL_S = 0.05
_MAX_RESULTS_BYTES = 1 << 20
_MAX_FOLDER_ENTRIES = 2000
_MAX_FOLDER_DEPTH = 32
_END_S = 5.0
_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib64", "/sbin")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


class SandboxUnavailable(RuntimeError):
    """No level that is allowed works on this machine."""


@dataclass(frozen=True)
class Limits:
    """What a program and its tests may use together.

    Attributes:
        wall_s: time [s].
        cpu_s: CPU time of the program, and of the tests [s]; None: as `wall_s`.
        memory_mb: address space of the program, and of the tests [MiB].
        file_mb: one file, and the temporary folder as a whole [MiB].
    """

    wall_s: float = 10.0
    cpu_s: float | None = None
    memory_mb: int = 1024
    file_mb: int = 16


@dataclass(frozen=True)
class TestResult:
    """One test: its source, whether it passed, and why not; both texts are cut."""

    __test__ = False  # not a test case of pytest

    source: str
    passed: bool
    detail: str = ""


@dataclass
class Outcome:
    """The tests of one program.

    Attributes:
        status: "finished" (all tests ran), "limit" (stopped at a limit), "failed" (the sandbox
            itself did).
        results: the tests that ran, in order.
        detail: why the status isn't "finished".
        level: where it ran.
    """

    level: Level
    status: Literal["finished", "limit", "failed"] = "failed"
    results: list[TestResult] = field(default_factory=list)
    detail: str = ""

    @property
    def passed(self) -> bool:
        """True when there were tests and every one of them reported that it passed."""
        return (
            self.status == "finished"
            and bool(self.results)
            and all(result.passed for result in self.results)
        )


def level(allow_restricted: bool = False) -> Level:
    """Return the level at which programs will run here.

    Raises:
        SandboxUnavailable: bubblewrap doesn't work here, and the restricted level doesn't either or
            isn't allowed.
    """
    missing = _bubblewrap_missing()
    if not missing:
        return "bubblewrap"
    if not allow_restricted:
        raise SandboxUnavailable(
            f"code can't be run safely: {missing}; install bubblewrap, or set allow_restricted "
            "to run it under Landlock and a system-call filter"
        )
    reason = _inside_module("confinement").supported()
    if reason:
        raise SandboxUnavailable(f"code can't be run safely: {missing}, and {reason}")
    return "restricted"


@functools.lru_cache(maxsize=1)
def _bubblewrap_missing() -> str:
    """Return why bubblewrap can't be used, "" when it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    with tempfile.TemporaryDirectory() as folder:
        command = [*_bubblewrap(folder), _python(), "-I", "-S", "-c", "pass"]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"bubblewrap doesn't work here ({tried.stderr.strip()[:200]})"
    return ""


def _inside_module(name: str) -> ModuleType:
    """Load a module of the sandbox's own folder, which is no part of this package's imports."""
    spec = importlib.util.spec_from_file_location(f"_sandbox_{name}", _INSIDE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _python() -> str:
    return os.path.realpath(sys.executable)


def _bubblewrap(folder: str) -> list[str]:
    """Return the command line up to the program: what the namespace shows, and nothing else."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM_FOLDERS:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in dict.fromkeys((sys.base_prefix, os.path.dirname(os.path.dirname(_python())))):
        if not path.startswith("/usr"):
            command += ["--ro-bind", path, path]
    command += ["--ro-bind", str(_INSIDE), str(_INSIDE)]
    return [*command, "--bind", folder, folder, "--chdir", folder, "--remount-ro", "/"]


def _readable() -> list[str]:
    """Return what a program may read on the restricted level."""
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    paths += ["/etc/ld.so.cache", *_DEVICES]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def run_tests(code: str, tests: str, limits: Limits, where: Level) -> Outcome:
    """Run a program's tests.

    Args:
        code: the program; its functions are called by the tests, in another process.
        tests: Python source; each top-level `assert` and each bare call is one test, every other
            statement is set-up.
        limits: what they may use.
        where: the level, as `level` gives it.

    Returns:
        The outcome; nothing of the program is left running or stored when it is there.
    """
    outcome = Outcome(where)
    folder = tempfile.mkdtemp(prefix="cotutor-sandbox-")
    process: subprocess.Popen[bytes] | None = None
    info, info_end = os.pipe()
    try:
        prefix, parent = [], str(os.getpid())
        if where == "bubblewrap":
            prefix = _bubblewrap(folder)
            prefix[1:1] = ["--info-fd", str(info_end)]
            parent = "1"  # in its process namespace: bubblewrap's own first process
        process = subprocess.Popen(
            [*prefix, _python(), "-I", "-S", "-c", _BOOT, str(_INSIDE), parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            pass_fds=[info_end] if where == "bubblewrap" else [],
        )
        os.close(info_end)
        _converse(process, code, tests, limits, folder, outcome)
    finally:
        if process is not None:
            _end(process, info)
        else:
            os.close(info_end)
        os.close(info)
        remove_folder(folder)
    return outcome


def _converse(
    process: subprocess.Popen[bytes],
    code: str,
    tests: str,
    limits: Limits,
    folder: str,
    outcome: Outcome,
) -> None:
    wire: Any = _wire()
    assert process.stdin is not None
    assert process.stdout is not None
    marker = secrets.token_hex(16)
    orders, results = process.stdin.fileno(), process.stdout.fileno()
    deadline = time.monotonic() + limits.wall_s
    try:
        wire.send(orders, _setup(code, limits, folder, outcome.level))
        wire.send(orders, {"tests": tests, "marker": marker})
        received = 0
        while True:
            while not wire.wait_readable(results, _POLL_S):
                reason = _limit_met(deadline, limits, folder)
                if reason:
                    outcome.status, outcome.detail = "limit", reason
                    return
            message = wire.receive(results, deadline, _MAX_RESULTS_BYTES)
            received += len(json.dumps(message))
            if message.get("marker") != marker or received > _MAX_RESULTS_BYTES:
                outcome.detail = "the tests sent something else than results"
                return
            if message.get("end"):
                outcome.status = "finished"
                return
            outcome.results.append(
                TestResult(message["test"], message["passed"], message["detail"])
            )
    except wire.FrameTimeout:
        outcome.status, outcome.detail = "limit", f"no result within {limits.wall_s:g} s"
    except (EOFError, OSError, wire.FrameError) as error:
        outcome.detail = f"the sandbox ended early ({type(error).__name__})"


@functools.lru_cache(maxsize=1)
def _wire() -> ModuleType:
    return _inside_module("wire")


def _setup(code: str, limits: Limits, folder: str, where: Level) -> dict[str, Any]:
    cpu_s = limits.wall_s if limits.cpu_s is None else limits.cpu_s
    return {
        "code": code,
        "folder": folder,
        "cpu_s": int(cpu_s) + 1,
        "memory_bytes": limits.memory_mb << 20,
        "file_bytes": limits.file_mb << 20,
        "landlock": where == "restricted",
        "readable": _readable(),
    }


def _limit_met(deadline: float, limits: Limits, folder: str) -> str:
    if time.monotonic() > deadline:
        return f"no result within {limits.wall_s:g} s"
    size, entries = _usage(folder)
    if size > limits.file_mb << 20 or entries > _MAX_FOLDER_ENTRIES:
        return f"the temporary folder held more than {limits.file_mb} MiB or too many files"
    return ""


def _usage(folder: str) -> tuple[int, int]:
    """Return the bytes and the entries below a folder, counted up to the limit on entries.

    A tree that is too deep counts as too many entries.
    """
    size = entries = 0
    folders = [(folder, 0)]
    while folders and entries <= _MAX_FOLDER_ENTRIES:
        path, depth = folders.pop()
        if depth > _MAX_FOLDER_DEPTH:
            return size, _MAX_FOLDER_ENTRIES + 1
        with contextlib.suppress(OSError), os.scandir(path) as items:  # it may be gone by now
            for item in items:
                entries += 1
                if entries > _MAX_FOLDER_ENTRIES:
                    break
                if item.is_dir(follow_symlinks=False):
                    folders.append((item.path, depth + 1))
                else:
                    size += item.stat(follow_symlinks=False).st_blocks * 512
    return size, entries


def _end(process: subprocess.Popen[bytes], info: int) -> None:
    """Kill everything that `process` started, and return when it is gone.

    When the first process of a namespace dies, the kernel kills and awaits all others in it before
    that death can be seen. Without a namespace all are in one group, which they can't leave.
    """
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        os.set_blocking(info, False)
        os.kill(json.loads(os.read(info, 4096))["child-pid"], signal.SIGKILL)
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    process.wait()
    deadline = time.monotonic() + _END_S
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.002)


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs; one that is dead and only unreaped does not."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                state, _, member_of = file.read().rpartition(")")[2].split()[:3]
                if int(member_of) == group and state not in "ZX":
                    return True
    return False


def remove_folder(folder: str) -> None:
    """Remove a folder of hostile programs, however deep it is and whatever modes it has."""
    tools = {"PATH": os.defpath}
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if os.path.exists(folder):
            subprocess.run([*command, "--", folder], env=tools, capture_output=True, check=False)
