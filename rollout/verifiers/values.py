"""Values of a tree: exact rationals, and numbers in mpmath to many digits.

No step is taken whose result would be too large: exact results stay below `MAX_BITS`, powers in
floating point below 10^(10^60), where their exponents still are numbers of 200 bits. Whatever is
larger raises LimitError.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from .lexer import GrammarError, LimitError, Node

MAX_BITS = 200_000
_MAX_EXPONENT = 10**60
_MAX_ARGUMENT = 10**7
_MAX_FACTORIAL = 10_000
_MAX_TERMS = 10_000


class OutsideDomain(ValueError):
    """The tree has no (real) value at this point."""


def exact(node: Node) -> Fraction | None:
    """Return the exact rational value, None when the tree isn't made of rational operations."""
    operation = node[0]
    if operation == "num":
        return node[1]
    if operation == "call":
        return _exact_call(node)
    if operation not in ("add", "mul", "div", "neg", "pow", "fact", "pct"):
        return None
    parts = [exact(part) for part in node[1:]]
    if any(part is None for part in parts):
        return None
    values = [part for part in parts if part is not None]
    if operation == "add":
        return _bounded(sum(values, Fraction(0)))
    if operation == "mul":
        return _bounded(math.prod(values, start=Fraction(1)))
    if operation == "div":
        return None if values[1] == 0 else _bounded(values[0] / values[1])
    if operation == "neg":
        return -values[0]
    if operation == "pct":
        return values[0] / 100
    if operation == "fact":
        return _factorial(values[0])
    return _power(*values)


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise LimitError(f"a number of more than {MAX_BITS} bits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or (base == 0 and exponent < 0):
        return None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent.numerator) > MAX_BITS:
        raise LimitError(f"a power of more than {MAX_BITS} bits")
    if bits <= 1:  # 0, 1 and -1, whatever the exponent
        return base if exponent.numerator % 2 or (base >= 0 and exponent) else Fraction(1)
    return base**exponent.numerator


def _factorial(value: Fraction) -> Fraction | None:
    if value.denominator != 1 or value < 0:
        return None
    if value > _MAX_FACTORIAL:
        raise LimitError(f"a factorial above {_MAX_FACTORIAL}!")
    return Fraction(math.factorial(value.numerator))


def _exact_call(node: Node) -> Fraction | None:
    name, *parts = node[1:]
    if name == "rational" and len(parts) == 2:
        return exact(("div", *parts))
    if name not in ("binomial", "gcd", "lcm", "abs", "floor", "ceiling", "factorial"):
        return None
    values = [exact(part) for part in parts]
    if any(v is None for v in values):
        return None
    known = [v for v in values if v is not None]
    if name == "abs" and len(known) == 1:
        return abs(known[0])
    if name in ("floor", "ceiling") and len(known) == 1:
        return Fraction((math.floor if name == "floor" else math.ceil)(known[0]))
    if name == "factorial" and len(known) == 1:
        return _factorial(known[0])
    whole = [v.numerator for v in known if v.denominator == 1 and v >= 0]
    if len(whole) != len(known) or not whole or (name == "binomial" and len(whole) != 2):
        return None
    if name == "binomial" and max(whole) > _MAX_FACTORIAL:
        raise LimitError(f"a binomial coefficient above {_MAX_FACTORIAL}")
    return Fraction({"binomial": math.comb, "gcd": math.gcd, "lcm": math.lcm}[name](*whole))


@lru_cache(maxsize=1)
def context() -> Any:
    """Return this module's own mpmath context (importing mpmath takes a tenth of a second)."""
    mpmath: Any = importlib.import_module("mpmath")
    return mpmath.mp.clone()


