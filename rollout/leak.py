r"""Does a teacher's message reveal the answer? A string match that no spelling should get around.

What counts depends on the kind: a number by its value (42, 42.0, \boxed{42}, 4 2, full-width
digits), a formula and a text by their signs, an option by its letter or text, a program by a run of
its lines. What the student has seen or written before is no news, unless the message presents it as
the answer. Answers in other words ("half of 84", "1 + x" for "x + 1") are not found.

Every pattern is bounded, so that the time is linear in the text, whatever a model wrote.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from cotutor.rollout.feedback import revealing
from cotutor.rollout.leak_numbers import numbers, spelled_numbers
from cotutor.rollout.problems import split_options
from cotutor.rollout.trajectory import Problem
from cotutor.rollout.verifiers import multiple_choice
from cotutor.rollout.verifiers.extraction import boxes, nfkc
from cotutor.rollout.verifiers.math_answers import bare, gold_value
from cotutor.rollout.verifiers.normalise import plain_math
from cotutor.rollout.verifiers.numeric import value

Finder = Callable[[str], list[tuple[int, int]]]  # the spans of a text in which the answer stands

_MATH_KINDS = ("math", "expression", "numeric")
_RUN_LINES = 3  # so many lines of the reference program in a row are a leak, or all of them
# Words that a message without any secret is full of: they count where they are presented.
_EVERYDAY = frozenset(
    {"yes", "no", "true", "false", "right", "wrong", "even", "odd", "all", "none"}
)

_CUE = re.compile(
    r"(?P<own>\b(?:your|their|(?:student|peer|response)['’]s)\s{1,3})?"
    r"\b(?:(?:correct|right|final|exact|true|actual)\s{1,3}){0,2}"
    r"(?:answer|result|solution|total|value|output|word)s?\b(?:\s{1,3}(?:to|of|for|here)\b"
    r"(?:\s{1,3}[^\s.:;!?=]{1,30}){0,6}?)?[*_]{0,2}\s{0,3}"
    r"(?:(?P<should>\b(?:should|must|would|will|has\s{1,3}to|ought\s{1,3}to)\s{1,3}be\b)"
    r"|\b(?:is|was|are|equals|becomes|comes\s{1,3}(?:out\s{1,3})?(?:to|as|at))\b|[:=→])"
    r"|\b(?:should|must|ought\s{1,3}to|needs?\s{1,3}to|supposed\s{1,3}to|will|would)\s{1,3}"
    r"(?:be|get|equal|give|yield|obtain|become|come\s{1,3}(?:out\s{1,3})?(?:to|as|at)|end\s{1,3}up"
    r"\s{1,3}with|arrive\s{1,3}at|find|reach|answer|write|say|result\s{1,3}in)\b",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<answer>([^<]{0,400})", re.IGNORECASE)
_BEFORE_VALUE = re.compile(
    r"(?:[\s*_`$(\[{\"'“”‘:=~≈>-]|\\[a-zA-Z]{1,12}|\b(?:exactly|just|simply|indeed|therefore|thus|then"
    r"|now|about|the|an?|number|value|word|of|option|choice)\b){0,16}",
    re.IGNORECASE,
)
_HEAD_LINE = re.compile(r"(?:async )?def\b.*:$|class\b.*:$|import\b|from\b.*\bimport\b|@|[\"']{3}")
_HEAD_CHARS = 80  # how far behind "the answer is" it can begin


def leaks(message: str, problem: Problem, said: str = "") -> bool:
    """Whether a teacher's message reveals the answer of a problem.

    Args:
        message: what the student would be shown.
        problem: its gold answer, kind and options; code: `solution` is the reference program.
        said: what the student has seen or written already: the question and its responses. What
            stands there counts only where the message presents it as the answer.
    """
    if problem.kind == "mcq":
        return _leaks_option(_visible(message), problem, _visible(said))
    read: Callable[[str], str] = nfkc
    if problem.kind in _MATH_KINDS:
        finders = [_answer_finder(problem.gold)]
        read = _readable_math
    elif problem.kind == "text":
        finders = [_text_finder(problem.gold)]
    elif problem.kind == "code":
        finders = [_pattern_finder(run) for run in _program_runs(problem.solution)]
        read = _statements
    else:
        raise ValueError(f"no leak check for problems of the kind {problem.kind!r}")
    shown, known = read(_visible(message)), read(_visible(said))
    return any(_found(find, shown, known) for find in finders)


def _found(find: Finder, text: str, said: str) -> bool:
    found = [text[start:stop] for start, stop in find(text)]
    telling = [t for t in found if t.casefold() not in _EVERYDAY and (len(t) > 1 or t.isdecimal())]
    return (bool(telling) and not find(said)) or any(_presented(find, text))


def _presented(find: Finder, text: str) -> Iterator[bool]:
    """For each place where a text states an answer, whether the finder's stands there."""
    for _, _, content in boxes(text):
        yield bool(find(content))
    for tagged in _TAGGED.finditer(text):
        yield bool(find(tagged[1]))
    for cue in _CUE.finditer(text):
        if not cue["own"] or cue["should"]:
            head = spelled_numbers(text[cue.end() : cue.end() + _HEAD_CHARS])
            yield any(_BEFORE_VALUE.fullmatch(head[:start]) for start, _ in find(head))
    for line in text.split("\n"):
        yield any(not re.search(r"\w", line[:a] + line[b:]) for a, b in find(line))


