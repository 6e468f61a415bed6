"""SIGINT and SIGTERM: the first asks the run to finish its step and save, a later one ends it."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType


class Stopped(Exception):
    """The run was asked to stop; it has saved a checkpoint and can be resumed."""


class StopRequest:
    """While entered, `requested` turns True at the first signal; a later one exits at once.

    torchrun and the terminal may both deliver the same Ctrl-C: within a second it counts once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first = 0.0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._first > 1.0:
            raise SystemExit(128 + number)
        if not self.requested:
            self.requested, self._first = True, now

    def __enter__(self) -> StopRequest:
        self._old = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._old.items():
            signal.signal(number, previous)
