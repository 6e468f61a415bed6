"""The process that runs the tests against a program in another process.

It forks the candidate before it reads the tests and the marker, so that neither is ever in the
candidate's memory. The tests call the program's functions through stand-ins; what comes back is
plain data, compared here, so a program can't pass by changing what `assert` or `==` means.
"""

import ast
import builtins
import contextlib
import importlib
import os
import signal
import sys
from typing import Any

from . import candidate, confinement, plain_data, wire

_MAX_DETAIL_CHARS = 300


class ProgramEnded(Exception):
    """The candidate's process is gone."""


class CandidateError(Exception):
    """An exception of the program whose type the standard library doesn't have."""


class Remote:
    """The program's process, seen from the tests."""

    def __init__(self, requests: int, answers: int, process: int) -> None:
        self.requests = requests
        self.answers = answers
        self.process = process

    def receive(self) -> Any:
        try:
            reply = wire.receive(self.answers)
        except (EOFError, OSError, wire.FrameError) as error:
            raise ProgramEnded("the program ended or sent too much") from error
        if isinstance(reply, list) and len(reply) == 3 and reply[0] == "raise":
            raise _exception(str(reply[1]), str(reply[2]))
        if not isinstance(reply, list) or not reply or reply[0] != "ok":
            raise ProgramEnded("the program sent something else than an answer")
        return reply

    def ask(self, operation: str, number: int, *arguments: Any) -> tuple[Any, list[Any]]:
        encoded = [plain_data.encode(a, _number_of) for a in arguments]
        try:
            wire.send(self.requests, [operation, number, *encoded])
        except OSError as error:
            raise ProgramEnded("the program ended") from error
        reply = self.receive()
        return plain_data.decode(reply[1], self.stand_in), reply[2]

    def stand_in(self, number: int) -> "StandIn":
        return StandIn(self, number)


class StandIn:
    """An object of the program. Only itself is equal to it: its own `==` is never asked."""

    def __init__(self, remote: Remote, number: int) -> None:
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result, changed = self._remote.ask("call", self._number, list(arguments), named)
        for index, tagged in changed:
            _overwrite(arguments[index], plain_data.decode(tagged, self._remote.stand_in))
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote.ask("attr", self._number, name)[0]

    def __iter__(self) -> Any:
        iterator = self._remote.ask("iter", self._number)[0]
        while True:
            try:
                yield self._remote.ask("next", iterator._number)[0]
            except StopIteration:
                return

    def __getitem__(self, key: Any) -> Any:
        return self._remote.ask("item", self._number, key)[0]

    def __len__(self) -> int:
        return int(self._remote.ask("len", self._number)[0])

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self._remote.ask("str", self._number)[0])


def _number_of(value: Any) -> int:
    if isinstance(value, StandIn):
        return int(value._number)
    raise TypeError(f"the tests pass a {type(value).__name__}, which can't go into the sandbox")


def _overwrite(target: Any, value: Any) -> None:
    """Give a test's own list, dict, set or bytearray the content that the program left in it."""
    if isinstance(target, (list, bytearray)):
        target[:] = value
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(value)


def _exception(name: str, message: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except Exception:
            return CandidateError(f"{name}: {message}")
    return CandidateError(f"{name}: {message}")


def add_names(namespace: dict[str, Any], tree: ast.Module, remote: Remote) -> None:
    """Give the tests the program's names, and library modules that they use without an import.

    A program's `sorted` must not replace the one that the tests compare with; only when the tests
    call nothing but built-in names is such a name the program under test.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    called = {
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    may_replace = called if all(hasattr(builtins, name) for name in called) else set()
    for name, value in remote.receive()[1]:
        if name in used and (name in may_replace or not hasattr(builtins, name)):
            namespace[name] = plain_data.decode(value, remote.stand_in)
    for name in used & sys.stdlib_module_names:
        if name not in namespace:
            namespace[name] = importlib.import_module(name)


def run_tests(tree: ast.Module, namespace: dict[str, Any], report: Any) -> None:
    """Run the statements of a test file; each assertion and each bare call is one test."""
    blocked = ""
    for node in tree.body:
        is_test = isinstance(node, (ast.Assert, ast.Expr))
        try:
            if blocked:
                raise ProgramEnded(blocked)
            detail = _run(node, namespace)
        except ProgramEnded as error:
            blocked = detail = str(error)
        except AssertionError as error:
            detail = f"AssertionError: {error}"
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            blocked = blocked or ("" if is_test else f"the tests' set-up failed: {detail}")
        if is_test:
            report(ast.unparse(node)[:_MAX_DETAIL_CHARS], not detail, detail[:_MAX_DETAIL_CHARS])


def _run(node: ast.stmt, namespace: dict[str, Any]) -> str:
    """Run one statement of the tests; return what an equality got instead, "" when all is well."""
    test = node.test if isinstance(node, ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        got = eval(compile(ast.Expression(test.left), "<tests>", "eval"), namespace)
        wanted = eval(compile(ast.Expression(test.comparators[0]), "<tests>", "eval"), namespace)
        return "" if got == wanted else f"got {got!r:.120}, expected {wanted!r:.120}"
    exec(compile(ast.Module([node], []), "<tests>", "exec"), namespace)
    return ""


def main() -> None:
    """Fork the candidate, run the tests, and report each with the marker on standard output."""
    confinement.die_with_parent(int(sys.argv[1]))
    results, orders = os.dup(1), os.dup(0)
    setup = wire.receive(orders)
    remote = _fork_candidate(setup, orders, results)
    confinement.hide_memory()
    tests = wire.receive(orders)
    marker = tests["marker"]

    def report(source: str, passed: bool, detail: str) -> None:
        wire.send(results, {"marker": marker, "test": source, "passed": passed, "detail": detail})

    namespace: dict[str, Any] = {"__name__": "tests"}
    tree = ast.parse(tests["tests"])
    try:
        add_names(namespace, tree, remote)
    except (ProgramEnded, Exception) as error:
        report("loading the program", False, f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS])
    else:
        run_tests(tree, namespace, report)
    with contextlib.suppress(ProcessLookupError):
        os.kill(remote.process, signal.SIGKILL)
    os.waitpid(remote.process, 0)
    wire.send(results, {"marker": marker, "end": True})


def _fork_candidate(setup: dict[str, Any], orders: int, results: int) -> Remote:
    requests, to_candidate = os.pipe()
    from_candidate, answers = os.pipe()
    me = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            for fd in (orders, results, to_candidate, from_candidate):
                os.close(fd)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.chdir(setup["folder"])
            confinement.limit(setup["cpu_s"], setup["memory_bytes"], setup["file_bytes"])
            try:
                confinement.confine(me, setup["readable"], setup["folder"], setup["landlock"])
            except OSError as error:
                wire.send(answers, ["raise", "ConfinementError", str(error)])
            else:
                candidate.serve(requests, answers, setup["code"])
        finally:
            os._exit(0)
    os.close(requests)
    os.close(answers)
    confinement.limit(setup["cpu_s"], setup["memory_bytes"], setup["file_bytes"])
    return Remote(to_candidate, from_candidate, process)


if __name__ == "__main__":
    main()
