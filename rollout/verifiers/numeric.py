"""Numeric answers: one number against the gold one, within a tolerance."""

import re
import unicodedata
from fractions import Fraction

from .grammar import parse
from .lexer import GrammarError, LimitError
from .normalise import join_thousands, plain_math
from .plain_text import normalised
from .statements import numbers_in, stated
from .values import exact
from .verdict import Verdict, judged, unjudged

_POWER_OF_TEN = re.compile(
    r"(.*?)\s?(?:×|\\times|\*)\s?10\s?\^\s?\{?([-+]?\d{1,3})\}?(.*)", re.DOTALL
)
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4"}
_MAX_DIGITS = 400
_MAX_EXPRESSION_CHARS = 200


def judge(
    gold: str, text: str, rel_tol: float = 1e-9, abs_tol: float = 0.0, location: str = "end"
) -> Verdict:
    """Judge a numeric answer.

    Args:
        gold: the right number; currency signs, separators, fractions and % are read.
        text: the completion.
        rel_tol: allowed difference as a share of the gold; 0 and above.
        abs_tol: allowed difference; 0 and above.
        location: "end": the last number of the stated answer; "any": any number of the text.

    Returns:
        "right" when the number agrees. A percentage agrees with its hundredth, and with its number
        when only one side has the sign. A gold that is no number needs the same text.

    Raises:
        ValueError: an unknown location or a negative tolerance.
    """
    if location not in ("end", "any"):
        raise ValueError(f"location must be end or any, got {location!r}")
    if rel_tol < 0 or abs_tol < 0:
        raise ValueError("rel_tol and abs_tol can't be negative")
    wanted = numbers_in(gold)
    statement = stated(text)
    if not wanted:
        said = statement.text if statement else text
        return judged(normalised(said) == normalised(gold), said[:200])
    if location == "any":
        found = numbers_in(text)
    else:
        found = numbers_in(statement.text)[-1:] if statement else []
        found = found or numbers_in(text)[-1:]
    if not found:
        lone = _spelled(statement.text if statement else text)
        if lone is None:
            return unjudged("no_answer")
        found = [lone]
    if location == "end" and statement and (worked := _worked_out(statement.text)) is not None:
        found = [str(worked)]
    right = next((n for n in found if _agree(wanted[-1], n, rel_tol, abs_tol)), None)
    return judged(right is not None, right or found[-1])


def _worked_out(text: str) -> Fraction | None:
    """Return the value of an answer that is a sum or has a sign in front of a bracket."""
    if len(text) > _MAX_EXPRESSION_CHARS or not re.search(r"\d", text) or "%" in text:
        return None
    try:
        return exact(parse(join_thousands(plain_math(text))))
    except (GrammarError, LimitError):
        return None


def _spelled(text: str) -> str | None:
    """Return the value of a single numeral character at the end, such as 三."""
    tail = text.strip(" .。")[-1:]
    return f"{unicodedata.numeric(tail):g}" if tail and unicodedata.numeric(tail, -1) >= 0 else None


def _agree(gold: str, answer: str, rel_tol: float, abs_tol: float) -> bool:
    (a, a_percent), (b, b_percent) = value(gold), value(answer)
    if a is None or b is None:
        return a is b
    allowed = max(Fraction(rel_tol) * abs(a), Fraction(abs_tol))
    if abs(a - b) <= allowed:
        return True
    if a_percent == b_percent:
        return False
    return abs(a - b / 100) <= allowed if b_percent else abs(a - b * 100) <= allowed


def value(text: str) -> tuple[Fraction | None, bool]:
    """Return the value of a written number and whether it is a percentage; None for no number."""
    percent = "%" in text or "percent" in text
    text = re.sub(r"[$€£¥₹%\\]|percent", "", text.replace("−", "-").replace("×", r"\times"))
    text = text.replace("times", r"\times").strip()
    power = _POWER_OF_TEN.fullmatch(text)
    exponent = int(power[2]) if power else 0
    text = (power[1] + power[3]) if power else text
    for sign, plain in _VULGAR.items():
        text = text.replace(sign, plain)
    text = text.replace(" ", "")
    text = text.replace(",", "") if re.search(r",\d{3}(?!\d)", text) else text.replace(",", ".")
    if not text or len(text) > _MAX_DIGITS:
        return None, percent
    try:
        return Fraction(text.lstrip("+")) * Fraction(10) ** exponent, percent
    except (ValueError, ZeroDivisionError):
        return None, percent
