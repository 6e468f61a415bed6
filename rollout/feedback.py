"""A tutor's words on their way to the student: thinking out, answers out, anchor checked.

Every pattern below is bounded (no quantifier without an upper limit), so that the time is linear in
the text, whatever a model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cotutor.rollout.prompts import strip_thinking

_MAX_PASSES = 4  # taking something out can bring the halves of another statement together


def _compile(pattern: str) -> re.Pattern[str]:
    """A pattern in which one space stands for one to three white-space characters."""
    return re.compile(pattern.replace(" ", r"\s{1,3}"), re.IGNORECASE | re.MULTILINE)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LABEL = r"(?:(?:the )?(?:option|choice|letter|answer) )?"
_LETTER = (
    rf"{_LABEL}[\s(\[{{\"'“‘`*_$]{{0,4}}(?<![\w\\])(?P<letter>[A-JＡ-Ｊ])(?![\w'’])"
    r"[)\]}\"'”’`*_$]{0,4}"
)
_RIGHT = r"(?:correct|right|true|best|proper|actual|intended|expected|accurate)"
_NOUN = r"(?:answer|option|choice|letter|response|solution|one)"
_OF = r"(?: (?:here|to|for|of)\b(?: [^\s.:;!?]{1,30}){0,6}?)?[*_]{0,2}"
_IS = (
    r"\s{0,3}(?:(?:is|was)\s{0,3}:?|[:=→–—-])"
    r"(?: (?:therefore|thus|clearly|indeed|simply|actually|then))?"
)
_SHOULD_BE = r" (?:must|should|would|will|has to|ought to|needs to) be"
_VALUE = (  # what a final answer can be besides a letter: formula, quotation, number
    r"[\s(*_]{0,4}(?:\$[^$\n]{1,200}\$|\\boxed\{[^{}\n]{0,200}\}|[\"“`][^\"”`\n]{1,200}[\"”`]"
    r"|[-+−]?\d[\w.,/^×·+−-]{0,40}%?)[)*_]{0,3}"
)
_ITS_OWN = r"(?:your|their|his|her|its|(?:peer|student|response|author)['’]s)"
_BARE = r"[\s(\[]{0,3}[A-JＡ-Ｊ][)\].:]{0,2}\s{0,3}"  # a letter and nothing else

# Wherever they stand.
_SHOWN = [
    re.compile(  # \boxed{B}, $\boxed{\text{(B)}}$
        r"\$?\\(?:boxed|fbox)\s{0,3}\{\s{0,3}(?:\\(?:text|mathrm)\w{0,2}\s{0,3}\{)?"
        rf"{_BARE}\}}{{1,2}}\$?"
    ),
    re.compile(  # **B**
        rf"\*\*{_BARE}\*\*|__{_BARE}__|<(?:b|strong)>{_BARE}</(?:b|strong)>"
        rf"|\\(?:textbf|mathbf)\{{{_BARE}\}}"
    ),
    re.compile(r"<answer>[^<]{0,400}</answer>", re.IGNORECASE),
]
# Statements that end with a letter, or say of a letter that it is right.
_STATED = [
    _compile(  # the correct option is B; correct answer (B); the right choice here must be 42
        rf"\b(?:the )?{_RIGHT} (?:final )?{_NOUN}\b{_OF}"
        rf"(?:(?:{_IS}|{_SHOULD_BE}|,)?\s{{0,3}}{_LETTER}|(?:{_IS}|{_SHOULD_BE}){_VALUE})"
    ),
    _compile(  # the answer is B; final answer: 42; your answer should be B
        rf"(?P<own>\b{_ITS_OWN} )?\b(?:the )?(?:final {_NOUN}|answer|solution)\b{_OF}"
        rf"(?:{_IS}|(?P<should>{_SHOULD_BE}))\s{{0,3}}{_LETTER}"
    ),
    _compile(
        rf"(?P<own>\b{_ITS_OWN} )?\b(?:the )?final (?:answer|result|solution)\b{_OF}"
        rf"(?:(?:{_IS}|(?P<should>{_SHOULD_BE})){_VALUE}|\s{{0,3}}[:=] (?P<word>[^\s<.,;]{{1,60}})"
        r"(?=\.?[ \t]{0,3}(?:\n|$)))"
    ),
    _compile(  # B is correct; option (B) would be the best answer; B, which is right
        rf"(?P<before>\b[^\W\d_]{{1,20}} )?{_LETTER},?(?: which| that)?"
        r" (?:is|was|would be|must be|has to be)"
        r"(?: (?:the|an|indeed|clearly|therefore|thus|only|in fact)){0,3}"
        rf" (?:{_RIGHT}|answer)\b(?! (?:about|that|to|in|on|when|for|up)\b)(?: {_NOUN}\b)?"
    ),
    _compile(  # you should have chosen B; Choose option B.
        r"(?:\b(?:should|must|ought to|needs? to|ha(?:ve|s|d) to|want to|better|please|instead"
        r"|simply|then) (?:have )?|^[\s*-]{0,4}|(?<=[.!?:])\s{1,3})"
        r"(?:choose|chosen|pick|picked|select|selected|answer|answered|mark|marked|conclude"
        rf"|concluded|go with|gone with|opt for|opted for)\b {_LETTER}"
    ),
    _compile(  # Therefore, B.
        r"\b(?:therefore|thus|hence|so|consequently)\b,? (?:(?:it|this|that)(?: is|['’]s) )?"
        rf"{_LETTER}(?=\s{{0,3}}(?:[.,;!?]|$))"
    ),
    _compile(  # the correct value corresponds to option B
        rf"\b(?:{_RIGHT}|answer|result)\b(?: [^\s.;!?]{{1,30}}){{0,6}}?"
        r" (?:corresponds? to|match(?:es)?|points? to|leads? to|gives?|yields?)"
        rf" (?:the )?(?:option|choice|letter|answer){_LETTER}"
    ),
]
# After a lone A or I that is an option; in front of any other word it is an article, a pronoun.
_AFTER_LETTER = _words(
    "because since as for which and or but with given due is was would must has not rather"
)
_NOT_AN_OPTION = _words(  # in front of a letter that is something else, or isn't called right
    "step part point line case equation eq figure fig table section theorem lemma statement claim "
    "vitamin type class group phase sample hepatitis event set matrix vector not neither nor "
    "either or and both"
)
_REMARK = _words("wrong incorrect correct right missing ok yes no none unclear unknown")


def sanitise(text: str) -> tuple[str, int]:
    """Remove revealed answers: letters in boxes or in bold, and statements of the answer.

    Boxed numbers, options that are only mentioned, and what a peer's own answer was, stay.

    Returns:
        The text, unchanged when nothing is revealed, and the number of passages removed.
    """
    n_removed = 0
    for _ in range(_MAX_PASSES):
        spans = sorted(revealing(text))
        if not spans:
            break
        kept: list[str] = []
        position = 0
        for start, stop in spans:
            if start >= position:
                n_removed += 1
                kept.append(text[position:start])
            position = max(position, stop)
        kept.append(text[position:])
        text = re.sub(r"[ \t]{2,8}", " ", "".join(kept)).strip()
    return text, n_removed


def revealing(text: str) -> Iterator[tuple[int, int]]:
    """The spans of a text, in no order, that give the answer away."""
    for pattern in _SHOWN:
        yield from (match.span() for match in pattern.finditer(text))
    for pattern in _STATED:
        yield from (match.span() for match in pattern.finditer(text) if _reveals(match))


def _reveals(match: re.Match[str]) -> bool:
    """Whether a statement's letter is an option, and the statement isn't a mere report."""
    groups = match.groupdict()
    if groups.get("own") and not groups.get("should"):
        return False
    word = groups.get("word")
    if word is not None and word.strip("*_").casefold() in _REMARK:
        return False
    before = groups.get("before")
    if before and before.strip().casefold() in _NOT_AN_OPTION:
        return False
    letter = groups.get("letter")
    if letter is None:
        return True
    rest = match.string[match.end("letter") : match.end("letter") + 40]
    if letter.islower():  # "is a vector", but "is b."
        return re.match(r"[)\]}\"'”’`*_$]{0,4}(?:[.,;:!?]|\s{0,3}(?:\n|\Z))", rest) is not None
    following = re.match(r"\s{1,3}([a-z]{1,12})\b", rest)
    return letter not in "AI" or following is None or following[1] in _AFTER_LETTER


_CONCEPT = re.compile(r"<concept>([^<>]{0,200})</concept>", re.IGNORECASE)
_CONCEPT_TAG = re.compile(r"</?concept>", re.IGNORECASE)
_WORD = re.compile(r"\w+")
# Words that are in every question, or in none in particular: naming one of them anchors nothing.
_GENERIC = _words(
    "problem problems question questions answer answers value values calculation calculations "
    "formula formulas formulae student students peer peers specialist specialists option options "
    "choice choices solution solutions response responses result results step steps method "
    "approach concept concepts term terms reason reasoning explanation given following correct "
    "incorrect wrong right please select find determine calculate "
    "a about all an and any are as at be been but by can do does each for from has have how if in "
    "into is it its more most no not of on one only or other out over per so some such than that "
    "the their them then there these they this to two under up was were what when where which "
    "while who why will with would you your"
)


def judge_feedback(raw: str, question: str, anchored: bool = True) -> tuple[str, str, int]:
    """Decide whether a tutor's output is shown, and as what.

    Args:
        raw: what the tutor generated.
        question: the problem's question, in which the concept must occur.
        anchored: whether the tutor was asked for a concept.

    Returns:
        (text, outcome, passages removed by the sanitiser). The text is "" unless it is shown.
        Outcomes: "match:<word>" and, not anchored, "plain" are shown; "fb_none" (nothing
        generated), "empty" (an empty tag, or no words of feedback), "no_concept_tag" (none, or
        malformed), "all_generic" and "no_match" are not. A word of one letter or of digits only is
        generic: it could be an option's.
    """
    if not raw.strip():
        return "", "fb_none", 0
    text, revealed = sanitise(strip_thinking(raw))
    if not anchored:
        text = text.strip()
        return (text, "plain", revealed) if _WORD.search(text) else ("", "empty", revealed)
    tag = _CONCEPT.search(text)
    shown = _CONCEPT_TAG.sub("", _CONCEPT.sub("", text)).strip()
    if tag is None:
        outcome = "no_concept_tag" if text.strip() else "empty"
    else:
        outcome = _anchor(tag[1], question) if _WORD.search(shown) else "empty"
    return (shown if outcome.startswith("match:") else ""), outcome, revealed


def _anchor(concept: str, question: str) -> str:
    """The outcome for a concept: its first word that isn't generic and stands in the question."""
    words = _WORD.findall(concept.casefold())
    if not words:
        return "empty"
    telling = [w for w in words if w not in _GENERIC and len(w) > 1 and not w.isdigit()]
    if not telling:
        return "all_generic"
    in_question = set(_WORD.findall(question.casefold()))
    return next((f"match:{word}" for word in telling if word in in_question), "no_match")
