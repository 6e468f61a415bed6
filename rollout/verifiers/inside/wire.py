"""Length-prefixed JSON messages between the pool, its supervisors, their workers and the sandbox.

JSON and not pickle, because a process that a hostile answer took over must not be able to run
anything in the process that reads its messages.
"""

import json
import os
import select
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 8 << 20


class FrameError(Exception):
    """The other side sent something that is no message, or too long a one."""


class FrameTimeout(Exception):
    """The message wasn't there by its deadline."""


def send(fd: int, message: Any) -> None:
    """Write one message; raises OSError when the other side has gone, FrameError when too long."""
    body = json.dumps(message).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"message of {len(body)} bytes, at most {MAX_FRAME_BYTES} can be sent")
    view = memoryview(_LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int, deadline: float | None = None, limit: int = MAX_FRAME_BYTES) -> Any:
    """Read one message.

    Args:
        fd: a pipe's reading end.
        deadline: on the `time.monotonic` clock [s]; None waits for ever.
        limit: longest message that is read [bytes].

    Returns:
        The message.

    Raises:
        EOFError: the other side has gone.
        FrameTimeout: the deadline passed.
        FrameError: too long, or not JSON.
    """
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, deadline))
    if length > limit:
        raise FrameError(f"message of {length} bytes, at most {limit} are read")
    try:
        return json.loads(_read(fd, length, deadline))
    except (ValueError, RecursionError) as error:
        raise FrameError("message is not JSON") from error


def wait_readable(fd: int, seconds: float) -> bool:
    """Wait until a pipe has something to read or has closed; any descriptor number."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _read(fd: int, count: int, deadline: float | None) -> bytes:
    parts = []
    while count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not wait_readable(fd, left):
                raise FrameTimeout
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
