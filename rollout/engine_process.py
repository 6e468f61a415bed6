"""An engine in a process of its own: dead or hung, it is told by name; it dies with its parent.

On a GPU the allocator that lets an engine sleep serves one engine per process, so the tutors'
engines get theirs. `python -m cotutor.rollout.engine_process FD PARENT` is the other end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from cotutor.rollout.engine import Sampling
from cotutor.rollout.engine_state import EngineState
from cotutor.rollout.trajectory import Completion

_PR_SET_PDEATHSIG = 1
_HEARTBEAT_S = 2.0
# What torchrun tells a rank: the engine's process is none.
_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class ProcessEngine:
    """An `Engine` for frozen weights: a `VLLMEngine` in a process of its own.

    Args:
        name: whose engine it is, for messages.
        start_timeout_s: for loading and compiling.
        step_timeout_s: without a sign of life for so long, the engine counts as hung.
        options: of `VLLMEngine`.

    Raises:
        RuntimeError: the process ended, hung or failed; the message begins with `name`.
    """

    def __init__(
        self, name: str, *, start_timeout_s: float, step_timeout_s: float, **options: Any
    ) -> None:
        self._name = name
        self._step_timeout_s = step_timeout_s
        self._state = EngineState()
        ours, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
        if torch.device(options.get("device", "cpu")).type == "cuda":
            # The process sees this rank's GPU alone, as its first.
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            index = torch.cuda.current_device()
            environment["CUDA_VISIBLE_DEVICES"] = (
                visible.split(",")[index] if visible else str(index)
            )
            options = {**options, "device": "cuda"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._ask("start", options, timeout_s=start_timeout_s)

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    @property
    def version(self) -> int:
        """0: the weights are those that the engine started with."""
        return self._state.version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """See `VLLMEngine.generate`."""
        self._state.generate()
        request = ([list(p) for p in prompts], sampling, list(seeds))
        completions: list[Completion] = self._ask("generate", request)
        return completions

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refused: weights don't travel between processes; start another engine instead."""
        raise RuntimeError(f"{self._name}: an engine in its own process keeps its first weights")

    def sleep(self, level: int = 1) -> None:
        """Give back the device's memory; level 2 would drop weights that nobody can hand over."""
        if level != 1:
            raise ValueError(f"{self._name}: an engine in its own process sleeps at level 1 only")
        self._state.sleep(level)
        self._ask("sleep", level)

    def wake(self) -> None:
        """Take the memory again."""
        self._state.wake()
        self._ask("wake", None)

    def close(self) -> None:
        """End the process."""
        if self._state.close():
            self._end()

    def _end(self) -> int:
        self._pipe.close()
        self._process.kill()  # nothing where it has ended already
        return self._process.wait()

    def _ask(self, action: str, argument: Any, timeout_s: float | None = None) -> Any:
        """Send a request and wait for its answer, as long as there are signs of life."""
        limit = timeout_s or self._step_timeout_s
        try:
            self._pipe.send((action, argument))
            while True:
                if not self._pipe.poll(limit):
                    raise self._failed(f"gave no sign of life for {limit:g} s, asked to {action}")
                kind, value = self._pipe.recv()
                if kind == "done":
                    return value
                if kind == "failed":
                    raise self._failed(f"failed to {action}: {value}")
        except (EOFError, ConnectionError):
            code = self._end()
            told = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise self._failed(f"ended ({told}), asked to {action}") from None

    def _failed(self, what: str) -> RuntimeError:
        self.close()
        return RuntimeError(f"{self._name} (process {self.pid}) {what}")


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, whatever ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def serve(pipe: Connection) -> None:
    """Answer requests until the other end is closed."""
    from cotutor.rollout.engine_vllm import VLLMEngine

    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last > _HEARTBEAT_S:
            last = time.monotonic()
            pipe.send(("alive", None))

    engine: VLLMEngine | None = None
    while True:
        try:
            action, argument = pipe.recv()
        except EOFError:
            return
        try:
            value = None
            if engine is None:
                engine = VLLMEngine(**argument, on_step=beat)
            elif action == "generate":
                value = engine.generate(*argument)
            elif action == "sleep":
                engine.sleep(argument)
            else:
                engine.wake()
        except Exception as error:
            traceback.print_exc()
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("done", value))


if __name__ == "__main__":
    # Ctrl-C is for the trainer, which ends its step first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
    # Nothing here needs an orderly end, and vLLM's takes its time.
    sys.stdout.flush()
    os._exit(0)
