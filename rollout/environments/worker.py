"""The process in which other people's games run: it answers one message at a time until it dies.

An audit hook refuses what no game needs: the network, other programs, and, during a call, running
text as code, so that a player's message can't be evaluated by a scorer that was overlooked.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from cotutor.rollout.verifiers.inside import wire

from .protocol import GameRefused, Step

_MEMORY_BYTES = 4 << 30
_GRACE_S = 5  # the parent kills at the limit; the alarm is for one that has gone
_REFUSED = (
    *("socket.connect", "socket.getaddrinfo", "subprocess.", "os.system"),
    *("os.exec", "os.fork", "os.posix_spawn"),
)


class Game(Protocol):
    """What runs here: like an environment, but it may raise, and counts no turns."""

    def reset(self, seed: int) -> str: ...

    def step(self, message: str) -> Step: ...


class _Refused(BaseException):
    """Something that no game needs was tried; no `except Exception` of a game may hide it."""


class _Guard:
    """The audit hook: always on once installed, stricter during a call."""

    def __init__(self) -> None:
        self.playing = False
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise _Refused(event)
        # An import compiles under its file's name, text under a name in brackets.
        if event == "compile" and self.playing and str(arguments[1]).startswith("<"):
            raise _Refused("text run as code")


class _Seat:
    """A game, and the global random state between its calls: games draw from the global ones."""

    def __init__(self, name: str, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        self.game = _make(name)
        self._keep()

    @contextlib.contextmanager
    def own_random_state(self) -> Iterator[Game]:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        try:
            yield self.game
        finally:
            self._keep()

    def _keep(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002


def _make(name: str) -> Game:
    kind, _, game = name.partition(":")
    module = {"textarena": "textarena_games", "reasoning_gym": "reasoning_gym_puzzles"}[kind]
    made: Game = importlib.import_module(f"{__package__}.{module}").make(game)
    return made


def main() -> None:
    """Serve: hello, then one reply for each message, until the parent's end of the pipe closes."""
    orders, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wire.send(replies, {"ready": os.getpid()})
    os.dup2(null, 2)  # from here on, only games would write there
    seats: dict[int, _Seat] = {}
    guard: _Guard | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            order = wire.receive(orders)
            if guard is None:
                guard = _Guard()
            signal.alarm(math.ceil(order["limit_s"]) + _GRACE_S)
            answer = _answer(order, seats, guard)
            signal.alarm(0)
            wire.send(replies, answer)


def _answer(order: dict[str, Any], seats: dict[int, _Seat], guard: _Guard) -> dict[str, Any]:
    try:
        if order["op"] == "close":
            seats.pop(order["key"], None)
            return {}
        if order["op"] == "check":
            _make(order["name"])
            return {}
        if order["op"] == "open":
            seat = seats[order["key"]] = _Seat(order["name"], order["seed"])
            with seat.own_random_state() as game:
                return {"text": game.reset(order["seed"])}
        with seats[order["key"]].own_random_state() as game:
            guard.playing = True
            return asdict(game.step(order["message"]))
    except GameRefused as refusal:
        return {"refused": str(refusal)}
    except BaseException as error:  # whatever a game raises ends its episode, not the others'
        seats.pop(order.get("key", -1), None)
        return {"crash": str(error) if isinstance(error, _Refused) else type(error).__name__}
    finally:
        guard.playing = False


if __name__ == "__main__":
    main()
