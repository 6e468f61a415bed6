"""Text answers: one stated string against the gold, both normalised."""

import re

from .extraction import last_tag, nfkc, visible
from .verdict import Verdict, judged, unjudged

_STATEMENT = re.compile(
    r"^[\s*_#>-]{0,8}(?:(?:the )?(?:final |correct )?answer(?: is)?|a|回答|答え|答案)[*_]{0,2}"
    r"[^\S\n]?(?::|：)[*_]{0,2}",
    re.IGNORECASE | re.MULTILINE,
)


def judge(gold: str, text: str, tag: str | None = None, normalise: bool = True) -> Verdict:
    """Judge a text answer.

    Args:
        gold: the right text.
        text: the completion.
        tag: name of a tag that must hold the answer; without it, no answer. None: the last
            `<answer>` tag if there is one, else what follows the last "Answer:" at the start of a
            line, else the last line that isn't empty.
        normalise: compare without case, articles, surrounding markup and sentence punctuation;
            False compares the strings without their surrounding white space.

    Returns:
        "right", "wrong", or "no_answer" when the required tag or any text is missing.

    Raises:
        ValueError: a gold that is empty after normalisation.
    """
    wanted = normalised(gold) if normalise else gold.strip()
    if not wanted:
        raise ValueError("the gold text is empty")
    said = extract(text, tag)
    if not said:
        return unjudged("no_answer")
    return judged((normalised(said) if normalise else said) == wanted, said)


def extract(text: str, tag: str | None = None) -> str | None:
    """Return the stated text without surrounding white space, None when nothing is stated."""
    text = visible(text)
    tagged = last_tag(text, (tag or "answer").lower())
    if tagged is not None or tag is not None:
        return tagged.strip() or None if tagged is not None else None
    end = -1
    for match in _STATEMENT.finditer(text):
        end = match.end()
    if end >= 0:
        lines = [line.strip() for line in text[end:].split("\n")]
        return next((line for line in lines if line), None)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else None


def normalised(text: str) -> str:
    """Return a text for comparison: NFKC, no case, no articles, no sentence punctuation."""
    text = nfkc(text).casefold().replace("−", "-").replace("’", "'")
    text = re.sub(r"\\(?:text|textbf|mathrm)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"[*_`\"“”「」]", " ", text)
    text = re.sub(r"[,;:!?。、](?!\d)|(?<!\d)[,;:!?]", " ", text)
    text = re.sub(r"\.(?!\w)", " ", text)
    text = " ".join(text.split()).strip(" ()[]'")
    return re.sub(r"^(?:the|an?) (?=\S)", "", re.sub(r" (?:the|an?) (?=\S)", " ", text))
