"""Trees as sympy objects, for equality by structure and by simplification.

Only constructors are called, on objects that this module made: no text reaches sympy, so nothing in
an answer can be evaluated as a program. Runs where it can be killed; `within` bounds it further.
"""

import functools
import importlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .lexer import FUNCTIONS, GrammarError, LimitError, Node
from .values import Evaluator, OutsideDomain

_SPELLED = {
    **{name: name for name in FUNCTIONS.values()},
    "abs": "Abs",
    "heaviside": "Heaviside",
    "max": "Max",
    "min": "Min",
    "ei": "Ei",
    "lambertw": "LambertW",
    "rational": "Rational",
}
_MAX_CONSTANT_DIGITS = 2000


class OutOfBudget(BaseException):
    """The time for an algebraic step is over; no `except Exception` inside sympy may catch it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OutOfBudget inside the block when it takes longer; main thread only.

    Raises:
        OutOfBudget: at once in other threads, where no timer can interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        raise OutOfBudget

    def stop(signum: int, frame: FrameType | None) -> None:
        raise OutOfBudget

    previous = signal.signal(signal.SIGALRM, stop)
    # Again and again: where Python runs a callback (a garbage collector's, say), an exception is
    # printed and lost, and without a second one the budget would be too.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def check_size(node: Node) -> None:
    """Raise LimitError when a constant power in the tree has too many digits for algebra."""
    for part in node[1:]:
        if isinstance(part, tuple) and part and isinstance(part[0], str):
            check_size(part)
    if node[0] in ("pow", "fact"):
        try:
            value = Evaluator({}, 15, real=False)(node)
        except (GrammarError, OutsideDomain):
            return
        if value and abs(Evaluator({}, 15, real=False).mp.log10(abs(value))) > _MAX_CONSTANT_DIGITS:
            raise LimitError(f"a constant of more than {_MAX_CONSTANT_DIGITS} digits")


def to_sympy(node: Node) -> Any:
    """Return the sympy object of a tree; raises GrammarError for operations without one."""
    sympy = _sympy()

    operation = node[0]
    if operation == "num":
        return sympy.Rational(node[1].numerator, node[1].denominator)
    if operation == "const":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}[node[1]]
    if operation == "sym":
        return sympy.true if node[1] == "True" else sympy.Symbol(node[1], real=True)
    if operation == "call":
        return _call(sympy, node)
    if operation == "apply":
        return sympy.Function(node[1])(*map(to_sympy, node[2:]))
    if operation in ("int", "sum", "prod"):
        kind = {"int": sympy.Integral, "sum": sympy.Sum, "prod": sympy.Product}[operation]
        limits = (sympy.Symbol(node[2], real=True), to_sympy(node[3]), to_sympy(node[4]))
        return kind(to_sympy(node[1]), limits)
    if operation == "piecewise":
        pairs = [(to_sympy(value), _condition(sympy, test)) for value, test in node[1:]]
        return sympy.Piecewise(*pairs)
    builders: dict[str, Callable[..., Any]] = {
        "add": sympy.Add,
        "mul": sympy.Mul,
        "div": lambda a, b: a / b,
        "neg": lambda a: -a,
        "pow": sympy.Pow,
        "fact": sympy.factorial,
        "pct": lambda a: a / 100,
    }
    if operation not in builders:
        raise GrammarError(f"{operation} is no expression")
    return builders[operation](*map(to_sympy, node[1:]))


def _call(sympy: Any, node: Node) -> Any:
    name, arguments = node[1], [to_sympy(part) for part in node[2:]]
    if name in ("log10", "log2"):
        return sympy.log(arguments[0]) / sympy.log(10 if name == "log10" else 2)
    if name not in _SPELLED:
        raise GrammarError(f"{name} has no symbolic form")
    try:
        return getattr(sympy, _SPELLED[name])(*arguments)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{name}: {error}") from error


def _condition(sympy: Any, node: Node) -> Any:
    if node == ("sym", "True"):
        return sympy.true
    if node[0] != "rel":
        raise GrammarError("a condition is a relation")
    kinds = {"=": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, ">": sympy.Gt}
    kinds |= {"<=": sympy.Le, ">=": sympy.Ge}
    terms = [to_sympy(term) for term in node[2]]
    pairs = zip(node[1], terms, terms[1:], strict=False)
    return sympy.And(*(kinds[operator](a, b) for operator, a, b in pairs))


def same_structure(gold: Node, answer: Node, seconds: float) -> bool:
    """Whether both trees are the same sympy object after its automatic ordering of terms."""
    _sympy()  # before the budget begins: an import that is cut off leaves sympy in pieces
    try:
        with within(seconds):
            return bool(to_sympy(gold) == to_sympy(answer))
    except (OutOfBudget, Exception):  # sympy raises all sorts on odd input: then it can't tell
        return False


def same_after_simplification(gold: Node, answer: Node, seconds: float) -> bool | None:
    """Return True when the difference simplifies to 0, else None: it may still be 0."""
    sympy = _sympy()

    try:
        with within(seconds):
            difference = to_sympy(gold) - to_sympy(answer)
            return True if sympy.simplify(difference) == 0 else None
    except (OutOfBudget, Exception):  # as above
        return None


@functools.lru_cache(maxsize=1)
def forbid_programs() -> None:
    """Make sympy read single numbers and symbols from text, and never run text as a program.

    math-verify hands the numbers of an answer to sympy as text, which sympy would evaluate.
    """
    sympy = _sympy()
    importlib.import_module("sympy.physics.units")  # reads its own names that way, once

    def literal(code: str, local_dict: object = None, global_dict: object = None) -> Any:
        match = re.fullmatch(r"(Integer|Float|Symbol) \('?([\w.+-]{1,4000})'? ?\) ?", code)
        if match is None:
            raise ValueError("text is not run as a program here")
        kind, text = match.groups()
        return sympy.Integer(int(text)) if kind == "Integer" else getattr(sympy, kind)(text)

    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    parser.eval_expr = literal


def _sympy() -> Any:
    """Return sympy; importing it takes half a second, so only who needs it does."""
    return importlib.import_module("sympy")
