r"""Mathematical answers: the stated value against the gold one.

The answer is compared in four steps, each only when the one before can't tell: as text; by this
package's own grammar (exact numbers, structures, points); by math-verify, which reads more LaTeX;
as plain words. What is too long, too deep or too large to be evaluated is wrong.
"""

import importlib
import re
import threading
from fractions import Fraction
from typing import Any

from .extraction import boxes, visible
from .grammar import parse
from .lexer import FUNCTIONS, GREEK, MAX_CHARS, GrammarError, LimitError, Node
from .normalise import join_thousands, plain_math
from .statements import Statement, stated, wordy
from .structures import Rules, same
from .symbolic import forbid_programs
from .values import exact
from .verdict import Verdict, judged, unjudged

_UNIT_GROUP = re.compile(
    r"(?<=[\w})!%\]])\s*\\(?:text|mbox|textbf|textrm|mathrm|rm)\{(?P<unit>[^{}]*)\}"
    r"(?:\s*\^\s*\{?\s*\d\s*\}?)?\s*$"
)
_UNIT_WORDS = re.compile(
    r"^(?P<value>.*[\d})!])\s*(?P<unit>[a-zA-Z]{2,}(?:[ /.][a-zA-Z]+)*\.?)(?:\^\{?\d\}?)?$"
)
_ABBREVIATIONS = {
    "mm": "millimeter", "cm": "centimeter", "m": "meter", "km": "kilometer", "in": "inch",
    "ft": "foot", "feet": "foot", "inches": "inch", "mi": "mile", "yd": "yard", "s": "second",
    "sec": "second", "min": "minute", "h": "hour", "hr": "hour", "g": "gram", "kg": "kilogram",
    "lb": "pound", "l": "liter", "ml": "milliliter", "metre": "meter", "litre": "liter",
}  # fmt: skip
_UNITS = frozenset(_ABBREVIATIONS.values()) | {"dollar", "cent", "degree", "day", "week", "year"}
# Quantifiers and "and so on" carry meaning that no evaluation sees: only the same text is the same.
_ONLY_AS_TEXT = re.compile(
    r"\\(?:forall|exists|ldots|cdots|dots|vdots|implies|iff)(?![a-z])|\.\.\.|…"
)
_MATH_VERIFY_CHARS = 600
_MATH_VERIFY_S = 3  # for each step; the pool's limit is the one that holds
_TOO_BIG = re.compile(r"\d{40}|!|\^[^^]{0,12}\^|\\(?:binom|Gamma|prod|sum|int)")


def judge(gold: str, text: str, precision: int | None = None) -> Verdict:
    """Judge a mathematical answer.

    Args:
        gold: the right answer, plain or LaTeX; the last boxes of it when it has any.
        text: the completion.
        precision: decimals to which numbers must agree; None: exactly, or to six significant
            digits when either side is written with decimals.

    Returns:
        "right", "wrong", "no_answer", or "undecided" when neither could be shown.

    Raises:
        ValueError: an empty gold.
    """
    wanted = _gold(gold)
    if not wanted.strip():
        raise ValueError("the gold answer is empty")
    shown = visible(text)
    if len(shown) <= MAX_CHARS and bare(shown) == bare(wanted):  # words with a number, say
        return judged(True, shown.strip()[:200])
    answer = stated(text)
    if answer is None:
        return unjudged("no_answer")
    candidates = _candidates(wanted, answer)
    verdict = unjudged("undecided", answer.text)
    for candidate in candidates:
        verdict = _compare(wanted, candidate, precision)
        if verdict.correct:
            break
    return verdict


def gold_value(gold: str) -> Fraction | None:
    """Return the exact value of a gold answer without its unit, None when it isn't one number."""
    try:
        return exact(parse(_cleaned(_gold(gold))))
    except (GrammarError, LimitError):
        return None


def _gold(gold: str) -> str:
    found = boxes(gold)
    if found:
        whole = stated(gold)
        return ", ".join(whole.boxed) if whole and whole.boxed else found[-1][2]
    if wordy(gold):
        whole = stated(gold)
        return whole.text if whole else gold
    opened = re.search(r"\\boxed\s*\{", gold)  # a gold whose box was cut off
    return gold[opened.end() :] if opened else gold


def _candidates(gold: str, answer: Statement) -> list[str]:
    """Return the answer; all its neighbouring boxes together when the gold has as many parts."""
    together = ", ".join(answer.boxed)
    if len(answer.boxed) > 1:
        tree = _tree(_cleaned(gold))
        if tree and tree[0] in ("list", "set") and len(tree) - 1 == len(answer.boxed):
            return [together]
    return [answer.text]


