"""Code answers: the program in the completion against unit tests, in the sandbox."""

import ast

from cotutor.rollout import sandbox

from .extraction import last_tag, visible
from .verdict import Verdict, judged, unjudged

_LANGUAGES = frozenset({"", "python", "py", "python3"})
_MAX_DETAIL_CHARS = 800
_MAX_CODE_CHARS = 50_000


def judge(
    gold: str,
    text: str,
    timeout_s: float = 10.0,
    memory_mb: int = 1024,
    file_mb: int = 16,
    allow_restricted: bool = False,
) -> Verdict:
    """Judge a program by its unit tests.

    Args:
        gold: the tests: Python source whose top-level `assert`s and bare calls are the tests.
        text: the completion. The program is its last fenced block that is Python or names no
            language; without one, the last `<answer>` tag; without that, the whole text.
        timeout_s: wall-clock and CPU limit for all tests together [s].
        memory_mb: address space of the program [MiB].
        file_mb: size of its temporary folder [MiB].
        allow_restricted: run it on the lower level where bubblewrap doesn't work.

    Returns:
        "right" when there are tests and all pass; "timed_out" at a limit; "error" when the sandbox
        itself failed. `detail` has one line for each test that failed, and how, as far as they fit.

    Raises:
        SandboxUnavailable: no allowed level works here.
        ValueError: tests that aren't Python, or none.
    """
    _check_tests(gold)
    where = sandbox.level(allow_restricted)
    program = extract(text)
    if not program:
        return unjudged("no_answer")
    if len(program) > _MAX_CODE_CHARS:
        return judged(False, program[:200], f"a program of more than {_MAX_CODE_CHARS} characters")
    limits = sandbox.Limits(wall_s=timeout_s, memory_mb=memory_mb, file_mb=file_mb)
    outcome = sandbox.run_tests(program, gold, limits, where)
    detail = _detail(outcome)
    if outcome.status == "finished":
        return judged(outcome.passed, program[:200], detail)
    return unjudged("timed_out" if outcome.status == "limit" else "error", program[:200], detail)


def extract(text: str) -> str | None:
    """Return the program of a completion, None when there is none."""
    text = visible(text)
    blocks = _fenced(text)
    if blocks:
        return blocks[-1] if blocks[-1].strip() else None
    tagged = last_tag(text, "answer")
    program = (tagged if tagged is not None else text).strip("\n ")
    inside = _fenced(program)  # a fence right behind the tag
    return (inside[-1] if inside else program).strip("\n") or None


def _fenced(text: str) -> list[str]:
    """Return the contents of the closed fenced blocks in Python or in no named language."""
    blocks: list[str] = []
    lines: list[str] | None = None
    language = ""
    for line in text.split("\n"):
        stripped = line.strip()
        if lines is None and stripped.startswith("```"):
            lines, language = [], stripped[3:].strip().lower()
        elif lines is not None and stripped == "```":
            blocks += ["\n".join(lines)] if language in _LANGUAGES else []
            lines = None
        elif lines is not None:
            lines.append(line)
    return blocks


def _check_tests(gold: str) -> None:
    try:
        body = ast.parse(gold).body
    except SyntaxError as error:
        raise ValueError(f"the tests aren't Python: {error}") from error
    if not any(isinstance(node, (ast.Assert, ast.Expr)) for node in body):
        raise ValueError("the tests hold no assert and no call")


def _detail(outcome: sandbox.Outcome) -> str:
    lines = [
        f"{len([r for r in outcome.results if r.passed])} of {len(outcome.results)} tests pass"
    ]
    lines += [f"{r.source}: {r.detail}" for r in outcome.results if not r.passed]
    lines += [outcome.detail] if outcome.detail else []
    return "\n".join(lines)[:_MAX_DETAIL_CHARS]
