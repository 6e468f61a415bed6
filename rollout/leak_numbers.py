"""The numbers that a text mentions as values: no indices, no exponents, no numbers of steps."""

from __future__ import annotations

import re

_UNITS = (
    "cm|mm|km|dm|nm|kg|mg|lb|lbs|oz|ft|in|mi|yd|ml|hr|hrs|min|mins|sec|ms|am|pm|Hz|Pa|eV|mol|kJ|kW"
    "|m|g|s|h|l|L|J|N|W|V|K|C|F"
)
_NUMBER = re.compile(
    r"(?<![\w\\^])(?<![\^_]\{)(?<!\w[.,])"
    r"(?P<digits>\d{1,3}(?:[, ]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)"
    r"(?P<power>[eE][-+]?\d{1,3}|\s?(?:\\times|\\cdot|\*)\s?10\s?\^\s?\{?[-+]?\d{1,3}\}?)?"
    r"(?P<below>\s?/\s?\d+(?:\.\d+)?)?"
    rf"(?=(?:{_UNITS}|[A-Za-z]{{3,}})?(?!\w|[.,]\d|\s?\\(?:pi|sqrt|theta)\b))"
    r"(?P<percent>\s?%|\s?percent\b)?"
)
_APART = re.compile(r"(?<![\w.,])\d(?:[ -]\d)+(?![\w]|[.,]\d)")  # 4 2
_MIXED = re.compile(r"(?<![\w.,^])(\d{1,30})\s(\d{1,30})\s?/\s?(\d{1,30})(?!\w)")
_LABEL = re.compile(
    r"\b(?:step|part|point|line|case|equation|eq|figure|fig|table|section|theorem|lemma|statement"
    r"|claim|example|problem|question|row|column|sentence|paragraph|attempt|turn)s?\.?\s{0,3}[#(]?"
    r"(?:\d{1,2}\s{0,3}(?:,|and|or|to|through|&|-)\s{0,3}){0,4}$",
    re.IGNORECASE,
)
_ITEM = re.compile(r"[.):]\s{1,3}[^\W\d]")  # 2. Check …
_MAX_LABEL = 20
_LABEL_CHARS = 40


def _listed(text: str) -> list[str]:
    return text.split()


_ONES = _listed("one two three four five six seven eight nine")
_TEENS = _listed("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
_TENS = _listed("twenty thirty forty fifty sixty seventy eighty ninety")
_VALUES = {
    "zero": 0,
    **{word: n for n, word in enumerate([*_ONES, *_TEENS], start=1)},
    **{word: 10 * n for n, word in enumerate(_TENS, start=2)},
}
_SPELLED = re.compile(
    rf"\b(?:({'|'.join(_TENS)})(?:[- ]({'|'.join(_ONES)}))?|({'|'.join(_VALUES)}))\b",
    re.IGNORECASE,
)


def spelled_numbers(text: str) -> str:
    """Write zero … ninety-nine in digits."""

    def digits(match: re.Match[str]) -> str:
        return str(sum(_VALUES[word.lower()] for word in match.groups() if word))

    return _SPELLED.sub(digits, text)


def numbers(text: str) -> list[tuple[tuple[int, int], list[str]]]:
    r"""Find the numbers of a text.

    Args:
        text: notation as `plain_math` leaves it, fractions as a/b.

    Returns:
        For each number its span and the ways to read it ("12 000": 12000; "3,42": 3.42, 3 and 42),
        as `numeric.value` takes them. A number in an index, an exponent or a longer number is none,
        nor is one up to 20 that counts steps or begins a list's item.
    """
    found: list[tuple[tuple[int, int], list[str]]] = []
    for match in _NUMBER.finditer(text):
        if not _is_label(text, match):
            found.append((match.span(), _signed(text, match.start(), _readings(match))))
    for match in _APART.finditer(text):
        joined = re.sub(r"[ -]", "", match[0])
        found.append((match.span(), _signed(text, match.start(), [joined])))
    for match in _MIXED.finditer(text):
        whole, above, below = int(match[1]), int(match[2]), int(match[3])
        found.append((match.span(), [f"{whole * below + above}/{below}"]))
    for match in _SPELLED.finditer(text):
        number = spelled_numbers(match[0])
        if int(number) > len(_TEENS) + 2:  # one … twelve are ordinary words
            found.append((match.span(), [number]))
    return found


def _readings(match: re.Match[str]) -> list[str]:
    digits, power, below = match["digits"], match["power"] or "", match["below"] or ""
    percent = "%" if match["percent"] else ""
    readings = [digits + power + percent]
    if below and not power:
        readings.append(digits.replace(",", "").replace(" ", "") + below + percent)
        readings.append(below.strip(" /") + percent)
    grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})+", digits)
    if " " in digits or ("," in digits and not grouped and "." not in digits):
        readings += re.split(r"[, ]", digits)  # two numbers, perhaps
    return readings


def _signed(text: str, start: int, readings: list[str]) -> list[str]:
    """The readings with the sign in front; both signs where that could be a dash or a minus."""
    before = text[max(0, start - 3) : start]
    if not before.rstrip().endswith("-"):
        return readings
    ahead = before.rstrip()[:-1]
    negative = [f"-{reading}" for reading in readings]
    if before.endswith("-") and not re.search(r"[\w)\]}%]\s*$", ahead):
        return negative
    return [*readings, *negative]


def _is_label(text: str, match: re.Match[str]) -> bool:
    digits = match["digits"]
    if not digits.isdecimal() or len(digits) > 2 or int(digits) > _MAX_LABEL:
        return False
    if match["power"] or match["below"] or match["percent"]:
        return False
    start = match.start()
    if _LABEL.search(text[max(0, start - _LABEL_CHARS) : start]):
        return True
    line = text.rfind("\n", max(0, start - 4), start) + 1 if start else 0
    begins = not text[max(line, start - 4) : start].strip(" *#") if line or start < 4 else False
    return begins and _ITEM.match(text, match.end("digits")) is not None
