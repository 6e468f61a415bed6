"""Batches of answers judged by killable processes, in order."""

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from cotutor.rollout import sandbox

from .inside import wire as frames
from .judging import INLINE_KINDS, KINDS, verify
from .verdict import Verdict, unjudged

Job = tuple[str, str, str, Mapping[str, Any]]

_START_TIMEOUT_S = 120.0
_BACKUP_S = 10.0  # the supervisor stops a job in time; this is for a supervisor that doesn't


class VerifierPool:
    """Judges batches in worker processes with limits on wall clock, CPU, memory and output.

    An answer that meets a limit counts as "timed_out"; its worker is killed and replaced while the
    other workers go on. Multiple choice and text are judged in the calling thread: they are string
    scans of a bounded text. Usable from any thread; workers start with the first answer that needs
    one and end with this process, however it ends.

    Args:
        workers: processes, at least 1.
        timeout_s: wall-clock limit for one answer [s]; for code, for all its tests together.
        memory_mb: address space of a worker [MiB].
        recycle_after: answers that one worker process judges before a fresh one takes its place.

    Raises:
        ValueError: a limit that isn't positive.
    """

    def __init__(
        self, workers: int, timeout_s: float, *, memory_mb: int = 2048, recycle_after: int = 200
    ) -> None:
        limits = {"workers": workers, "memory_mb": memory_mb, "recycle_after": recycle_after}
        for name, value in {**limits, "timeout_s": timeout_s}.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self._arguments = [str(v) for v in (os.getpid(), timeout_s, memory_mb, recycle_after)]
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[tuple[_Batch, int, Job] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers = workers
        self._threads: list[threading.Thread] = []
        self._closed = False

    def verify_many(self, jobs: Iterable[Job]) -> list[Verdict]:
        """Judge a batch.

        Args:
            jobs: (kind, gold, text, options) as `verify` takes them; options are JSON-like.

        Returns:
            The verdicts in the order of the jobs. A row that `verify` would refuse is "error".

        Raises:
            RuntimeError: the pool is closed, or a worker didn't start.
        """
        rows = list(jobs)
        batch = _Batch(len(rows))
        remote = [i for i, row in enumerate(rows) if row[0] in KINDS and row[0] not in INLINE_KINDS]
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            if remote and not self._threads:
                self._start_threads()
            batch.waiting = len(remote)
            for i in remote:
                self._queue.put((batch, i, rows[i]))
        for i in set(range(len(rows))).difference(remote):
            batch.verdicts[i] = _judge_here(rows[i])
        return batch.wait()

    def close(self) -> None:
        """Stop the workers after the answers that are already queued; closing twice is fine."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _start_threads(self) -> None:
        for i in range(self._workers):
            thread = threading.Thread(target=self._attend, name=f"verifier-{i}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _attend(self) -> None:
        """Feed one worker from the queue until the pool closes."""
        worker = _Worker(self._arguments, self._timeout_s)
        try:
            while (item := self._queue.get()) is not None:
                batch, index, job = item
                try:
                    batch.set(index, worker.judge(job))
                except Exception as error:  # handed to the thread that waits for this batch
                    batch.fail(error)
        finally:
            worker.stop()


@dataclass
class _Batch:
    """The verdicts of one call, and the count of those that are still out."""

    size: int
    waiting: int = 0
    error: Exception | None = None
    verdicts: list[Verdict | None] = field(default_factory=list)
    condition: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.verdicts = [None] * self.size

    def set(self, index: int, verdict: Verdict) -> None:
        with self.condition:
            self.verdicts[index] = verdict
            self.waiting -= 1
            self.condition.notify_all()

    def fail(self, error: Exception) -> None:
        with self.condition:
            self.error = error
            self.waiting -= 1
            self.condition.notify_all()

    def wait(self) -> list[Verdict]:
        with self.condition:
            self.condition.wait_for(lambda: self.waiting == 0)
        if self.error:
            raise RuntimeError("a verifier worker failed") from self.error
        assert all(v is not None for v in self.verdicts)
        return [v for v in self.verdicts if v is not None]


class _Worker:
    """One supervisor process, started when it is first needed and again when it is lost."""

    def __init__(self, arguments: list[str], timeout_s: float) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._next_id = 0

    def judge(self, job: Job) -> Verdict:
        kind, gold, text, options = job
        self._next_id += 1
        message = {"id": self._next_id, "kind": kind, "gold": gold, "text": text}
        try:
            message["options"] = dict(options)
            process = self._send(message)
            assert process.stdout is not None
            deadline = time.monotonic() + self._timeout_s + _BACKUP_S
            reply = frames.receive(process.stdout.fileno(), deadline)
        except (TypeError, ValueError, frames.FrameError) as error:
            return unjudged("error", detail=f"the row can't be sent to a worker: {error}")
        except (EOFError, OSError, frames.FrameTimeout):
            self.stop()
            return unjudged("error", detail="the verifier worker was lost; a new one takes over")
        assert reply["id"] == message["id"], "verdicts crossed"
        return Verdict(**reply["verdict"])

    def _send(self, message: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Send a job; to a new process when the old one ended between two jobs."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            frames.send(process.stdin.fileno(), message)
        except OSError:
            self.stop()
            process = self._start()
            assert process.stdin is not None
            frames.send(process.stdin.fileno(), message)
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="cotutor-verifier-")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.worker", *self._arguments, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which closes the pool
            bufsize=0,
        )
        self._process = process
        assert process.stdout is not None
        try:
            frames.receive(process.stdout.fileno(), time.monotonic() + _START_TIMEOUT_S)
        except (EOFError, OSError, frames.FrameError, frames.FrameTimeout) as error:
            self.stop()
            raise RuntimeError("a verifier worker didn't start; see its traceback above") from error
        return process

    def stop(self) -> None:
        """End the process: it stops at the end of its input, or is killed when it doesn't."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        sandbox.remove_folder(self._folder)  # for a supervisor that was killed


def _judge_here(job: Job) -> Verdict:
    kind, gold, text, options = job
    try:
        return verify(kind, gold, text, **options)
    except (ValueError, TypeError) as error:
        return unjudged("error", detail=str(error)[:500])
