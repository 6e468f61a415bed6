"""Tokens, names and limits of the answer grammar."""

import re
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]
Token = tuple[str, str, bool]  # kind, text, follows a space

MAX_CHARS = 4000
MAX_TOKENS = 1500
MAX_DEPTH = 120  # calls; a pair of brackets takes three
MAX_DIGITS = 4000


class GrammarError(ValueError):
    """The text is outside the grammar."""


class LimitError(ValueError):
    """The text is longer, more deeply nested or larger in value than anything that is judged."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# name in plain notation or after a backslash -> canonical name
FUNCTIONS = {
    **{n: n for n in _names("sin cos tan cot sec csc sinh cosh tanh coth exp erf erfc erfi sqrt")},
    **{
        n: n for n in _names("asin acos atan acot asec acsc asinh acosh atanh floor sign gamma log")
    },
    **{
        n: n for n in _names("besselj bessely besseli besselk binomial gcd lcm max min abs zeta re")
    },
    **{
        n: n
        for n in _names("log10 log2 cbrt ceiling factorial airyai airybi im sinc digamma atan2")
    },
    **{n: n for n in _names("heaviside arg conjugate beta")},
    **{f"arc{n}": f"a{n}" for n in _names("sin cos tan cot sec csc sinh cosh tanh")},
    "ln": "log",
    "lg": "log10",
    "Abs": "abs",
    "ceil": "ceiling",
    "sgn": "sign",
    "Heaviside": "heaviside",
    "Max": "max",
    "Min": "min",
    "Gamma": "gamma",
    "Ei": "ei",
    "LambertW": "lambertw",
    "Rational": "rational",
}
TRIG = _names("sin cos tan cot sec csc sinh cosh tanh")
# Letters first of all; functions only when an argument in brackets follows.
ONLY_APPLIED = _names("gamma Gamma beta zeta re im arg sign Ei")
GREEK = _names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar"
)
RELATIONS = {
    **{sign: sign for sign in ("=", "<", ">", "<=", ">=", "!=")},
    "==": "=",
    r"\equiv": "=",
    r"\approx": "~",
    r"\lt": "<",
    r"\gt": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
}
ENVIRONMENTS = _names("pmatrix bmatrix matrix array smallmatrix Bmatrix")
TEXT_COMMANDS = frozenset(
    "\\" + name
    for name in _names(
        "text textbf mbox textrm textit mathrm mathbf mathit bm boldsymbol mathsf vec hat overline "
        "bar rm mathcal mathbb overrightarrow tilde"
    )
)
_TOKEN = re.compile(
    r"(?P<num>\d+\.(?=\\overline)|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.]))?|\d+\.)"
    r"|(?P<cmd>\\[a-zA-Z]+|\\.)|(?P<name>[a-zA-Z]+)"
    r"|(?P<op>\*\*|<=|>=|==|!=|[-+*/^_(){}\[\]|,;:=<>!'%&])|(?P<space>\s+)"
)


def tokens(text: str) -> list[Token]:
    """Return (kind, text, follows a space) tokens, ended by an "end" token."""
    found: list[Token] = []
    at, spaced = 0, False
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise GrammarError(f"unknown sign {text[at]!r}")
        at = match.end()
        kind = match.lastgroup or ""
        if kind == "space":
            spaced = True
            continue
        found.append((kind, match.group(), spaced))
        spaced = False
        if len(found) > MAX_TOKENS:
            raise LimitError(f"answer of more than {MAX_TOKENS} tokens")
    found.append(("end", "", spaced))
    return found


def number(text: str) -> Node:
    """Return the node of a number without sign; raises LimitError for too many digits."""
    if len(text) > MAX_DIGITS:
        raise LimitError(f"number of {len(text)} digits, at most {MAX_DIGITS} are read")
    mantissa, _, exponent = text.lower().partition("e")
    if abs(int(exponent or 0)) > MAX_DIGITS:
        raise LimitError("number with too large an exponent")
    _, point, decimals = mantissa.partition(".")
    return ("num", Fraction(text.rstrip(".")), len(decimals) if point or exponent else None)
