"""A worker of the pool: a supervisor that never looks at an answer, and a child that judges.

The supervisor imports everything once, forks a child and relays messages to it. A child that
meets a limit is killed and forked anew within milliseconds; so is one that has done its number of
jobs, so that nothing an answer did can reach the next. The supervisor ends when its parent does,
however that ended, and its child with it.
"""

import dataclasses
import math
import os
import resource
import signal
import sys
import tempfile
import time
from typing import Any

from cotutor.rollout import sandbox

from .inside import confinement
from .inside import wire as frames
from .judging import verify, warm_up
from .verdict import Verdict, unjudged

_MAX_VERDICT_BYTES = 256 << 10
_MAX_FILE_BYTES = 64 << 20
_GRACE_S = 1.0  # for a sandbox inside a worker to stop at its own limit first
_EXIT_MEMORY = 3
_PARENT_CHECK_S = 1.0


def main() -> None:
    """Serve the pool over standard input and output: hello, then one verdict for each job."""
    parent, timeout_s, memory_mb, recycle_after = int(sys.argv[1]), *map(float, sys.argv[2:5])
    folder = sys.argv[5]
    jobs_in, verdicts_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    warm_up()
    supervisor = _Supervisor(timeout_s, int(memory_mb) << 20, int(recycle_after), folder)
    frames.send(verdicts_out, {"ready": os.getpid()})
    try:
        while _wait_for_job(jobs_in, parent):
            job = frames.receive(jobs_in)
            verdict = supervisor.judge(job)
            frames.send(verdicts_out, {"id": job["id"], "verdict": dataclasses.asdict(verdict)})
    except (EOFError, OSError):
        pass
    finally:
        supervisor.close()


def _wait_for_job(fd: int, parent: int) -> bool:
    """Wait for a job; False when the parent has gone, even if others hold its end of the pipe."""
    while not frames.wait_readable(fd, _PARENT_CHECK_S):
        if os.getppid() != parent:
            return False
    return True


class _Supervisor:
    def __init__(
        self, timeout_s: float, memory_bytes: int, recycle_after: int, folder: str
    ) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._recycle_after = recycle_after
        self._child = 0
        self._to_child = self._from_child = -1
        self._served = 0
        self._folder = folder

    def close(self) -> None:
        """Kill the child and remove what it stored."""
        self.stop_child()
        sandbox.remove_folder(self._folder)

    def judge(self, job: dict[str, Any]) -> Verdict:
        if self._child and self._served >= self._recycle_after:
            self.stop_child()
        if not self._child:
            self._start_child()
        self._served += 1
        deadline = time.monotonic() + self._timeout_s
        if job["kind"] == "code":
            deadline += _GRACE_S
        try:
            frames.send(self._to_child, job)
            answer = frames.receive(self._from_child, deadline, _MAX_VERDICT_BYTES)
            return Verdict(**answer)
        except frames.FrameTimeout:
            self.stop_child()
            return unjudged("timed_out", detail=f"no verdict within {self._timeout_s:g} s")
        except (frames.FrameError, TypeError):
            self.stop_child()
            return unjudged("timed_out", detail="the verdict was longer than its limit")
        except (EOFError, OSError):
            return _why_it_ended(self.stop_child())

    def _start_child(self) -> None:
        child_in, self._to_child = os.pipe()
        self._from_child, child_out = os.pipe()
        me = os.getpid()
        self._served = 0
        os.makedirs(self._folder, exist_ok=True)
        self._child = os.fork()
        if self._child == 0:
            status = 1
            try:
                _close_all_but(child_in, child_out)
                tempfile.tempdir = self._folder
                _serve(child_in, child_out, me, self._timeout_s, self._memory_bytes)
                status = 0
            except MemoryError:
                status = _EXIT_MEMORY
            finally:
                os._exit(status)
        os.close(child_in)
        os.close(child_out)

    def stop_child(self) -> int:
        """Kill the child and return its wait status (of its own end, if it had already ended)."""
        if not self._child:
            return 0
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if not pid:
            os.kill(self._child, signal.SIGKILL)  # what it started dies by its parent-death signal
            _, status = os.waitpid(self._child, 0)
        os.close(self._to_child)
        os.close(self._from_child)
        self._child = 0
        if os.listdir(self._folder):  # of a sandbox that was stopped from outside
            sandbox.remove_folder(self._folder)
        return status


def _why_it_ended(status: int) -> Verdict:
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _EXIT_MEMORY:
        return unjudged("timed_out", detail="the memory limit was met")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU):
        return unjudged("timed_out", detail="the CPU or memory limit was met")
    return unjudged("error", detail=f"the worker died (wait status {status})")


def _serve(fd_in: int, fd_out: int, supervisor: int, timeout_s: float, memory: int) -> None:
    """Judge jobs until the pipe closes; runs in the child."""
    confinement.die_with_parent(supervisor)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while True:
        try:
            job = frames.receive(fd_in)
        except EOFError:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s + _GRACE_S)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))
        try:
            options = dict(job["options"])
            if job["kind"] == "code":
                options.setdefault("timeout_s", timeout_s)
            verdict = verify(job["kind"], job["gold"], job["text"], **options)
        except MemoryError:
            raise
        except Exception as error:  # the row's fault or ours: this answer's error, not the batch's
            verdict = unjudged("error", detail=f"{type(error).__name__}: {error}"[:500])
        frames.send(fd_out, dataclasses.asdict(verdict))


def _close_all_but(*kept: int) -> None:
    """Close what the child inherited, so that it can't speak for the supervisor."""
    at = 3
    for fd in sorted(kept):
        os.closerange(at, fd)
        at = fd + 1
    os.closerange(at, max(at, os.sysconf("SC_OPEN_MAX")) if at < 4096 else at + 4096)


if __name__ == "__main__":
    main()
