r"""Expressions of symbols, as asymptotic analysis gives them.

`exp(-(x + 1)/epsilon) + exp((x - 1)/epsilon)` in a program's notation or in LaTeX, with erf,
Heaviside, Piecewise, Abs, Bessel functions and unevaluated integrals. Two expressions are the same
by structure; by values at random points of the stated domain; or, where the points decide nothing,
by simplification within a time budget. (Points come before simplification because they refute a
wrong answer in milliseconds.) What none of the three decides is "undecided".
"""

import re
from collections.abc import Mapping, Sequence

from .comparison import same_value
from .grammar import parse
from .lexer import GrammarError, LimitError, Node
from .normalise import plain_math
from .statements import stated
from .structures import named_value
from .symbolic import check_size, same_after_simplification, same_structure
from .values import Evaluator, OutsideDomain
from .verdict import Verdict, judged, unjudged

_STRUCTURE_S = 0.5
_PARAMETER_DIGITS = 30
_PARAMETER_TOLERANCE = 1e-6


def judge(
    gold: str,
    text: str,
    domain: Mapping[str, Sequence[float]] | None = None,
    parameters: Mapping[str, float] | None = None,
    simplify_s: float = 2.0,
) -> Verdict:
    """Judge an expression.

    Args:
        gold: the right expression; `u(x) = …` stands for its right side.
        text: the completion.
        domain: symbol → (low, high) of the points of comparison. Symbols without one are drawn from
            the reals, else the positive reals, else the positive integers.
        parameters: values of all symbols. Given these, the two numbers at that one (complex) point
            are compared, to 1e-6.
        simplify_s: budget of the simplification [s].

    Returns:
        "right", "wrong", "no_answer" or "undecided". An answer outside the grammar is "wrong".

    Raises:
        ValueError: a gold outside the grammar, or bounds that are no pair of numbers.
    """
    wanted = _complex(gold) if parameters is not None else read(gold)
    for name, bounds in (domain or {}).items():
        if len(bounds) != 2 or not bounds[0] < bounds[1]:
            raise ValueError(f"domain of {name} must be (low, high), got {bounds}")
    statement = stated(text)
    if statement is None:
        return unjudged("no_answer")
    shown = statement.text.strip()[:200]
    try:
        said = read(statement.text)
        check_size(said)
        if parameters is not None:
            return _judge_at(wanted, said, parameters, shown)
        if wanted == said or same_structure(wanted, said, _STRUCTURE_S):
            return judged(True, shown, "same structure")
        decided = same_value(wanted, said, domain=domain, seed=gold)
        if decided is not None:
            return judged(decided, shown, "values at random points")
        if same_after_simplification(wanted, said, simplify_s):
            return judged(True, shown, "simplification")
    except (LimitError, RecursionError, OverflowError) as error:
        return judged(False, shown, f"too large to be evaluated: {error}"[:200])
    except GrammarError as error:
        return judged(False, shown, f"outside the grammar: {error}"[:200])
    return unjudged("undecided", shown)


def read(text: str) -> Node:
    """Parse an expression in LaTeX or a program's notation; raises GrammarError or LimitError."""
    text = plain_math(text.strip().strip("`").strip()).rstrip(" .;")
    latex = "\\" in text
    tree = parse(text, whole_names=not latex, sympy_names=not latex)
    named = named_value(tree)
    return named[1] if named else tree


def _complex(gold: str) -> Node:
    """Parse a gold value that may be written as Python writes complex numbers."""
    return read(re.sub(r"(?<=[\d.])j", "*i", gold))


def _judge_at(gold: Node, answer: Node, parameters: Mapping[str, float], shown: str) -> Verdict:
    evaluate = Evaluator({}, _PARAMETER_DIGITS, real=False)
    evaluate.point = {name: evaluate.mp.mpmathify(value) for name, value in parameters.items()}
    try:
        a, b = evaluate(gold), evaluate(answer)
    except OutsideDomain as error:
        return unjudged("undecided", shown, str(error))
    return judged(
        bool(abs(a - b) <= _PARAMETER_TOLERANCE * abs(a)), shown, "value at the parameters"
    )
