"""Where in a completion the answer stands: outside the thinking, in a tag, in a box.

Everything here is linear in the length of the text: plain scans, and regular expressions without
nested repetition.
"""

import re
import unicodedata

from .verdict import MAX_TEXT_CHARS

_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought)>", re.IGNORECASE)
_THINK_OPEN = re.compile(r"<(?:think|thinking|thought)>", re.IGNORECASE)
_INVISIBLE = dict.fromkeys([0x00AD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), 0x2060, 0xFEFF])
_CHAT_END = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id)\|>")
_BOX = re.compile(r"\\{1,2}(?:f?boxed|beginboxed)\s*\{")


def visible(text: str) -> str:
    """Return what a completion says outside its thinking part, cut to its last characters.

    Text up to the last closing thinking tag is thinking, with or without an opening tag (a template
    may have put that into the prompt); so is all text after an opening tag that is never closed.
    A closed `<reasoning>` block is thinking too. Chat markers end the text.
    """
    end = 0
    for match in _THINK_CLOSE.finditer(text):
        end = match.end()
    text = text[end:]
    opened = _THINK_OPEN.search(text)
    if opened:
        text = text[: opened.start()]
    marker = _CHAT_END.search(text)
    if marker:
        text = text[: marker.start()]
    text = _without_blocks(text, "<reasoning>", "</reasoning>")
    return text[-MAX_TEXT_CHARS:].replace("\r\n", "\n").replace("\r", "\n").translate(_INVISIBLE)


def _without_blocks(text: str, opening: str, closing: str) -> str:
    """Return the text without its closed blocks; an opening that is never closed is left."""
    kept, at = [], 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        kept += [text[at:start], "\n"]
        at = end + len(closing)
    return "".join([*kept, text[at:]])


def nfkc(text: str) -> str:
    """Return the text with full-width and other compatibility characters made plain (NFKC)."""
    return unicodedata.normalize("NFKC", text)


def last_tag(text: str, tag: str) -> str | None:
    """Return the content of the last closed `<tag>…</tag>`, None when there is none."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a few capitals change length; positions must match
        lowered = text
    close = lowered.rfind(f"</{tag}>")
    if close < 0:
        return None
    opening = f"<{tag}>"
    start = lowered.rfind(opening, 0, close)
    return None if start < 0 else text[start + len(opening) : close]


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return (start, end, content) of every balanced outermost `\boxed{…}`, in order."""
    found: list[tuple[int, int, str]] = []
    starts = {m.end() - 1: m.start() for m in _BOX.finditer(text)}
    if not starts:
        return found
    stack: list[int] = []
    closed: list[tuple[int, int]] = []
    escaped = False
    for i, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            stack.append(i)
        elif char == "}" and stack:
            start = stack.pop()
            if start in starts:
                closed.append((start, i))
    covered = -1
    for start, end in sorted(closed):
        if start > covered:
            found.append((starts[start], end + 1, text[start + 1 : end]))
            covered = end
    return found
