"""Whether two trees are the same answer: structure first, exact values, then random points.

True and False are decisions; None says that this module can't tell. Numbers agree exactly, unless
one of them is written with decimals. Functions of symbols agree when they do to 28 digits at
`POINTS` random points, and differ when they differ by more than 1e-9 of their size at any one;
between the two nothing is decided.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from .lexer import GrammarError, LimitError, Node
from .values import Evaluator, OutsideDomain, exact

POINTS = 6
_ENOUGH_POINTS = 3
_ATTEMPTS = 40
_DIGITS = 40  # 30 and ten to lose
_CONSTANT_DIGITS = 60
_AGREE = 1e-28
_INTEGRALS_AGREE = 1e-12
_CONSTANTS_AGREE = 1e-48
_DIFFER = 1e-9
_DECIMALS_AGREE = 2e-6  # six correct digits, as math-verify's default asks for

Domain = Mapping[str, Sequence[float]]
_Sampler = Callable[[random.Random], float]
_LINE: list[_Sampler] = [
    lambda rng: rng.choice((-1, 1)) * rng.uniform(0.15, 3.2),
    lambda rng: rng.uniform(0.15, 3.2),
    lambda rng: float(rng.randint(1, 9)),
]


def has_decimals(node: Node) -> bool:
    """Whether a number in the tree is written with a decimal point or exponent."""
    if node[0] == "num":
        return node[2] is not None
    return any(isinstance(part, tuple) and part and has_decimals(part) for part in node[1:])


def has_integral(node: Node) -> bool:
    """Whether the tree holds an integral, whose values have fewer digits."""
    if node[0] == "int":
        return True
    return any(isinstance(part, tuple) and part and has_integral(part) for part in node)


def symbols(node: Node, bound: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the free symbols of a tree."""
    if node[0] == "sym":
        return frozenset([node[1]]) - bound - {"True"}
    if node[0] in ("int", "sum", "prod"):
        inner = symbols(node[1], bound | {node[2]})
        return inner | symbols(node[3], bound) | symbols(node[4], bound)
    found: frozenset[str] = frozenset()
    for part in node:
        if isinstance(part, tuple) and part:
            is_node = isinstance(part[0], str)
            found |= symbols(part, bound) if is_node else symbols(("", *part), bound)
    return found


def same_value(
    gold: Node,
    answer: Node,
    precision: int | None = None,
    domain: Domain | None = None,
    seed: str = "",
) -> bool | None:
    """Compare two scalar trees.

    Args:
        gold: the right value.
        answer: the value to judge.
        precision: decimals to which numbers must agree; None: exactly, or to 2e-6 of the gold when
            one side is written with decimals.
        domain: symbol → (low, high) of the points; default: reals, positive reals, integers, the
            first of these on which both have values.
        seed: chooses the points.

    Returns:
        True, False, or None when neither can be shown.

    Raises:
        LimitError: the answer is too large to be evaluated.
    """
    if gold == answer:
        return True
    decimals = has_decimals(gold) or has_decimals(answer)
    a, b = exact(gold), exact(answer)
    if a is not None and b is not None:
        if precision is None and not decimals:
            return a == b
        return bool(abs(a - b) <= _allowed(a, precision))
    names = sorted(symbols(gold) | symbols(answer))
    if not names:
        return _same_constant(gold, answer, precision, decimals)
    return _same_function(gold, answer, names, decimals, domain, seed)


def _allowed(gold: Fraction, precision: int | None) -> Fraction:
    if precision is not None:
        return Fraction(51, 100) / 10**precision
    return abs(gold) * Fraction(_DECIMALS_AGREE)


def _same_constant(gold: Node, answer: Node, precision: int | None, decimals: bool) -> bool | None:
    for real in (True, False):
        evaluate = Evaluator({}, _CONSTANT_DIGITS, real)
        try:
            a, b = evaluate(gold), evaluate(answer)
        except OutsideDomain:
            continue
        if a == b:
            return True
        if not (evaluate.mp.isfinite(a) and evaluate.mp.isfinite(b)):
            return False
        gap, size = abs(a - b), max(abs(a), abs(b))
        if precision is not None:
            return bool(gap <= 0.51 * evaluate.mp.mpf(10) ** -precision)
        if decimals:
            return bool(gap <= _DECIMALS_AGREE * size)
        integrals = has_integral(gold) or has_integral(answer)
        agree = _INTEGRALS_AGREE if integrals else _CONSTANTS_AGREE
        if gap <= agree * size:
            return True
        return False if gap > _DIFFER * size else None
    return None


def _same_function(
    gold: Node, answer: Node, names: list[str], decimals: bool, domain: Domain | None, seed: str
) -> bool | None:
    agree, differ = (_DECIMALS_AGREE, 5 * _DECIMALS_AGREE) if decimals else (_AGREE, _DIFFER)
    if has_integral(gold) or has_integral(answer):
        agree = max(agree, _INTEGRALS_AGREE)
    for points in sample(names, domain, seed):
        values = list(valid_pairs(gold, answer, points))
        if len(values) < _ENOUGH_POINTS:
            continue
        gaps = [abs(a - b) / max(abs(a), abs(b), 1e-25) for a, b in values]
        if all(gap <= agree for gap in gaps):
            return True
        return False if max(gaps) > differ else None
    return None


def sample(names: list[str], domain: Domain | None, seed: str) -> list[list[dict[str, float]]]:
    """Return lists of random points: one on the stated domain, or one for each default domain."""
    rng = random.Random(f"{seed}|{names}")
    stated = domain or {}
    unknown = sorted(set(stated) - set(names))
    kinds = _LINE if len(stated) - len(unknown) < len(names) else _LINE[:1]
    return [
        [
            {n: _inside(rng, *stated[n]) if n in stated else draw(rng) for n in names}
            for _ in range(_ATTEMPTS)
        ]
        for draw in kinds
    ]


def _inside(rng: random.Random, low: float, high: float) -> float:
    """Draw from a stated range; a third each near its ends, where small terms show."""
    share = rng.choice((rng.random(), 0.03 * rng.random(), 1 - 0.03 * rng.random()))
    return low + (high - low) * share


def valid_pairs(gold: Node, answer: Node, points: list[dict[str, float]]) -> Any:
    """Yield the values of both trees at the first `POINTS` points where both are finite."""
    found = 0
    for point in points:
        evaluate = Evaluator({}, _DIGITS, real=True)
        evaluate.point = {name: evaluate.mp.mpf(value) for name, value in point.items()}
        try:
            a, b = evaluate(gold), evaluate(answer)
        except OutsideDomain:
            continue
        if isinstance(a, bool) or not (evaluate.mp.isfinite(a) and evaluate.mp.isfinite(b)):
            continue
        yield a, b
        found += 1
        if found == POINTS:
            return


def constant_ratio(gold: Node, answer: Node, seed: str = "") -> float | None:
    """Return the constant that `answer` is of `gold`; 0.0 when it is none, None when unknown."""
    names = sorted(symbols(gold) | symbols(answer))
    for points in sample(names, None, seed):
        try:
            values = list(valid_pairs(gold, answer, points))
        except (LimitError, GrammarError):
            return None
        if len(values) < _ENOUGH_POINTS:
            continue
        if any(abs(a) < 1e-20 for a, _ in values):
            return None
        ratios = [b / a for a, b in values]
        first = ratios[0]
        if all(abs(r - first) <= 1e-20 * abs(first) for r in ratios):
            return float(first)
        return 0.0
    return None