class Evaluator:
    """Evaluates trees at a point.

    Args:
        point: values of the symbols.
        digits: working precision in decimal digits.
        real: stay on the real line: roots of odd degree of negative numbers are real, logarithms
            and even roots of negative numbers raise OutsideDomain.
    """

    def __init__(self, point: Mapping[str, Any], digits: int, real: bool) -> None:
        self.mp = context()
        self.mp.dps = digits
        self.digits = digits
        self.point = dict(point)
        self.real = real
        self.integrals = 0  # around the node that is being evaluated

    def __call__(self, node: Node) -> Any:
        """Return the value of a tree; raises OutsideDomain, LimitError or GrammarError."""
        try:
            method: Callable[[Node], Any] = getattr(self, f"_{node[0]}")
        except AttributeError:
            raise GrammarError(f"{node[0]} has no value") from None
        try:
            value = method(node)
        except (GrammarError, LimitError, OutsideDomain):
            raise
        except (ArithmeticError, ValueError, TypeError, self.mp.NoConvergence) as error:
            raise OutsideDomain(str(error)) from error
        if isinstance(value, bool):
            return value
        if self.mp.isnan(value):
            raise OutsideDomain("not a number")
        if self.real and isinstance(value, self.mp.mpc):
            if abs(value.imag) > self.mp.eps * 1000 * (1 + abs(value.real)):
                raise OutsideDomain("not real")
            value = value.real
        return value

    def _num(self, node: Node) -> Any:
        return self.mp.mpf(node[1].numerator) / node[1].denominator

    def _const(self, node: Node) -> Any:
        if node[1] in self.point:  # i as the index of a sum
            return self.point[node[1]]
        if node[1] == "i" and self.real:
            raise OutsideDomain("i is not real")
        mp = self.mp
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1), "oo": mp.inf}[node[1]]

    def _sym(self, node: Node) -> Any:
        if node[1] not in self.point:
            raise GrammarError(f"symbol {node[1]} has no value")
        return self.point[node[1]]

    def _add(self, node: Node) -> Any:
        return sum((self(part) for part in node[2:]), self(node[1]))

    def _mul(self, node: Node) -> Any:
        return self(node[1]) * self(node[2])

    def _div(self, node: Node) -> Any:
        return self(node[1]) / self(node[2])

    def _neg(self, node: Node) -> Any:
        return -self(node[1])

    def _pct(self, node: Node) -> Any:
        return self(node[1]) / 100

    def _deg(self, node: Node) -> Any:
        return self(node[1]) * self.mp.pi / 180

    def _fact(self, node: Node) -> Any:
        return self.mp.gamma(self._small(self(node[1]) + 1))

    def _pow(self, node: Node) -> Any:
        base, exponent = self(node[1]), self(node[2])
        size = self.mp.re(self.mp.log(abs(base), 10) * exponent) if base else 0
        if size > _MAX_EXPONENT:
            raise LimitError("a power beyond 10^(10^60)")
        if size < -_MAX_EXPONENT:
            return self.mp.mpf(0)
        if self.real and base < 0 and not self.mp.isint(exponent):
            ratio = exact(node[2])
            if ratio is None or ratio.denominator % 2 == 0:
                raise OutsideDomain("a root of a negative number")
            return (-1) ** ratio.numerator * (-base) ** exponent
        return self.mp.power(base, exponent)

    def _small(self, value: Any) -> Any:
        if abs(value) > _MAX_ARGUMENT:
            raise LimitError(f"a function's argument beyond {_MAX_ARGUMENT}")
        return value

    def _apply(self, node: Node) -> Any:
        """An unknown function: some smooth function that only its name chooses."""
        seed = hashlib.sha256(node[1].encode()).digest()
        value = self.mp.mpf(seed[0] + 1) / 97
        for i, part in enumerate(node[2:][:4]):
            value += self.mp.sin(self(part) * (seed[2 * i + 1] + 30) / 151 + seed[2 * i + 2])
        return value

    def _tuple(self, node: Node) -> Any:
        raise GrammarError("a tuple has no value")

    def _piecewise(self, node: Node) -> Any:
        for value, condition in node[1:]:
            if condition == ("sym", "True") or self._holds(condition):
                return self(value)
        raise OutsideDomain("no condition holds")

    def _holds(self, node: Node) -> bool:
        if node[0] != "rel":
            raise GrammarError("a condition is a relation")
        terms = [self(term) for term in node[2]]
        tests: dict[str, Callable[[Any, Any], bool]] = {
            "=": lambda a, b: a == b,
            "!=": lambda a, b: a != b,
            "<": lambda a, b: a < b,
            ">": lambda a, b: a > b,
            "<=": lambda a, b: a <= b,
            ">=": lambda a, b: a >= b,
        }
        pairs = zip(node[1], terms, terms[1:], strict=False)
        return all(tests[operator](a, b) for operator, a, b in pairs)

    def _sum(self, node: Node) -> Any:
        return self._repeated(node, self.mp.mpf(0), lambda a, b: a + b)

    def _prod(self, node: Node) -> Any:
        return self._repeated(node, self.mp.mpf(1), lambda a, b: a * b)

    def _repeated(self, node: Node, start: Any, combine: Callable[[Any, Any], Any]) -> Any:
        _, body, name, low, high = node
        first, last = self(low), self(high)
        if not (self.mp.isint(first) and self.mp.isint(last)):
            raise OutsideDomain("a sum over limits that are not integers")
        if last - first > _MAX_TERMS:
            raise LimitError(f"a sum of more than {_MAX_TERMS} terms")
        kept = self.point.get(name)
        for index in range(int(first), int(last) + 1):
            self.point[name] = self.mp.mpf(index)
            start = combine(start, self(body))
        self._restore(name, kept)
        return start

    def _int(self, node: Node) -> Any:
        _, body, name, low, high = node
        kept = self.point.get(name)

        def integrand(x: Any) -> Any:
            self.point[name] = x
            return self(body)

        self.integrals += 1
        value, error = self.mp.quad(integrand, [self(low), self(high)], error=True, maxdegree=8)
        self.integrals -= 1
        self._restore(name, kept)
        size = abs(value) if not self.integrals else max(abs(value), 1)  # an inner one may vanish
        if error > size * self.mp.mpf(10) ** (-self.digits // 2):
            raise OutsideDomain("an integral that doesn't converge to enough digits")
        return value

    def _restore(self, name: str, kept: Any) -> None:
        if kept is None:
            self.point.pop(name, None)
        else:
            self.point[name] = kept

    def _call(self, node: Node) -> Any:
        name, mp = node[1], self.mp
        values = [self(part) for part in node[2:]]
        if self.real and name in ("log", "log10", "log2", "sqrt") and values[0] < 0:
            raise OutsideDomain("the logarithm or root of a negative number")
        if name in ("exp", "sinh", "cosh") and mp.isfinite(values[0]):
            if abs(values[0]) > _MAX_EXPONENT:
                if name == "exp" and mp.re(values[0]) < 0:
                    return mp.mpf(0)
                raise LimitError("an exponential beyond 10^(10^60)")
        elif name in ("gamma", "factorial", "binomial", "zeta", "digamma", "beta"):
            values = [self._small(v) for v in values]
        if name in ("max", "min"):
            return (max if name == "max" else min)(values)
        if name == "cbrt":
            return self(
                ("pow", node[2], ("div", ("num", Fraction(1), None), ("num", Fraction(3), None)))
            )
        if name == "heaviside":
            return mp.mpf(1) if values[0] > 0 else mp.mpf(1) / 2 if values[0] == 0 else mp.mpf(0)
        if name == "rational":
            return values[0] / values[1]
        spelled = {"abs": "fabs", "ceiling": "ceil", "arg": "arg", "conjugate": "conj"}
        spelled |= {"log10": "log", "log2": "log", "gcd": "nan", "lcm": "nan"}
        if name in ("log10", "log2"):
            values.append(mp.mpf(10 if name == "log10" else 2))
        return getattr(mp, spelled.get(str(name), str(name)))(*values)
