"""Environments whose code is other people's: it runs in a process of its own, under limits.

One worker process serves all of a process's environments, one message at a time. What that bounds:
the wall clock of a step (the worker is killed, the episode ends with its score so far, and the
other episodes are played again from their seeds and messages in a new worker), memory (an address
space limit), global random state and hash order (the worker's own), output (discarded), and
network, programs and text run as code (refused by an audit hook; see `worker.py`). What it doesn't
bound: the hook is no sandbox against code that is hostile itself, which the two packages are not.
"""

from __future__ import annotations

import atexit
import itertools
import os
import subprocess
import sys
import threading
import time
from typing import Any

from cotutor.rollout.verifiers.inside import wire

from .protocol import GameRefused, Step

STEP_LIMIT_S = 10.0  # a step takes milliseconds
_OPEN_LIMIT_S = 300.0  # the first one imports a package: 10 s without cached bytecode
_START_LIMIT_S = 120.0
_MAX_MESSAGE_CHARS = 200_000  # what verifiers read of a completion, too: its end


class _Lost(Exception):
    """The worker was killed or died during a call; the text says why."""


class _Host:
    """The worker process, started when it is first needed and again when it was lost."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner = os.getpid()
        self.generation = 0  # counts the workers; the episodes of earlier ones have to be replayed
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, message: dict[str, Any], limit_s: float) -> Any:
        """Send one message and return the reply; raises _Lost, and RuntimeError at a start."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            wire.send(process.stdin.fileno(), {**message, "limit_s": limit_s})
            return wire.receive(process.stdout.fileno(), time.monotonic() + limit_s)
        except wire.FrameTimeout:
            self.stop()
            raise _Lost("time limit") from None
        except (EOFError, OSError, wire.FrameError):
            self.stop()
            raise _Lost("process lost") from None

    def look(self) -> None:
        """Notice when the worker ended between two calls."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # The order of sets of strings is a function of the seed too.
        settings = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent
            env=settings,
            bufsize=0,
        )
        assert process.stdout is not None
        try:
            wire.receive(process.stdout.fileno(), time.monotonic() + _START_LIMIT_S)
        except (EOFError, OSError, wire.FrameError, wire.FrameTimeout) as error:
            self.stop()
            raise RuntimeError("the process of the games didn't start; see above") from error
        return process

    def stop(self) -> None:
        """Kill the worker; it keeps nothing that could be lost."""
        process, self._process = self._process, None
        if process is not None and self.owner == os.getpid():
            self.generation += 1
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


_host = _Host()
_keys = itertools.count()


def _the_host() -> _Host:
    """Return this process's host; a forked child must not speak to its parent's worker."""
    global _host
    if _host.owner != os.getpid():
        _host = _Host()
    return _host


@atexit.register
def stop_worker() -> None:
    """Stop the worker process; the next step starts another."""
    host = _the_host()
    with host.lock:
        host.stop()


class HostedEnvironment:
    """An environment of TextArena or reasoning-gym.

    Args:
        name: "textarena:<EnvId>" or "reasoning_gym:<dataset>".
        max_turns: messages after which the episode ends.
        step_limit_s: wall clock of one step [s].

    Raises:
        GameRefused: no such game, or one that can't be offered.
        RuntimeError: the worker doesn't start, or a package can't be loaded.
    """

    def __init__(self, name: str, max_turns: int, step_limit_s: float = STEP_LIMIT_S) -> None:
        self.name = name
        self.max_turns = max_turns
        self._step_limit_s = step_limit_s
        self._key = next(_keys)
        self._seed: int | None = None
        self._moves: list[str] = []
        self._generation = -1
        self._last = Step("", False, 0.0)
        with (host := _the_host()).lock:
            host.look()
            try:
                reply = host.call({"op": "check", "name": name}, _OPEN_LIMIT_S)
            except _Lost as lost:
                raise RuntimeError(f"{name} could not be loaded: {lost}") from None
        if "refused" in reply:
            raise GameRefused(reply["refused"])
        if "crash" in reply:
            raise RuntimeError(f"{name} could not be loaded: {reply['crash']}")

    def reset(self, seed: int) -> str:
        """Start the episode of a seed and return rules and first observation."""
        self._seed, self._moves = seed, []
        with (host := _the_host()).lock:
            host.look()
            try:
                text = self._open()
            except _Lost as lost:
                self._seed = None
                raise RuntimeError(f"{self.name} has no game for seed {seed}: {lost}") from None
        self._last = Step(text, False, 0.0)
        return text

    def step(self, message: str) -> Step:
        """Play one message."""
        if self._seed is None:
            raise RuntimeError("reset the environment before its first step")
        if self._last.done:
            return self._last
        message = message[-_MAX_MESSAGE_CHARS:]
        with (host := _the_host()).lock:
            try:
                host.look()
                if self._generation != host.generation:
                    self._open()
                    for move in self._moves:
                        self._play(move)
                self._moves.append(message)
                step = self._play(message)
            except (_Lost, RuntimeError) as failure:
                step = Step("", True, self._last.score, failure=str(failure))
        if not step.done and len(self._moves) >= self.max_turns:
            step = Step("", True, step.score, step.invalid)
        if step.done:
            self._drop()
        self._last = step
        return step

    def render(self) -> str:
        """Return what the player was told last."""
        return self._last.text

    def score(self) -> float:
        """Return the score of the episode so far."""
        return self._last.score

    def close(self) -> None:
        """Give up the episode."""
        self._seed = None
        self._drop()

    def _drop(self) -> None:
        """Have the worker forget the game."""
        with (host := _the_host()).lock:
            if self._generation == host.generation:
                try:
                    host.call({"op": "close", "key": self._key}, self._step_limit_s)
                except (_Lost, RuntimeError):
                    return  # the worker is gone, and the game with it

    def _open(self) -> str:
        host = _the_host()
        order = {"op": "open", "key": self._key, "name": self.name, "seed": self._seed}
        reply = host.call(order, _OPEN_LIMIT_S)
        self._generation = host.generation
        if "crash" in reply:
            raise _Lost(reply["crash"])
        return str(reply["text"])

    def _play(self, message: str) -> Step:
        order = {"op": "step", "key": self._key, "message": message}
        reply = _the_host().call(order, self._step_limit_s)
        if "crash" in reply:
            raise _Lost(reply["crash"])
        return Step(**reply)
