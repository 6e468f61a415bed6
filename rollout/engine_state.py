"""What an engine may do next: a small state machine that refuses what would give fluent garbage."""

from __future__ import annotations

import os

# The sleeping allocator maps memory itself, which expandable segments don't allow.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class EngineState:
    """Awake or asleep, weights fresh or stale; `version` counts complete hand-overs of weights.

    Asleep at level 1 an engine keeps its weights (in the host's memory), at level 2 it drops them:
    after waking they are stale until they are handed over again.

    Args:
        stale: the engine starts without weights of its own.
    """

    def __init__(self, *, stale: bool = False) -> None:
        self.stale = stale
        self.asleep = 0
        self.closed = False
        self.version = 0

    def __str__(self) -> str:
        if self.closed:
            return "closed"
        if self.asleep:
            return f"asleep (level {self.asleep})"
        return "without complete weights" if self.stale else "awake"

    def generate(self) -> None:
        """Raises RuntimeError: asleep, closed, or weights are stale."""
        if self.stale:
            self._refuse("generate", "hand all weights over first")
        self._awake("generate")

    def begin_load(self) -> None:
        """Weights are stale until `end_load`. Raises RuntimeError: asleep or closed."""
        self._awake("load weights")
        self.stale = True

    def end_load(self) -> None:
        """All weights have arrived."""
        self.stale = False
        self.version += 1

    def sleep(self, level: int) -> None:
        """Raises RuntimeError: asleep or closed; ValueError: a level that isn't 1 or 2."""
        if level not in (1, 2):
            raise ValueError(f"an engine sleeps at level 1 or 2, not {level}")
        self._awake("sleep")
        self.asleep = level
        self.stale = self.stale or level == 2

    def wake(self) -> None:
        """Raises RuntimeError: not asleep, or closed."""
        if self.closed or not self.asleep:
            self._refuse("wake", "only a sleeping engine can")
        self.asleep = 0

    def close(self) -> bool:
        """True the first time."""
        first = not self.closed
        self.closed = True
        return first

    def _awake(self, action: str) -> None:
        if self.closed or self.asleep:
            self._refuse(action, "wake it first" if not self.closed else "start another")

    def _refuse(self, action: str, way_out: str) -> None:
        raise RuntimeError(f"can't {action}: the engine is {self}; {way_out}")


def refuse_expandable_segments() -> None:
    """Raises RuntimeError naming the variable that asks for what a sleeping engine can't live with.

    Reads PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF.
    """
    for variable in _ALLOCATOR_VARIABLES:
        for part in os.environ.get(variable, "").split(","):
            name, _, value = part.partition(":")
            if name.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
                raise RuntimeError(
                    f"{variable} has expandable_segments:{value.strip()}, with which an engine"
                    " can't sleep; take it out of the variable"
                )
