"""Python values as JSON and back: plain data only, so that reading them can't run anything."""

import builtins
import collections
import decimal
import fractions
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 60


def encode(value: Any, handle: Callable[[Any], int], depth: int = 0) -> list[Any]:
    """Return a value as a tagged list; what is no plain data becomes a handle.

    Args:
        value: anything.
        handle: keeps an object and returns its number; raises TypeError where none are allowed.
        depth: containers around the value.
    """
    kind = type(value)
    if value is None:
        return ["n"]
    if depth > _MAX_DEPTH:
        raise ValueError(f"a value nested more than {_MAX_DEPTH} deep")
    if issubclass(kind, bool):
        return ["b", value is True]
    if issubclass(kind, int):
        return ["i", hex(int.__index__(value))]
    if issubclass(kind, float):
        return ["f", float.hex(value)]
    if issubclass(kind, str):
        return ["s", str.__str__(value)]
    if issubclass(kind, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if issubclass(kind, (bytes, bytearray)):
        return ["y" if issubclass(kind, bytes) else "Y", bytes(value).hex()]
    for base, tag in _CONTAINERS:
        if issubclass(kind, base):
            return [tag, [encode(item, handle, depth + 1) for item in base.__iter__(value)]]
    if issubclass(kind, dict):
        return ["d", [[encode(p, handle, depth + 1) for p in pair] for pair in dict.items(value)]]
    if kind is range:
        return ["r", *(hex(v) for v in (value.start, value.stop, value.step))]
    if kind is decimal.Decimal:
        return ["D", str(value)]
    if kind is fractions.Fraction:
        return ["F", hex(value.numerator), hex(value.denominator)]
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return ["B", name]
    return ["h", handle(value)]


_CONTAINERS: list[tuple[Any, str]] = [
    (list, "l"),
    (tuple, "t"),
    (set, "S"),
    (frozenset, "Z"),
    (collections.deque, "q"),
]
_MAKE: dict[str, Callable[..., Any]] = {
    "l": list,
    "t": tuple,
    "S": set,
    "Z": frozenset,
    "q": collections.deque,
}
_SAFE_BUILTINS = frozenset(
    {"int", "float", "str", "bool", "list", "tuple", "set", "dict", "frozenset", "complex", "bytes"}
    | {"len", "abs", "min", "max", "sum", "sorted", "reversed", "range", "ord", "chr", "round"}
    | {"any", "all", "map", "filter", "zip", "enumerate", "isinstance", "pow", "divmod", "object"}
)


def decode(tagged: Any, resolve: Callable[[int], Any], depth: int = 0) -> Any:
    """Return the value of a tagged list.

    Args:
        tagged: what `encode` made, or anything else that came over the wire.
        resolve: returns the object of a handle's number.
        depth: containers around the value.

    Raises:
        ValueError: it is nothing that `encode` makes.
    """
    if not isinstance(tagged, list) or not tagged or depth > _MAX_DEPTH + 1:
        raise ValueError("no plain data")
    tag, *parts = tagged
    try:
        if tag == "n":
            return None
        if tag == "b":
            return parts[0] is True
        if tag == "i":
            return int(parts[0], 16)
        if tag == "f":
            return float.fromhex(parts[0])
        if tag == "s":
            return _text(parts[0])
        if tag == "c":
            return complex(float.fromhex(parts[0]), float.fromhex(parts[1]))
        if tag in ("y", "Y"):
            return (bytes if tag == "y" else bytearray).fromhex(parts[0])
        if tag in _MAKE:
            return _MAKE[tag]([decode(part, resolve, depth + 1) for part in parts[0]])
        if tag == "d":
            pairs = [[decode(p, resolve, depth + 1) for p in pair] for pair in parts[0]]
            return {key: value for key, value in pairs}  # noqa: C416 -- a pair must have two parts
        if tag == "r":
            return range(*(int(p, 16) for p in parts))
        if tag == "D":
            return decimal.Decimal(_text(parts[0]))
        if tag == "F":
            return fractions.Fraction(int(parts[0], 16), int(parts[1], 16))
        if tag == "B" and parts[0] in _SAFE_BUILTINS:
            return getattr(builtins, parts[0])
        if tag == "h":
            return resolve(int(parts[0]))
    except (TypeError, IndexError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"no plain data: {error}") from error
    raise ValueError(f"no plain data: tag {tag!r}")


def _text(part: Any) -> str:
    if not isinstance(part, str):
        raise TypeError("text expected")
    return part
