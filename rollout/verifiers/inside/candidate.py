"""The process that runs the model's program and calls its functions when the tests ask.

It holds neither the tests nor the marker: it sees the arguments of a call and answers with data.
"""

import sys
import types
from typing import Any

from . import plain_data, wire

NAME = "candidate"
_MAX_MESSAGE_CHARS = 300


class Server:
    """Objects of the program by number, and the calls that come over the wire."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def keep(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def load(self, code: str) -> list[Any]:
        """Run the program and return its public names with their values."""
        module = types.ModuleType(NAME)
        sys.modules[NAME] = module
        sys.argv = [NAME]
        try:
            exec(compile(code, f"<{NAME}>", "exec"), module.__dict__)
        except BaseException as error:  # even SystemExit: the program didn't load
            return self.raised(error)
        public = {k: v for k, v in module.__dict__.items() if not k.startswith("__")}
        names = []
        for name, value in public.items():
            if not isinstance(value, types.ModuleType):
                names.append([str(name), self.encoded(value)])
        return ["ok", names]

    def encoded(self, value: Any) -> list[Any]:
        try:
            return plain_data.encode(value, self.keep)
        except (ValueError, RecursionError):
            return ["h", self.keep(value)]

    @staticmethod
    def raised(error: BaseException) -> list[Any]:
        try:
            message = str(error)[:_MAX_MESSAGE_CHARS]
        except BaseException:
            message = ""
        return ["raise", type(error).__name__[:60], message]

    def answer(self, request: list[Any]) -> list[Any]:
        """Do what the tests ask: call, attr, iter, next, item, len or str on an object."""
        operation, number, *rest = request
        subject = self.objects[number]
        arguments = [plain_data.decode(part, self.objects.__getitem__) for part in rest]
        try:
            if operation == "call":
                return self.called(subject, *arguments)
            result = {
                "attr": lambda: getattr(subject, arguments[0]),
                "iter": lambda: iter(subject),
                "next": lambda: next(subject),
                "item": lambda: subject[arguments[0]],
                "len": lambda: len(subject),
                "str": lambda: str(subject),
            }[operation]()
            return ["ok", self.encoded(result), []]
        except BaseException as error:
            return self.raised(error)

    def called(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> list[Any]:
        """Call a function; what it changed in its arguments goes back with the result."""
        mutable = [
            i for i, a in enumerate(arguments) if isinstance(a, (list, dict, set, bytearray))
        ]
        before = {i: self.encoded(arguments[i]) for i in mutable}
        result = self.encoded(function(*arguments, **named))
        after = {i: self.encoded(arguments[i]) for i in mutable}
        return ["ok", result, [[i, after[i]] for i in mutable if after[i] != before[i]]]


def serve(requests: int, answers: int, code: str) -> None:
    """Load the program, report its names, then answer requests until the pipe closes."""
    server = Server()
    wire.send(answers, server.load(code))
    while True:
        try:
            request = wire.receive(requests)
        except EOFError:
            return
        try:
            reply = server.answer(request)
            wire.send(answers, reply)
        except wire.FrameError as error:
            wire.send(answers, server.raised(error))