def _compare(gold: str, answer: str, precision: int | None) -> Verdict:
    shown = answer.strip()[:200]
    if len(answer) > MAX_CHARS:  # too long to be looked at closely
        alike = "".join(answer.split()) == "".join(gold.split())
        return judged(alike, shown, f"an answer of more than {MAX_CHARS} characters")
    a, b = bare(gold), bare(answer)
    if a == b:
        return judged(True, shown)
    if not b:
        return unjudged("no_answer")
    units = _unit(gold), _unit(answer)
    if units[0] and units[1] and units[0] != units[1]:
        return judged(False, shown, "another unit")
    if _ONLY_AS_TEXT.search(gold) or _ONLY_AS_TEXT.search(answer):
        return judged(False, shown, "only the same text would be right")
    try:
        decided = _by_grammar(gold, answer, precision)
    except (LimitError, RecursionError, OverflowError) as error:
        return judged(False, shown, f"too large to be evaluated: {error}"[:200])
    if decided is None:
        decided = _by_words(a, b)
    if decided is None:
        decided = _by_math_verify(gold, answer, precision)
    if decided is None:
        return unjudged("undecided", shown)
    return judged(decided, shown)


def _cleaned(text: str) -> str:
    """Return the notation without unit, trailing point and outer decoration."""
    text = plain_math(text).lstrip(' *`"').rstrip(' .*`"')
    text = re.sub(r"^(?:\\text\{[^{}]*(?:is|=|:)\s*\})\s*", "", text)
    stripped = _UNIT_GROUP.sub("", text).strip()
    words = _UNIT_WORDS.match(stripped)
    if words and words["unit"] not in ("or", "and") and _looks_like_unit(words["unit"]):
        stripped = words["value"]
    return join_thousands((stripped or text).rstrip(" .,").strip())


def _looks_like_unit(words: str) -> bool:
    first = words.split(" ")[0].strip(".")
    if first in FUNCTIONS or first in GREEK or first == "pi":
        return False
    return len(first) > 2 or first.lower() in _ABBREVIATIONS


def _unit(text: str) -> str | None:
    """Return the canonical name of a length, time or weight at the end of an answer."""
    text = plain_math(text).rstrip(" .")
    match = _UNIT_GROUP.search(text) or _UNIT_WORDS.match(text)
    if not match:
        return None
    word = match["unit"].strip(" .").lower()
    word = _ABBREVIATIONS.get(word, word)
    word = _ABBREVIATIONS.get(word.removesuffix("s"), word.removesuffix("s"))
    return word if word in _UNITS else None


def bare(text: str) -> str:
    """Return a text for comparison letter by letter: one spelling, no white space."""
    plain = join_thousands(plain_math(text).lstrip(' *`"').rstrip(' .*`"'))
    plain = re.sub(r"\\(?:text|mbox|textbf|textrm|mathrm|textit)\s*\{([^{}]*)\}", r"\1", plain)
    plain = re.sub(r"([_^])\{(\w)\}", r"\1\2", plain)
    return "".join(plain.split())


def _tree(cleaned: str) -> Node | None:
    try:
        return parse(cleaned)
    except GrammarError:
        return None


def _by_grammar(gold: str, answer: str, precision: int | None) -> bool | None:
    cleaned = [_cleaned(gold), _cleaned(answer)]
    trees = [_tree(text) for text in cleaned]
    for i in (0, 1):  # 1,22 is a decimal comma where the other side has a decimal point
        other = trees[1 - i]
        if re.fullmatch(r"-?\d+,\d+", cleaned[i]) and other and other[0] in ("num", "neg"):
            trees[i] = _tree(cleaned[i].replace(",", "."))
    if trees[0] is None or trees[1] is None:
        return None
    return same(trees[0], trees[1], Rules(precision, seed=gold))


def _by_words(gold: str, answer: str) -> bool | None:
    """Compare answers in words: (C), Even, Monday."""
    plain = [
        t.strip("().").casefold() if len(t.strip("().")) > 1 else t.strip("().")
        for t in (gold, answer)
    ]
    if plain[0] and plain[0] == plain[1]:
        return True
    return False if plain[0].isalpha() or (plain[1].isalpha() and len(plain[1]) > 2) else None


def _by_math_verify(gold: str, answer: str, precision: int | None) -> bool | None:
    """Ask math-verify, gold first; None outside the main thread, where its timer doesn't work."""
    if max(len(gold), len(answer)) > _MATH_VERIFY_CHARS or _TOO_BIG.search(answer):
        return None
    if threading.current_thread() is not threading.main_thread():
        return None
    forbid_programs()
    library: Any = importlib.import_module("math_verify")
    options = {
        "extraction_config": [library.LatexExtractionConfig()],
        "fallback_mode": "no_fallback",
        "parsing_timeout": _MATH_VERIFY_S,
    }
    sides = [library.parse(f"${_latex(text)}$", **options) for text in (gold, answer)]
    if not all(sides):
        return None
    decimals = 6 if precision is None else precision
    return bool(library.verify(*sides, float_rounding=decimals, timeout_seconds=_MATH_VERIFY_S))


def _latex(text: str) -> str:
    return plain_math(text)[:MAX_CHARS].replace(r"\deg", r"^\circ")
