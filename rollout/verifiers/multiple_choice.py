"""Multiple choice: the option that a completion states, among the row's own letters.

In order of weight: the last closed `<answer>` tag; then the last statement, which is a choice in a
box, "the answer is B", "option B is correct" and their kin; then a last line that is nothing but a
choice ("B", "(B)", "**B**", "B: text", the option's full text). A letter that only occurs in the
text is never taken. Several letters are an answer, and a wrong one.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from .extraction import boxes, last_tag, nfkc, visible
from .verdict import Verdict, judged, unjudged

_CUE = re.compile(
    r"\b(?:answer|option|choice)s?\b[^\S\n]*(?:(?:to|of|for)\b[^\n.:]{0,60}?)?[*_\"'`]{0,4}"
    r"[^\S\n]*(?:is|are|:|=|-|–|—|\bwould be|\bmust be|\bshould be|\bwill be)"
    r"|(?:答案|回答)[是为:]?",
    re.IGNORECASE,
)
_PICK = re.compile(
    r"\bI(?:'d| would| will|'ll)? *(?:choose|pick|select|go with|went with)\b", re.IGNORECASE
)
_AFFIRMED = (
    r"is\b[^\S\n]*(?:(?:the|an?|clearly|therefore|thus|indeed)\b[^\S\n]*){0,2}"
    r"(?:correct|right|valid|true|best|answer)\b"
)
_NEGATION = re.compile(
    r"(?:\bnot|n't|\brul(?:es?|ed|ing) out|\beliminat\w+|\bexclud\w+|\brather than|\binstead of"
    r"|\bexcept|\bunlike|\bthan)(?: be)?(?: option| choice| both| either)?\s*[(\"'*]{0,3}$",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?:\b(?:is|be|are|leaving|leaves|choose|pick|select|say|with|but|to|option|choice|letter"
    r"|therefore|thus|hence|clearly|both|either|rather)|^|[:=])[\s(\"'*$]*$",
    re.IGNORECASE,
)
_DECOR = re.compile(r"[\s*_`\"'“”‘’$()\[\]{}<>#.:,;!\\-]+")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|bm|boxed|rm|bf)\b\s*")
_BEFORE_CHOICE = re.compile(
    r"(?:(?:so|thus|therefore|hence|finally|it is|it's|the|final|correct|option|choice|letter"
    r"|answer|is)\b[\s,:]*){1,6}",
    re.IGNORECASE,
)
# A capital A or I in front of any other word is the article or the pronoun, not an option.
_AFTER_WORDLIKE = re.compile(
    r"\s*(?:$|[\n.,;:!?)\]}*_\"'`/&$\\<>。、，；：-]|(?:because|since|as|for|which|and|or|but|with"
    r"|given|due|is|not|rather|in|by|from)\b|[A-Z]\b)"
)
_NAMED = re.compile(r"\b(?:option|choice|letter)\W*$", re.IGNORECASE)
_REASON = re.compile(r"[\s,]*(?:because|since|as|for|due|given|which|and not|rather|not)\b")
_BEFORE_AFFIRMED = re.compile(
    r"(?:^|[^\w\s]\s*|\n\s*|\b(?:option|choice|letter|statement|answer|so|thus|therefore|hence|because"
    r"|since|think|believe|that|and|but|only|then|conclude|say)\s+)[(*_\"]{0,3}$",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|[.!?;](?=\s|$)|[。！？；]")
_OPENERS = " \t\n*_`\"'“”$({[\\:=-"
_PREAMBLE = re.compile(
    r"^(?:[\s*_`\"'“”$({\[\\:=-]|(?:the|option|choice|letter)\b)+", re.IGNORECASE
)
_MAX_STATEMENT_CHARS = 400
_MAX_STATEMENTS = 200


def judge(gold: str, text: str, options: Any = None) -> Verdict:
    """Judge a multiple-choice answer.

    Args:
        gold: the right letter; several letters ("BC") for a question with several right options.
        text: the completion.
        options: mapping of letter to option text, or the letters alone; 2 to 26. Without it:
            A to the greater of D and the gold's last letter.

    Returns:
        "right" when the stated letters are the gold's. An option whose text equals the gold
        option's text is the gold option.

    Raises:
        ValueError: options or gold that make no question.
    """
    texts = _option_texts(options, gold)
    wanted = _gold_letters(gold, texts)
    said = _stated(visible(text), texts)
    if not said:
        return unjudged("no_answer")
    return judged(_same(said, wanted, texts), ",".join(sorted(said)))


def _option_texts(options: Any, gold: str) -> dict[str, str]:
    """Return letter → normalised text ("" when only letters are known)."""
    if options is None:
        last = max([c for c in nfkc(gold).strip().split(" ")[0] if "A" <= c <= "Z"], default="D")
        options = [chr(c) for c in range(ord("A"), ord(max(last, "D")) + 1)]
    if isinstance(options, Mapping):
        texts = {str(k).strip().upper(): _plain(str(v)) for k, v in options.items()}
    elif isinstance(options, Iterable):
        texts = {str(k).strip().upper(): "" for k in options}
    else:
        raise ValueError("options must map letters to texts or list letters")
    if not 2 <= len(texts) <= 26 or any(not re.fullmatch("[A-Z]", k) for k in texts):
        raise ValueError(f"options need 2 to 26 different letters A to Z, got {sorted(texts)}")
    return texts


def _gold_letters(gold: str, texts: dict[str, str]) -> frozenset[str]:
    head = re.match(r"[\s(*]*([A-Z]+)(?![A-Za-z0-9])", nfkc(gold))
    letters = frozenset(head.group(1)) if head else frozenset()
    if not letters or not letters <= texts.keys():
        raise ValueError(f"gold {gold!r:.40} is none of the options {''.join(sorted(texts))}")
    return letters


def _same(said: frozenset[str], wanted: frozenset[str], texts: dict[str, str]) -> bool:
    if said == wanted:
        return True
    if len(said) != 1 or len(wanted) != 1:
        return False
    (a,), (b,) = said, wanted
    return bool(texts[a]) and texts[a] == texts[b]


def _plain(text: str) -> str:
    """Return a text for comparison: NFKC, no markup, no case, single spaces."""
    text = nfkc(text)
    text = _WRAPPER.sub(" ", text).replace("$", " ").replace("\\(", " ").replace("\\)", " ")
    text = re.sub(r"[*_`{}\"'“”‘’~]|\\[,;! ]", " ", text)
    return " ".join(text.casefold().split()).strip(" .。")


def _stated(text: str, texts: dict[str, str]) -> frozenset[str]:
    """Return the letters that the visible text states, empty when it states none."""
    tagged = last_tag(text, "answer")
    if tagged is not None:
        tagged = nfkc(tagged)
        return _choice(tagged, texts) or _last_statement(tagged, texts) or _reasoned(tagged, texts)
    text = nfkc(text)
    said = _last_statement(text, texts)
    if said:
        return said
    lines = [line for line in text.split("\n") if _DECOR.sub("", line)]
    last = [_choice(line, texts) for line in lines[-2:]]
    if len(last) == 2 and last[0] and last[0] != last[1]:  # the options, listed again
        return frozenset()
    return last[-1] if last else frozenset()


def _reasoned(content: str, texts: dict[str, str]) -> frozenset[str]:
    """Return the letters of "C because …", empty for other texts."""
    content = _PREAMBLE.sub("", content)
    match = _letter_list(content, texts, any_case=False)
    return match[0] if match and _REASON.match(content, match[1]) else frozenset()


def _choice(content: str, texts: dict[str, str]) -> frozenset[str]:
    """Return the letters of a string that is nothing but a choice, else the empty set."""
    plain = _plain(content)
    by_text = frozenset(k for k, v in texts.items() if v and v == plain)
    if by_text:  # equal texts are one option: any of its letters stands for it
        return frozenset([min(by_text)])
    content = _WRAPPER.sub(" ", nfkc(content)).strip()
    content = re.sub(r"^[\s*_`\"'“”$({\[\\#-]+", "", content)
    lead = _BEFORE_CHOICE.match(content)
    if lead:
        content = re.sub(r"^[\s*_`\"'“”$({\[\\#-]+", "", content[lead.end() :])
    match = _letter_list(content, texts, any_case=not lead or bool(_NAMED.search(lead[0])))
    if not match:
        return frozenset()
    letters, end = match
    rest = content[end:]
    if not _DECOR.sub("", rest):
        return letters
    label = re.match(r"[\s*_`\"'$)\]}]*[.:)\]}。–—-][\s*_`\"'$)\]}]*(.*)", rest, re.DOTALL)
    if not label or len(letters) > 1:
        return letters if len(letters) > 1 else frozenset()
    named = _plain(label.group(1))
    other = frozenset(k for k, v in texts.items() if v and v == named)
    return letters if not other or letters & other else letters | other


def _letter_list(
    content: str, texts: dict[str, str], any_case: bool
) -> tuple[frozenset[str], int] | None:
    """Return the letters at the very start ("B", "A, B and C", "A B") and where they end."""
    letters: set[str] = set()
    at = 0
    while True:
        joint = re.compile(
            r"(?:[\s*_`\"'$)\]}]*(?:,|/|&|\+|\band\b|\bor\b|、)){1,2}[\s*_`\"'$(\[{]*|\s+"
        ).match(content, at)
        start = joint.end() if letters and joint else at
        if letters and not joint:
            break
        char = content[start : start + 1]
        letter = char.upper()
        following = content[start + 1 : start + 40]
        if letter not in texts or re.match(r"[\w+^=]|['’]\w", following):
            break
        if char.islower() and not (any_case and not letters and _ends(following)):
            break
        if (letter in "AI" or letters) and not _AFTER_WORDLIKE.match(following):
            break
        letters.add(letter)
        at = start + 1
    return (frozenset(letters), at) if letters else None


def _ends(following: str) -> bool:
    return re.match(r"[\s*_`\"'$)\]}]*(?:$|\n|[.,:;!?)](?:\s|$))", following) is not None


def _last_statement(text: str, texts: dict[str, str]) -> frozenset[str]:
    """Return the letters of the last explicit statement, empty when there is none."""
    found: list[tuple[int, Callable[[], frozenset[str]]]] = []
    for start, _, content in boxes(text):
        found.append((start, partial(_choice, content, texts)))
    for pattern in (_CUE, _PICK):
        for match in pattern.finditer(text):
            found.append((match.start(), partial(_after_cue, text, match.end(), texts)))
    names = "".join(sorted(texts))
    affirmed = re.compile(rf"(?<![\w'’])([{names}])[)*_\"]{{0,3}}\s+{_AFFIRMED}")
    for match in affirmed.finditer(text):
        before = text[max(0, match.start() - 40) : match.start()]
        if _BEFORE_AFFIRMED.search(before) and not _NEGATION.search(before):
            found.append((match.start(), partial(frozenset, match.group(1))))
    found.sort(key=lambda item: item[0])
    for _, read in found[: -_MAX_STATEMENTS - 1 : -1]:
        if letters := read():
            return letters
    return frozenset()


def _after_cue(text: str, start: int, texts: dict[str, str]) -> frozenset[str]:
    """Return the letters that follow "the answer is" within its sentence."""
    tail = text[start : start + _MAX_STATEMENT_CHARS]
    tail = _WRAPPER.sub(" ", tail).lstrip(_OPENERS)
    direct = _letter_list(_PREAMBLE.sub("", tail), texts, any_case=True)
    if direct:
        return direct[0]
    end = _SENTENCE_END.search(tail)
    sentence = tail[: end.start()] if end else tail
    named = _plain(sentence)
    by_text = [k for k, v in texts.items() if v and v == named]
    if by_text:
        return frozenset(by_text[:1])
    letters: set[str] = set()
    names = "".join(sorted(texts))
    for match in re.finditer(rf"(?<![\w'’])([{names}])(?![\w'’])", sentence):
        before, after = sentence[: match.start()], sentence[match.end() :]
        if match.group(1) in "AI" and not _AFTER_WORDLIKE.match(after):
            continue
        if _NEGATION.search(before[-40:]):
            continue
        if letters or _LEAD.search(before[-40:]):
            letters.add(match.group(1))
    return frozenset(letters)