def _visible(text: str) -> str:
    """The text without invisible characters and stray marks, its digits those of ASCII."""
    if text.isascii():
        return text
    kept: list[str] = []
    for char in unicodedata.normalize("NFC", text):
        if unicodedata.category(char) not in ("Cf", "Mn", "Me"):
            kept.append(str(unicodedata.decimal(char)) if char.isdecimal() else char)
    return "".join(kept)


def _readable_math(text: str) -> str:
    """A text whose numbers and formulas have one spelling; boxes stay."""
    words = r"\\(?:text(?:bf|it|rm)?|mbox|mathrm)\s{0,3}\{([^{}]{0,200})\}"
    text = re.sub(r"\{\s{0,3}\}", "", re.sub(words, r"\1", plain_math(text)))
    text = re.sub(  # \frac{1}{2}, \frac12
        r"\\frac\s{0,3}(?:\{\s{0,3}([-\d.,]{1,40})\s{0,3}\}|(\d))\s{0,3}"
        r"(?:\{\s{0,3}([\d.,]{1,40})\s{0,3}\}|(\d))",
        lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ",
        text,
    )
    emphasis = r"(?<!\w)_{1,2}(?=\w)|(?<=\w)_{1,2}(?!\w|\{)"
    emphasis += r"|(?<![\w*)}])\*{1,3}(?=\S)|(?<=\S)\*{1,3}(?![\w*({\\])"
    return re.sub(emphasis, " ", text)


def _nothing(_text: str) -> list[tuple[int, int]]:
    return []


@lru_cache(maxsize=4096)
def _answer_finder(gold: str) -> Finder:
    """Find a mathematical answer: by value where it is a number, else by its signs."""
    assigned = re.fullmatch(r"\s*\$?\s*[a-zA-Z]\s*=\s*(.+)", gold, re.DOTALL)
    gold = assigned[1] if assigned else gold
    wanted = gold_value(_visible(gold))
    if wanted is not None:
        return lambda text: [
            span for span, said in numbers(text) if any(_same(wanted, number) for number in said)
        ]
    signs = bare(_readable_math(_visible(gold)))
    if signs.isalpha():
        return _text_finder(signs)
    pieces = [
        r"(?:,?\s{0,3}(?:and|or)|,)" if sign == "," else re.escape(sign)
        for sign in signs
        if sign not in "{}"
    ]
    inner = r"[\s{}]{0,4}".join(pieces)
    return _pattern_finder(rf"(?<![\w\\^.+*/-]){inner}(?![\w^*/+]|\s{{1,3}}[\^*/+]|-\w)")


