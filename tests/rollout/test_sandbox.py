"""Programs in the sandbox: hostile ones gain nothing and leave nothing; ordinary ones pass."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotutor.rollout import sandbox
from cotutor.rollout.verifiers import verify

QUICK = sandbox.Limits(wall_s=2.0)
TESTS = "assert f(1) == 2\nassert f(2) == 3"
RIGHT = "\ndef f(x):\n    return x + 1\n"


def _unavailable(level: str) -> str:
    if level == "restricted":
        return sandbox._inside_module("confinement").supported()
    return sandbox._bubblewrap_missing()


@pytest.fixture(params=["bubblewrap", "restricted"])
def level(request: pytest.FixtureRequest) -> sandbox.Level:
    reason = _unavailable(request.param)
    if reason:
        pytest.skip(reason)
    chosen: sandbox.Level = request.param
    return chosen


def running() -> set[str]:
    """Return the sandbox processes of this test process, and those that lost their parents."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            if b"from inside import driver" not in command or status(entry)[0] in "ZX":
                continue
            ancestors = [entry]
            while ancestors[-1] not in ("0", "1", str(os.getpid())):
                ancestors.append(status(ancestors[-1])[1])
        except OSError:
            continue
        # Another worker of this test run may have sandboxes of its own.
        if ancestors[-1] == str(os.getpid()) or len(ancestors) == 2:
            found.add(entry)
    return found


