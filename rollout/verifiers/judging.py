"""From a kind to its verifier."""

from typing import Any

from . import expressions, math_answers, multiple_choice, numeric, plain_text, unit_tests
from .verdict import Verdict

# Judged in the calling process, with nothing between: string scans that are linear in a bounded
# text, with no algebra, no parsing by recursion and no code. All other kinds need a worker.
INLINE_KINDS = frozenset({"mcq", "text"})
KINDS = ("mcq", "math", "expression", "numeric", "text", "code")


def verify(kind: str, gold: str, text: str, **options: Any) -> Verdict:
    """Judge one completion in this process, without limits on time or memory.

    Use `VerifierPool` for texts that a model wrote: only its workers can be stopped.

    Args:
        kind: one of mcq, math, expression, numeric, text, code.
        gold: the right answer (mcq: letter; code: unit tests).
        text: the completion.
        **options: as the kind's `judge` takes them.

    Returns:
        The verdict.

    Raises:
        ValueError: an unknown kind, or a gold or option that the kind can't use.
        TypeError: an option that the kind doesn't know.
    """
    if kind == "mcq":
        return multiple_choice.judge(gold, text, **options)
    if kind == "text":
        return plain_text.judge(gold, text, **options)
    if kind == "expression":
        return expressions.judge(gold, text, **options)
    if kind == "math":
        return math_answers.judge(gold, text, **options)
    if kind == "numeric":
        return numeric.judge(gold, text, **options)
    if kind == "code":
        return unit_tests.judge(gold, text, **options)
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def warm_up() -> None:
    """Import what the kinds load lazily, so that no answer waits for it; once with each library."""
    for gold, text in (("2", "\\boxed{\\sqrt{4}}"), ("|z| \\le 2", "$z \\in [-2, 2]$")):
        verify("math", gold, text)
    verify("expression", "x**2", "x*x")
