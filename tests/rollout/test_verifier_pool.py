"""The pool: order, limits, replacement, threads, and its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotutor.rollout.verifiers import VerifierPool

# Takes many seconds: an integral of integrals of integrals.
SLOW = r"\boxed{\int_0^1 \int_0^1 \int_0^1 \int_0^1 \sin(xyzt)\,dx\,dy\,dz\,dt}"
DENIALS = [
    "9^{9^{9^9}}",
    "1000000!",
    "(" * 3000 + "1" + ")" * 3000,
    "1" * 100_000,
    r"\sqrt{" * 2000,
    r"\sum_{k=1}^{10^9} k",
    "*".join(["x"] * 700),
]


def ordinary(i: int) -> tuple[str, str, str, dict[str, object]]:
    return ("math", rf"\frac{{{i}}}{{7}}+\sqrt2", rf"So \boxed{{\sqrt{{2}} + {i}/7}}.", {})


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=2, timeout_s=1.0, recycle_after=30) as shared:
        shared.verify_many([ordinary(1)] * 2)  # started, so that tests measure no imports
        yield shared


def children(pid: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(entry))
    return found


def newest_supervisor() -> int:
    return max(p for p in children(os.getpid()) if children(p))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: object, seconds: float = 10.0) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_verdicts_come_in_order(pool: VerifierPool) -> None:
    jobs = [ordinary(i) if i % 3 else ("math", "0", str(i + 1), {}) for i in range(90)]
    jobs[10] = ("mcq", "B", "(B)", {"options": "AB"})
    verdicts = pool.verify_many(jobs)
    assert [v.correct for v in verdicts] == [bool(i % 3) for i in range(90)]
    assert verdicts[10].extracted == "B"
    assert verdicts[12].extracted == "13"


def test_slow_answer_times_out_and_others_do_not(pool: VerifierPool) -> None:
    start = time.monotonic()
    verdicts = pool.verify_many([("math", "1", SLOW, {}), *map(ordinary, range(40))])
    assert verdicts[0].status == "timed_out"
    assert "1 s" in verdicts[0].detail
    assert all(v.correct for v in verdicts[1:])
    assert time.monotonic() - start < 5


def test_hostile_strings_beside_a_hundred_ordinary_answers(pool: VerifierPool) -> None:
    hostile = [("math", "7", rf"\boxed{{{d}}}", {}) for d in DENIALS] + [("math", "1", SLOW, {})]
    jobs = [ordinary(i) for i in range(100)]
    for i, job in enumerate(hostile):
        jobs.insert(11 * i, job)
    verdicts = dict(zip(map(str, jobs), pool.verify_many(jobs), strict=True))
    for job in jobs:
        verdict = verdicts[str(job)]
        assert verdict.correct == (job not in hostile)
        assert verdict.status != "error"


def test_a_worker_that_dies_is_replaced(pool: VerifierPool) -> None:
    supervisors = [p for p in children(os.getpid()) if children(p)]
    assert supervisors
    for supervisor in supervisors:
        for child in children(supervisor):
            os.kill(child, signal.SIGKILL)
    assert all(v.status != "wrong" for v in pool.verify_many([ordinary(i) for i in range(4)]))
    assert all(v.correct for v in pool.verify_many([ordinary(i) for i in range(20)]))


def test_a_lost_supervisor_is_replaced() -> None:
    with VerifierPool(workers=1, timeout_s=5) as pool:
        assert pool.verify_many([ordinary(1)])[0].correct
        supervisor = newest_supervisor()
        os.kill(supervisor, signal.SIGKILL)  # between two jobs: nobody notices
        assert wait_until(lambda: not alive(supervisor))
        assert pool.verify_many([ordinary(2)])[0].correct
        killer = threading.Timer(0.5, os.kill, (newest_supervisor(), signal.SIGKILL))
        killer.start()
        assert pool.verify_many([("math", "1", SLOW, {})])[0].status == "error"
        assert pool.verify_many([ordinary(2)])[0].correct


def test_workers_are_recycled() -> None:
    with VerifierPool(workers=1, timeout_s=5, recycle_after=3) as pool:
        pool.verify_many([ordinary(1)])
        supervisor = newest_supervisor()
        first = children(supervisor)
        pool.verify_many([ordinary(i) for i in range(3)])
        assert children(supervisor) != first


def test_memory_limit_is_a_verdict() -> None:
    with VerifierPool(workers=1, timeout_s=20, memory_mb=64) as pool:
        verdicts = pool.verify_many([("math", "1", "x" * 6_000_000, {})])
    assert verdicts[0].status == "timed_out"
    assert "memory" in verdicts[0].detail


def test_many_threads_share_a_pool(pool: VerifierPool) -> None:
    results: dict[int, list[bool]] = {}

    def ask(n: int) -> None:
        jobs = [ordinary(i) if (i + n) % 2 else ("math", "5", "6", {}) for i in range(20)]
        results[n] = [v.correct for v in pool.verify_many(jobs)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [bool((i + n) % 2) for i in range(20)] for n in range(8)}


def test_rows_that_cannot_be_judged_are_errors(pool: VerifierPool) -> None:
    rows = [("math", "", "1", {}), ("math", "1", "1", {"colour": 1}), ("maths", "1", "1", {})]
    rows += [("math", "1", "1", {"precision": object()}), ("code", "def", "x", {})]
    verdicts = pool.verify_many(rows)
    assert [v.status for v in verdicts] == ["error"] * 5
    assert "empty" in verdicts[0].detail
    assert "colour" in verdicts[1].detail
    assert "kind must be one of" in verdicts[2].detail
    assert "tests aren't Python" in verdicts[4].detail


def test_odd_texts_arrive_whole(pool: VerifierPool) -> None:
    texts = ["\ud800 \\boxed{1}", "\x00\\boxed{1}", "😀\\boxed{1}\n"]
    assert all(v.correct for v in pool.verify_many([("math", "1", t, {}) for t in texts]))


def test_impossible_limits_are_refused() -> None:
    for options in ({"workers": 0}, {"timeout_s": 0.0}, {"memory_mb": 0}, {"recycle_after": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            VerifierPool(**{"workers": 1, "timeout_s": 1.0, **options})


def test_closed_pool_refuses() -> None:
    pool = VerifierPool(workers=1, timeout_s=1.0)
    assert pool.verify_many([ordinary(1)])[0].correct
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.verify_many([ordinary(1)])


@pytest.mark.parametrize("program", ["while True: pass", "open('x', 'w').write('y')\nf = print"])
def test_code_in_a_pool_leaves_nothing(program: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        with VerifierPool(workers=1, timeout_s=1.5) as pool:
            job = ("code", "assert f(1) == 2", program, {"allow_restricted": True})
            verdict = pool.verify_many([job])[0]
            if verdict.status == "error":
                pytest.skip(verdict.detail)
            assert verdict.status in ("timed_out", "wrong")
            assert pool.verify_many([ordinary(1)])[0].correct
    assert not list(tmp_path.iterdir())


PARENT = """
import signal, sys, threading, time
from cotutor.rollout.verifiers import VerifierPool
# A test run in the background of a shell inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
pool = VerifierPool(2, 2.0)
pool.verify_many([("math", "1", "1", {})] * 8)
job = ("math", "1", sys.argv[1], {})
threading.Thread(target=pool.verify_many, args=([job],), daemon=True).start()
time.sleep(0.2)
print("busy", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_parent(how: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, SLOW],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"busy\n"
        supervisors = children(parent.pid)
        family = supervisors + [c for s in supervisors for c in children(s)]
        assert len(family) >= 3
        parent.send_signal(how)
        parent.wait(60)
    assert wait_until(lambda: not any(map(alive, family))), [p for p in family if alive(p)]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_hundred_ordinary_answers_a_second() -> None:
    with VerifierPool(workers=2, timeout_s=5) as pool:
        pool.verify_many([ordinary(i) for i in range(50)])
        start = time.monotonic()
        verdicts = pool.verify_many([ordinary(i) for i in range(1000)])
        seconds = time.monotonic() - start
    assert all(v.correct for v in verdicts)
    assert 1000 / seconds >= 200
