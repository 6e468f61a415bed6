"""Answers with parts: lists, tuples, sets, intervals, matrices, equations and inequalities."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .comparison import constant_ratio, same_value, symbols
from .lexer import GrammarError, Node

_T = TypeVar("_T")
_MAX_PARTS = 60
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


@dataclass(frozen=True)
class Rules:
    """How the values inside are compared: `precision` and `seed` as in `same_value`."""

    precision: int | None = None
    seed: str = ""


def same(gold: Node, answer: Node, rules: Rules) -> bool | None:
    """Compare two answers; None when this can't be decided here.

    A list is a set of answers, in any order; a tuple is ordered; `x = 3` stands for 3; a value with
    ± stands for both; a percentage for its hundredth, or for its number when only one side has the
    sign.

    Raises:
        LimitError: the answer is too large.
    """
    if gold == answer:
        return True
    gold, answer = _plain_relation(gold), _plain_relation(answer)
    if gold[0] == "in" or answer[0] == "in":
        return same(_members(gold), _members(answer), rules)
    if gold[0] == "rel" and answer[0] == "rel":
        return _same_relation(gold, answer, rules)
    if gold[0] == "rel" or answer[0] == "rel":
        return _relation_and_value(gold, answer, rules)
    gold, answer = _spread(gold), _spread(answer)
    pair = {gold[0], answer[0]}
    if "list" in pair or pair == {"set"}:
        return _same_collection(gold, answer, rules)
    if pair & {"union", "inter", "minus"}:
        return _same_union(gold, answer, rules)
    if pair == {"tuple"}:
        return _same_ordered(gold[1:], answer[1:], rules)
    if "interval" in pair:
        return _same_interval(gold, answer, rules)
    if "matrix" in pair:
        return _same_matrix(gold, answer, rules)
    if "set" in pair:
        other = gold if answer[0] == "set" else answer
        return None if other[0] in ("text", "sym") else False
    if "tuple" in pair or "ratio" in pair:
        return _same_ratio(gold, answer, rules) if pair == {"ratio"} else False
    return _same_scalar(gold, answer, rules)


def _same_scalar(gold: Node, answer: Node, rules: Rules) -> bool | None:
    if (gold[0] == "pct") != (answer[0] == "pct"):
        as_number = (_inside(gold, "pct"), _inside(answer, "pct"))
        if same_value(*as_number, rules.precision, seed=rules.seed):
            return True
    if (gold[0] == "deg") != (answer[0] == "deg"):  # 90° is 90 and π/2
        as_number = (_inside(gold, "deg"), _inside(answer, "deg"))
        if same_value(*as_number, rules.precision, seed=rules.seed):
            return True
    if "text" in (gold[0], answer[0]):
        return None
    if "base" in (gold[0], answer[0]):
        return False
    try:
        return same_value(gold, answer, rules.precision, seed=rules.seed)
    except GrammarError:
        return None


def _inside(node: Node, operation: str) -> Node:
    return node[1] if node[0] == operation else node


def _spread(node: Node) -> Node:
    """Return a list of both values for a scalar with ±, and of all values for a list with one."""
    if node[0] in ("list", "set"):
        parts: list[Node] = []
        for part in node[1:]:
            spread = _spread(part)
            parts += spread[1:] if spread[0] == "list" and part[0] != "list" else [part]
        return (node[0], *parts)
    if node[0] in ("add", "mul", "div", "neg", "pm", "mp", "pow") and _has_sign_pair(node):
        return ("list", _signed(node, 1), _signed(node, -1))
    return node


def _has_sign_pair(node: Node) -> bool:
    if node[0] in ("pm", "mp"):
        return True
    return any(isinstance(p, tuple) and p and _has_sign_pair(p) for p in node[1:])


def _signed(node: Node, sign: int) -> Node:
    if node[0] in ("pm", "mp"):
        inner = _signed(node[1], sign)
        return inner if (node[0] == "pm") == (sign > 0) else ("neg", inner)
    return tuple(_signed(p, sign) if isinstance(p, tuple) and p else p for p in node)


def _plain_relation(node: Node) -> Node:
    """Cut a chain at ≈, and shorten `x = … = 3` to its ends."""
    if node[0] != "rel":
        return node
    operators, terms = list(node[1]), list(node[2])
    while "~" in operators:
        cut = operators.index("~")
        operators, terms = operators[:cut], terms[: cut + 1]
    if not operators:
        return terms[0]
    if len(operators) > 1 and set(operators) == {"="}:
        operators, terms = ["="], [terms[0], terms[-1]]
    return ("rel", tuple(operators), tuple(terms))


def _members(node: Node) -> Node:
    return node[2] if node[0] == "in" else node


def named_value(node: Node) -> tuple[Node, Node] | None:
    """Return (name, value) of `x = 3`, `f(x) = …`, `(p, q) = …`, `3 = x`; None for other trees."""
    if node[0] != "rel" or node[1] != ("=",):
        return None
    left, right = node[2]
    if _is_name(left):
        return left, right
    return (right, left) if _is_name(right) and left[0] in ("num", "neg", "div", "tuple") else None


def _is_name(node: Node) -> bool:
    if node[0] == "sym":
        return True
    if node[0] == "apply":
        return True
    if node[0] == "call":
        return node[1] == "abs" and _is_name(node[2])
    if node[0] in ("mul", "div", "tuple", "ratio", "list"):
        return all(_is_name(part) for part in node[1:])
    return node[0] == "text"


def _relation_and_value(gold: Node, answer: Node, rules: Rules) -> bool | None:
    named = named_value(gold) or named_value(answer)
    if named:
        value = named[1]
        return same(value, answer, rules) if gold[0] == "rel" else same(gold, value, rules)
    if answer[0] == "rel" and set(answer[1]) == {"="} and not symbols(answer):
        return same(gold, answer[2][-1], rules)  # 35 + 70 = 105
    as_interval = [_solved(node) for node in (gold, answer)]
    if as_interval[0] and as_interval[1]:
        return _same_interval(as_interval[0], as_interval[1], rules)
    relation = gold if gold[0] == "rel" else answer
    other = answer if gold[0] == "rel" else gold
    if other[0] == "list":  # a = 4, -8, -10 against one relation: no
        return False
    if set(relation[1]) <= {"="}:
        return False
    return None if other[0] in ("interval", "tuple", "union", "set", "inter", "minus") else False


def _same_relation(gold: Node, answer: Node, rules: Rules) -> bool | None:
    a, b = named_value(gold), named_value(answer)
    if a and b:
        if a[0][0] == b[0][0] == "sym" and a[0] != b[0]:
            return False
        return same(a[1], b[1], rules)
    pairs_a, pairs_b = _differences(gold), _differences(answer)
    if len(pairs_a) != len(pairs_b):
        return None
    return _matched(pairs_a, pairs_b, lambda p, q: _same_difference(p, q, rules))


def _differences(node: Node) -> list[tuple[str, Node]]:
    terms = node[2]
    return [
        (operator, ("add", left, ("neg", right)))
        for operator, left, right in zip(node[1], terms, terms[1:], strict=False)
    ]


def _same_difference(p: tuple[str, Node], q: tuple[str, Node], rules: Rules) -> bool | None:
    ratio = constant_ratio(p[1], q[1], rules.seed)
    if ratio is None:
        return None
    if ratio == 0.0:
        return False
    return p[0] == (q[0] if ratio > 0 else _FLIPPED[q[0]])


def _same_collection(gold: Node, answer: Node, rules: Rules) -> bool | None:
    if "tuple" in (gold[0], answer[0]):  # (1, 3) written without its brackets
        return _same_ordered(gold[1:], answer[1:], rules)
    parts = [n[1:] if n[0] in ("list", "set") else (n,) for n in (gold, answer)]
    golds, answers = (_assigned(p) for p in parts)
    if isinstance(golds, dict) and isinstance(answers, dict) and golds.keys() == answers.keys():
        return _all(same(golds[name], answers[name], rules) for name in golds)
    left, right = (_values(p) for p in parts)
    if isinstance(golds, dict) and len(golds) > 1 and len(right) == len(left):
        if isinstance(answers, dict):
            return False
        return _same_ordered(left, right, rules)
    if len(left) != len(right) or len(left) > _MAX_PARTS:
        return False
    return _matched(left, right, lambda g, a: same(g, a, rules))


def _assigned(parts: Sequence[Node]) -> dict[Node, Node] | None:
    """Return name → value when all parts are `name = value` with different names."""
    pairs = [named_value(part) for part in parts]
    found = {pair[0]: pair[1] for pair in pairs if pair}
    return found if len(found) == len(parts) > 1 else None


def _values(parts: Sequence[Node]) -> tuple[Node, ...]:
    """Return the parts without names; an inner list of named values is a tuple."""
    values = []
    for part in parts:
        named = named_value(part)
        if part[0] == "list" and all(named_value(p) for p in part[1:]):
            values.append(("tuple", *_values(part[1:])))
        elif part[0] == "list":
            values.append(("tuple", *part[1:]))
        else:
            values.append(named[1] if named else part)
    return tuple(values)


def _same_ordered(gold: Sequence[Node], answer: Sequence[Node], rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(same(g, a, rules) for g, a in zip(gold, answer, strict=True))


def _same_ratio(gold: Node, answer: Node, rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    scaled = zip(gold[2:], answer[2:], strict=True)
    return _all(_same_scalar(("mul", g, answer[1]), ("mul", a, gold[1]), rules) for g, a in scaled)


def _same_interval(gold: Node, answer: Node, rules: Rules) -> bool | None:
    ends = [_interval(n) for n in (gold, answer)]
    if ends[0] is None or ends[1] is None:
        return None if {gold[0], answer[0]} & {"text", "sym"} else False
    if ends[0][1:3] != ends[1][1:3]:
        return False
    return _same_ordered(ends[0][3:], ends[1][3:], rules)


def _interval(node: Node) -> Node | None:
    if node[0] == "interval":
        return node
    if node[0] == "tuple" and len(node) == 3:
        return ("interval", False, False, *node[1:])
    return None


def _solved(node: Node) -> Node | None:
    """Return the interval of `x < 3`, `2 <= x < 5` and of an interval; None for other trees."""
    if node[0] != "rel":
        return _interval(node)
    operators, terms = node[1], node[2]
    if operators[0][0] == ">" and all(o[0] == ">" for o in operators):
        operators, terms = tuple(_FLIPPED[o] for o in operators[::-1]), terms[::-1]
    if not all(o in ("<", "<=") for o in operators) or len(terms) > 3:
        return None
    if len(terms) == 2:  # one side is open
        if terms[0][0] == "sym":
            operators, terms = ("<", *operators), (("neg", ("const", "oo")), *terms)
        else:
            operators, terms = (*operators, "<"), (*terms, ("const", "oo"))
    low, name, high = terms
    if name[0] != "sym" or symbols(low) or symbols(high):
        return None
    return ("interval", operators[0] == "<=", operators[1] == "<=", low, high)


def _same_union(gold: Node, answer: Node, rules: Rules) -> bool | None:
    if {gold[0], answer[0]} & {"inter", "minus"}:
        return None
    parts = [_union_parts(n) for n in (gold, answer)]
    if len(parts[0]) != len(parts[1]):
        return None
    decided = _matched(parts[0], parts[1], lambda g, a: same(g, a, rules))
    return True if decided else None  # other pieces may make the same set


def _union_parts(node: Node) -> list[Node]:
    if node[0] == "union":
        return _union_parts(node[1]) + _union_parts(node[2])
    return [_interval(node) or node]


def _same_matrix(gold: Node, answer: Node, rules: Rules) -> bool | None:
    rows = [_rows(n) for n in (gold, answer)]
    if rows[0] is None or rows[1] is None:
        return None
    if [len(r) for r in rows[0]] != [len(r) for r in rows[1]]:
        return False
    flat = [[cell for row in matrix or () for cell in row] for matrix in rows]
    return _same_ordered(flat[0], flat[1], rules)


def _rows(node: Node) -> Sequence[Sequence[Node]] | None:
    if node[0] == "matrix":
        return node[1:]
    if node[0] == "tuple":  # a vector
        return [[part] for part in node[1:]]
    return None


def _all(results: Iterable[bool | None]) -> bool | None:
    undecided = False
    for result in results:
        if result is False:
            return False
        undecided = undecided or result is None
    return None if undecided else True


def _matched(
    gold: Sequence[_T], answer: Sequence[_T], equal: Callable[[_T, _T], bool | None]
) -> bool | None:
    """Match each gold with an answer of its own, in any order."""
    left = list(answer)
    undecided = False
    for g in gold:
        for i, a in enumerate(left):
            result = equal(g, a)
            undecided = undecided or result is None
            if result:
                del left[i]
                break
        else:
            return None if undecided else False
    return True