def status(process: str) -> list[str]:
    """State and parent of a process."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    before = running()
    yield
    assert running() <= before
    assert not list(tmp_path.glob("cotutor-sandbox-*"))
    assert set(os.listdir("/dev/shm")) <= shared


SECRET = "the parent's secret"
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "threads": "import threading, time\n"
    "while True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
    "memory": "kept = []\nwhile True:\n    kept.append(bytearray(10**7))",
    "disk": "n = 0\nwhile True:\n    open(f'{n}', 'wb').write(b'x' * 10**7)\n    n += 1",
    "many files": "n = 0\nwhile True:\n    open(f'{n}', 'w').close()\n    n += 1",
    "deep folders": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    "closed folder": "import os\nos.mkdir('d')\nopen('d/x', 'w').close()\nos.chmod('d', 0)",
    "endless loop": "while True:\n    pass",
    "endless sleep": "import time\ntime.sleep(1000)",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "local socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "reading the parent's files": "open(SECRET_FILE).read()",
    "reading system files": "open('/etc/passwd').read()",
    "reading the parent's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "changing the parent's files": "import os\nos.chmod(SECRET_FILE, 0)",
    "writing outside": "open(SECRET_FILE + '.pwned', 'w')",
    "killing the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "killing everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "starving the parent": "import os, resource\n"
    "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "other programs": "import subprocess\nsubprocess.run(['/bin/true'])",
    "shared memory": "from multiprocessing import shared_memory\n"
    "shared_memory.SharedMemory('pwned', True, 10**6)",
    "exit": "import sys\nsys.exit(0)",
    "exit without cleaning up": "import os\nos._exit(0)",
    "crash": "import ctypes\nctypes.string_at(0)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail(name: str, level: sandbox.Level, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    program = HOSTILE[name].replace("SECRET_FILE", repr(str(secret))).replace("PORT", "80")
    start = time.monotonic()
    outcome = sandbox.run_tests(program + RIGHT, TESTS, QUICK, level)
    assert not outcome.passed
    assert outcome.status != "failed", outcome.detail
    assert SECRET not in str(outcome)
    assert time.monotonic() - start < QUICK.wall_s + 4
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]
    assert secret.stat().st_mode & 0o777


CHEATS = {
    "always equal": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "equal integer": "class E(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\ndef f(x): return E(7)",
    "patched built-ins": "import builtins\nbuiltins.AssertionError = None\n"
    "builtins.all = builtins.any = lambda *a: True\ndef f(x): return 0",
    "printing the marker": "print('{\"end\": true}')\nprint('passed')\ndef f(x): return 0",
    "writing to every descriptor": "import os\nfor fd in range(64):\n    try:\n"
    "        os.write(fd, b'\\x0d\\0\\0\\0{\"end\": true}')\n    except OSError:\n        pass\n"
    "def f(x): return 0",
    "looking for the tests": "import gc\ndef f(x):\n"
    "    return [o for o in gc.get_objects() if isinstance(o, str) and 'assert f' in o] or 0",
    "raising an exit": "def f(x): raise SystemExit(0)",
    "raising an interrupt": "def f(x): raise KeyboardInterrupt",
    "too much output": "def f(x): return 'x' * 10**8",
    "changing the argument": "def f(x): return x",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_fail(name: str, level: sandbox.Level) -> None:
    outcome = sandbox.run_tests(CHEATS[name], TESTS, QUICK, level)
    assert not outcome.passed
    assert not any(result.passed for result in outcome.results)


def test_a_replaced_builtin_does_not_compare(level: sandbox.Level) -> None:
    program = "set = lambda x: 0\ndef f(x):\n    return [7]"
    outcome = sandbox.run_tests(program, "assert set(f(1)) == set([1, 2])", QUICK, level)
    assert not outcome.passed


def test_a_program_may_be_named_like_a_builtin(level: sandbox.Level) -> None:
    program = "def sum(a, b):\n    return a + b"
    assert sandbox.run_tests(program, "assert sum(1, 2) == 3", QUICK, level).passed


ORDINARY = {
    "containers": (
        "def f(x): return {'a': [1, (2.5, None)], 'b': {3, 4}, 'c': 1j, 'd': b'x', 'e': range(3)}",
        "assert f(0) == {'a': [1, (2.5, None)], 'b': {3, 4}, 'c': 1j, 'd': b'x', 'e': range(3)}",
    ),
    "large integers": ("def f(n): return 10**n", "assert f(5000) == 10**5000"),
    "odd strings": ("def f(x): return x + '\\ud800\\0'", "assert f('😀') == '😀\\ud800\\0'"),
    "changed arguments": (
        "def f(x, y):\n    x.sort()\n    y.clear()",
        "a = [3, 1, 2]\nb = {1: 2}\nf(a, b)\nassert a == [1, 2, 3]\nassert b == {}",
    ),
    "exceptions": (
        "class Odd(Exception): pass\ndef f(x):\n    if x: raise ValueError('no')\n    raise Odd",
        "try:\n    f(1)\n    caught = False\nexcept ValueError:\n    caught = True\nassert caught",
    ),
    "objects": (
        "class P:\n    def __init__(self, a): self.a = a\n    def twice(self): return 2 * self.a\n"
        "def total(ps): return sum(p.a for p in ps)",
        "p = P(4)\nassert p.twice() == 8\nassert p.a == 4\nassert total([P(1), P(2)]) == 3",
    ),
    "generators": (
        "def f(n):\n    for i in range(n): yield i * i",
        "assert list(f(4)) == [0, 1, 4, 9]\nassert sum(f(3)) == 5",
    ),
    "check functions": (
        "def f(x): return x * 2",
        "def check(g):\n    assert g(2) == 4\n    assert g('a') == 'aa'\ncheck(f)",
    ),
    "keyword arguments": ("def f(a, *, b=1): return a - b", "assert f(3, b=2) == 1"),
    "library modules": ("import math\ndef f(x): return math.pi * x", "assert f(1) == math.pi"),
    "own files": (
        "def f(x):\n    open('a', 'w').write(x)\n    return open('a').read()",
        "assert f('text') == 'text'",
    ),
    "data classes": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def f(x): return P(x).x",
        "assert f(3) == 3",
    ),
    "threads": (
        "import threading\ndef f(x):\n    out = []\n"
        "    t = threading.Thread(target=out.append, args=(x,))\n    t.start()\n    t.join()\n"
        "    return out",
        "assert f(3) == [3]",
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_pass(name: str, level: sandbox.Level) -> None:
    program, tests = ORDINARY[name]
    outcome = sandbox.run_tests(program, tests, sandbox.Limits(), level)
    assert outcome.passed, outcome


def test_each_test_has_a_result(level: sandbox.Level) -> None:
    program = "def f(x):\n    if x > 5: raise KeyError('k' * 1000)\n    return x"
    outcome = sandbox.run_tests(
        program, "assert f(1) == 1\nassert f(2) == 3\nassert f(9) == 9", QUICK, level
    )
    assert [r.passed for r in outcome.results] == [True, False, False]
    assert outcome.results[1].detail == "got 2, expected 3"
    assert "KeyError" in outcome.results[2].detail
    assert len(outcome.results[2].detail) <= 300


def test_a_function_of_the_tests_cannot_enter(level: sandbox.Level) -> None:
    outcome = sandbox.run_tests("def f(g): return g(1)", "assert f(lambda x: x) == 1", QUICK, level)
    assert "can't go into the sandbox" in outcome.results[0].detail


def test_no_test_is_no_success(level: sandbox.Level) -> None:
    assert not sandbox.run_tests(RIGHT, "x = 1", QUICK, level).passed


def test_the_lower_level_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    sandbox._bubblewrap_missing.cache_clear()
    try:
        with pytest.raises(
            sandbox.SandboxUnavailable, match=r"install bubblewrap.*allow_restricted"
        ):
            sandbox.level()
        with pytest.raises(sandbox.SandboxUnavailable):
            verify("code", TESTS, RIGHT)
        if not _unavailable("restricted"):
            assert sandbox.level(allow_restricted=True) == "restricted"
            assert verify("code", TESTS, RIGHT, allow_restricted=True).correct
    finally:
        sandbox._bubblewrap_missing.cache_clear()


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```\nthen\n```py\nx = 2\n```\n```text\nno\n```", "x = 2"),
        ("<think>```python\nx = 1\n```</think><answer>x = 3</answer>", "x = 3"),
        ("<answer>```python\nx = 5\n```</answer>", "x = 5"),
        ("<answer>\n```\n  x = 6\n```\n</answer>", "  x = 6"),
        ("x = 4", "x = 4"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("", None),
    ],
)
def test_the_program_of_a_completion(text: str, program: str | None) -> None:
    from cotutor.rollout.verifiers.unit_tests import extract

    assert extract(text) == program


def test_code_verdicts(level: sandbox.Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "level", lambda allow_restricted: level)
    fenced = f"Here it is:\n```python\n{RIGHT}\n```"
    assert verify("code", TESTS, fenced).status == "right"
    wrong = verify("code", TESTS, "```python\ndef f(x): return 2\n```")
    assert wrong.status == "wrong"
    assert wrong.detail == "1 of 2 tests pass\nassert f(2) == 3: got 2, expected 3"
    assert verify("code", TESTS, "```python\nwhile 1: pass\n```", timeout_s=1).status == "timed_out"
    assert verify("code", TESTS, " ").status == "no_answer"
    assert verify("code", TESTS, "def f(x):").status == "wrong"


def test_the_detail_of_a_verdict_is_short_whatever_a_program_says(
    level: sandbox.Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "level", lambda allow_restricted: level)
    tests = "\n".join(f"assert f({n}) == {n}" for n in range(20))
    verdict = verify("code", tests, "def f(x): raise ValueError('x' * 10**6)")
    first, second, *_ = verdict.detail.split("\n")
    assert first == "0 of 20 tests pass"
    assert second.startswith("assert f(0) == 0: ValueError: xxx")
    assert len(verdict.detail) <= 800
    broken = verify("code", tests, "def f(x:")
    assert "loading the program: SyntaxError" in broken.detail
    assert "no result within 1 s" in verify("code", tests, "while 1: 0", timeout_s=1).detail


PARENT = """
import sys
from cotutor.rollout import sandbox
sandbox.run_tests("while True: pass", "assert f(1)", sandbox.Limits(wall_s=60), sys.argv[1])
"""


def test_a_program_dies_with_its_parent(level: sandbox.Level, tmp_path: Path) -> None:
    (tmp_path / "parent").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "parent")}
    with subprocess.Popen([sys.executable, "-c", PARENT, level], env=environment) as parent:
        deadline = time.monotonic() + 20
        while not running() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        assert running()
        parent.send_signal(signal.SIGKILL)
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running()