def _same(wanted: Fraction, written: str) -> bool:
    """Whether a written number is the wanted one; a percentage is, too, by its number."""
    number, percent = value(written)
    return number is not None and (number == wanted or (percent and number == wanted * 100))


@lru_cache(maxsize=4096)
def _text_finder(gold: str) -> Finder:
    """Find words whatever stands between them; a single word also spelled out, b-c-d-f."""
    parts = re.findall(r"[^\W_]+", nfkc(_visible(gold)).casefold())
    if len(parts) > 1 and parts[0] in ("the", "a", "an"):
        parts = parts[1:]
    if not parts:
        return _pattern_finder(re.escape(gold.strip())) if gold.strip() else _nothing
    gap = r"[\W_]{0,4}" if all(word.isdigit() for word in parts) else r"[\W_]{1,4}"
    pattern = gap.join(map(re.escape, parts))
    if len(parts) == 1 and len(parts[0]) > 2:
        spelled = r"[^\w\n]{1,3}".join(parts[0])
        pattern = f"(?:{pattern}|{spelled})"
    return _pattern_finder(rf"(?<![^\W_])(?<!\d[.,]){pattern}(?![^\W_]|[.,]\d)")


def _pattern_finder(pattern: str) -> Finder:
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda text: [match.span() for match in compiled.finditer(text)]


def _statements(program: str) -> str:
    """A program, or a text around one, without comments, imports and the heads of definitions."""
    lines = (re.sub(r"(?:^|\s)#.{0,400}$", "", line).strip() for line in nfkc(program).split("\n"))
    return "\n".join(line for line in lines if line and not _HEAD_LINE.match(line))


@lru_cache(maxsize=4096)
def _program_runs(program: str) -> tuple[str, ...]:
    """Patterns of the runs of lines that would give a program away, white space left open."""
    lines = [
        r"\s{0,40}".join(map(re.escape, re.findall(r"\w+|[^\w\s]", line)))
        for line in _statements(program).split("\n")
        if line
    ]
    size = min(_RUN_LINES, len(lines))
    runs = [r"\s{0,40}".join(lines[n : n + size]) for n in range(len(lines) - size + 1) if size]
    return tuple(rf"(?<!\w){run}(?!\w)" for run in runs)


def _leaks_option(message: str, problem: Problem, said: str) -> bool:
    message, said = nfkc(message), nfkc(said)
    options: Any = problem.options.get("options") or None
    if multiple_choice.judge(problem.gold, message, options=options).correct:
        return True
    letters = re.findall(r"[A-Z]", nfkc(problem.gold).split(" ")[0])
    spans = [message[a:b] for a, b in revealing(message)]
    return all(_leaks_letter(letter, message, said, spans) for letter in letters) or any(
        _found(_text_finder(options[letter]), message, _without_options(said, problem))
        for letter in letters
        if isinstance(options, dict) and options.get(letter)
    )


def _leaks_letter(letter: str, message: str, said: str, revealed: list[str]) -> bool:
    lower = "" if letter in "AI" else letter.lower()
    alone = re.compile(rf"(?<![\w\\])[{letter}{lower}](?![\w'’])")
    if any(alone.search(span) for span in revealed):
        return True
    named = re.compile(
        rf"\b(?i:option|choice|letter|answer)s?[\s(\[\"'“‘*_$:#]{{1,4}}[{letter}{lower}](?![\w'’])"
    )
    return bool(named.search(message)) and not named.search(said)


def _without_options(said: str, problem: Problem) -> str:
    """What was said without the list of options that the question ends with."""
    question = nfkc(_visible(problem.question))
    return said.replace(question, split_options(question)[0], 1)
