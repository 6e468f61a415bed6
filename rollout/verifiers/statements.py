r"""The stated answer of a mathematical completion, as text.

In order: the last `<answer>` tag; the last balanced `\boxed`; what follows the last "answer is" or
"Answer:" or "####"; a completion that is nothing but an answer; at last, whatever stands
last in the text: a formula between dollars, or a number.
"""

import re
from dataclasses import dataclass

from .extraction import boxes, last_tag, nfkc, visible
from .lexer import FUNCTIONS, GREEK

_CUE = re.compile(
    r"(?:\banswers?\b(?:[^\n.:$\\]{0,40}?(?:\bis\b|\bare\b|=))?"
    r"|####|^[^\S\n]*A(?=:)|答案|回答|答え|\bréponse\b(?: est)?)[*_]{0,2}[^\S\n]*[:：]?",
    re.IGNORECASE | re.MULTILINE,
)
_REASON = re.compile(r"\b(?:because|since|as|which|where|so|due to)\b|\.\s|[!?。]|\.$")
_FORMULA = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|(?<![\\$\d])\$(?P<b>(?:\\\$|[^$\n])+)\$|\\\[(?P<c>.{1,2000}?)\\\]|\\\((?P<d>[^\n]{1,2000}?)\\\)",
    re.DOTALL,
)
_FRACTION = r"-?\\[dt]?frac\{[^{}]{1,40}\}\{[^{}]{1,40}\}"
NUMBER = re.compile(
    r"(?<![A-Za-z\d.,\\_^{])(?:[-−+]\s?(?=[$€£¥₹\d.½⅓⅔¼¾]))?[$€£¥₹]?\s?"
    r"(?:\d{1,3}(?:[, ]\d{3})+(?![\d])(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+|[½⅓⅔¼¾])"
    r"(?:[eE][-+]?\d{1,3}(?![\d.])|\s?(?:×|\\times|\*)\s?10\s?\^\s?\{?[-−+]?\d{1,3}\}?)?"
    r"(?:\s?/\s?\d+)?\s?(?:\\?%|percent\b)?(?![A-Za-z]*\d[A-Za-z])",
)
_LATEX_NUMBER = re.compile(_FRACTION)
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}\b")
_SHORT_WORDS = re.compile(
    r"(?<![\\A-Za-z])(?:is|of|in|to|we|so|it|at|by|as|be|he|if|on|an|no)(?![A-Za-z])"
)
_KNOWN_WORDS = (
    FUNCTIONS.keys()
    | GREEK
    | {*("and", "inf", "infinity", "True", "False", "Piecewise", "Integral")}
)
_TEXT_GROUP = re.compile(
    r"\\(?:text|mbox|textbf|textrm|mathrm|operatorname|begin|end)\*?\{[^{}]*\}"
)
_JOINT = re.compile(
    r"(?:[\s$,;.+&]|\\[,;() \[\]]|\\quad|\\qquad|\\text|\\mbox|[{}]|\band\b|\bor\b|\(\w\))*", re.I
)
_MAX_JOINT_CHARS = 20
_MAX_TAIL_CHARS = 600


@dataclass(frozen=True)
class Statement:
    """A stated answer: its text, the boxes it is made of (last one last), whether it was marked."""

    text: str
    boxed: tuple[str, ...] = ()
    marked: bool = True


def stated(text: str) -> Statement | None:
    """Return the answer that a completion states, None when it states none."""
    scope = visible(text)
    tagged = last_tag(scope, "answer")
    if tagged is not None:
        scope = tagged
    found = boxes(scope)
    if found:
        chain = _chain(scope, found)
        return Statement(chain[-1], tuple(chain)) if chain[-1].strip() else None
    scope = scope.strip()
    if tagged is not None and not wordy(scope):
        return Statement(scope) if scope else None
    for match in reversed(list(_CUE.finditer(scope))[-20:]):
        after = _tail(scope[match.end() :])
        if after:
            return Statement(after)
    if not wordy(scope):
        return Statement(scope) if scope else None
    last_line = scope.rsplit("\n", 1)[-1].strip(" *_")
    if not wordy(last_line) and any(c.isalnum() for c in last_line):
        return Statement(last_line)
    last = _last_value(scope)
    return Statement(last, marked=False) if last else None


def _chain(text: str, found: list[tuple[int, int, str]]) -> list[str]:
    r"""Return the contents of the last boxes that only ", " or "and" stands between."""
    chain = [found[-1][2]]
    for (_, end, content), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=False):
        between = text[end:start]
        plain = re.sub(r"\\(?:text|mbox|quad|qquad)|[\\${}]", " ", between)
        words = " ".join(plain.split())
        connected = re.search(r"\b(?:and|or)\b", words, re.I) and len(words) <= _MAX_JOINT_CHARS
        if not (connected or _JOINT.fullmatch(between)) or "." in words.rstrip("."):
            break
        if not words and "\n" in between:  # two results on lines of their own
            break
        chain.insert(0, content)
    return chain


def _tail(tail: str) -> str | None:
    """Return the answer at the head of what follows "the answer is"."""
    tail = tail[:_MAX_TAIL_CHARS].lstrip(" \t\r\n*_`:：\"'")
    formula = _FORMULA.match(tail)
    if formula and re.match(r"[\s.,*_]*(?:$|\n|[.,] )", tail[formula.end() :]):
        return _content(formula)
    line = tail.split("\n", 1)[0].strip(" *_`\"'")
    if not line:
        return None
    cut = _REASON.search(line)
    sentence = (line[: cut.start()] if cut and cut.start() else line).strip(" *_.,;:\"'")
    if sentence and not wordy(sentence):
        return sentence
    direct = NUMBER.match(sentence)
    if direct and "=" not in sentence:
        return direct.group()
    return _last_value(sentence)


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _last_value(text: str) -> str | None:
    """Return the last formula, or the last number when it stands behind that."""
    formula = None
    for match in _FORMULA.finditer(text):
        if not wordy(_content(match)):
            formula = match
    numbers = [*NUMBER.finditer(text), *_LATEX_NUMBER.finditer(text)]
    number = max(numbers, key=lambda m: m.end(), default=None)
    if formula and (number is None or formula.end() >= number.end()):
        return _content(formula).strip()
    return number.group().strip() if number else None


def wordy(text: str) -> bool:
    """Whether a text holds words, so that it can't be an answer as a whole."""
    bare = _TEXT_GROUP.sub(" ", text)
    if any("\u3040" <= c <= "\u9fff" or "\u0600" <= c <= "\u06ff" for c in bare):
        return True
    if _SHORT_WORDS.search(bare):
        return True
    words = [w for w in _WORD.findall(bare) if w not in _KNOWN_WORDS]
    return bool(words) and (len(words) > 1 or words[0] != bare.strip(" .$*()"))


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text in order, as they are written."""
    return [m.group().strip() for m in NUMBER.finditer(nfkc_keep_fractions(text))]


def nfkc_keep_fractions(text: str) -> str:
    """NFKC for all characters but the vulgar fractions, which it would tear apart."""
    return "".join(c if c in "½⅓⅔¼¾" else nfkc(c) for c in text) if not text.isascii() else text
