r"""Mathematical notation made plain before it is parsed: one spelling for each sign.

`plain_math` turns Unicode signs into LaTeX commands or ASCII, drops spacing and sizing commands,
joins thousands groups, and repairs what models often write (`\frac12`, doubled backslashes).
"""

import re

from .extraction import nfkc

_SIGNS: dict[str, str] = {
    **dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", (f"^{{{d}}}" for d in range(10)), strict=True)),
    **dict(zip("₀₁₂₃₄₅₆₇₈₉", (f"_{{{d}}}" for d in range(10)), strict=True)),
    **dict.fromkeys("−–—‐‑﹣", "-"),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("∗＊", "*"),
    "×": r"\times ",
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "√": r"\sqrt ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "˚": r"^\circ ",
    "℃": "",
    "′": "'",
    "’": "'",
    "π": r"\pi ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "δ": r"\delta ",
    "ε": r"\epsilon ",
    "ϵ": r"\epsilon ",
    "θ": r"\theta ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "σ": r"\sigma ",
    "τ": r"\tau ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "Γ": r"\Gamma ",
    "∫": r"\int ",
    "∑": r"\sum ",
    "∏": r"\prod ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "。": ".",
    "，": ",",
    "；": ";",
    "：": ":",
    "∣": "|",
    "〈": "(",
    "〉": ")",
}
_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
_SIGN_TABLE = str.maketrans(_SIGNS)
_VULGAR = re.compile("([0-9]?)([" + "".join(_FRACTIONS) + "])")

_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut)(?![a-zA-Z])"
    r"|(?<!\\)\\[!:;>]|\\(?:negthinspace|thinspace|enspace|hfill|hspace\{[^{}]*\}|phantom\{[^{}]*\})"
)
_GAP = re.compile(r"\\(?:quad|qquad)(?![a-z])|\\quad(?=x)|(?<!\\)\\[ ,]|~")
_SPELLINGS = [
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![a-z])"), r"\\binom"),
    (re.compile(r"\\(?:leqslant|leqq|leq)(?![a-z])"), r"\\le"),
    (re.compile(r"\\(?:geqslant|geqq|geq)(?![a-z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-z])"), r"\\ne"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![a-z])"), "|"),
    (re.compile(r"\\(?:lbrace)(?![a-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-z])"), r"\\}"),
    (re.compile(r"\\(?:lparen|langle)(?![a-z])"), "("),
    (re.compile(r"\\(?:rparen|rangle)(?![a-z])"), ")"),
    (re.compile(r"\\lbrack(?![a-z])"), "["),
    (re.compile(r"\\rbrack(?![a-z])"), "]"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degrees?(?![a-z])"), r"\\deg "),
    (re.compile(r"(?<=[\d}])\s*\bdegrees?\b|\\text\{\s*degrees?\s*\}"), r"\\deg "),
    (re.compile(r"\\(?:var)?epsilon(?![a-z])"), r"\\epsilon"),
    (re.compile(r"(?<=[\d)}])\s*(or|and)(?=[\s\d(A-Z\\])"), r" \1 "),
    (re.compile(r"\\varphi(?![a-z])"), r"\\phi"),
    (re.compile(r"\\varnothing(?![a-z])|\\\{\s*\\\}"), r"\\emptyset"),
    (re.compile(r"\\mathrm\{\s*([eid])\s*\}"), r"\1"),
    (re.compile(r"\\(?:operatorname\*?|mathop)\{\s*([a-zA-Z]+)\s*\}"), r"\\\1 "),
]
_THOUSANDS = [
    re.compile(r"(?<=\d) ?\{ ?, ?\} ?(?=\d{3}(?!\d))"),
    re.compile(r"(?<=\d),(?:\\!\s*)+(?=\d{3}(?!\d))"),
    re.compile(r"(?<=\d)\\[, ](?=\d{3}(?!\d))"),
]
_SPACED = re.compile(r"(?<![\d.,/^_{])(\d{1,3})((?: \d{3})+)(?![\d/])")
_COMMAS = re.compile(r"(?<![\d.,\w])(\d{1,3})((?:,\d{3})+)(?![\d,]|\.\d*,)")
_SIGNED_BRACKET = re.compile(r"(?<=[-+*/]) ?\(\d{1,3}(?:,\d{3})+(?:\.\d+)?\)")
_EMPTY = re.compile(r"(?<![\\\w}])\{\s*\}")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z(){}\[\],!;])")


def plain_math(text: str) -> str:
    """Return an answer's notation with one spelling for each sign; linear in its length."""
    if r"\begin" not in text:  # in a matrix a doubled backslash ends a row
        text = _DOUBLED.sub(r"\\", text)
    text = _VULGAR.sub(lambda m: f"{m[1]} {_FRACTIONS[m[2]]}" if m[1] else _FRACTIONS[m[2]], text)
    text = nfkc(text.translate(_SIGN_TABLE)).translate(_SIGN_TABLE)
    for pattern in (*_THOUSANDS, _EMPTY):
        text = pattern.sub("", text)
    text = _GAP.sub(" ", _DROPPED.sub("", text))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.replace(r"\$", "").replace("$", " ").replace(r"\(", " ").replace(r"\)", " ")
    text = text.replace(r"\[", " ").replace(r"\]", " ").replace(r"\%", "%")
    return text.strip().rstrip("\\").strip()


def join_thousands(text: str) -> str:
    """Return the text with `1,234` and `1 234` joined where no bracket is open."""
    if not re.search(r"\d[ ,]\d{3}", text):
        return text
    text = _SIGNED_BRACKET.sub(lambda m: m[0].replace(",", ""), text)
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "([{":
            if depth == 0:
                parts.append(_join(text[start:i]))
                start = i
            depth += 1
        elif char in ")]}" and depth:
            depth -= 1
            if depth == 0:
                parts.append(text[start : i + 1])
                start = i + 1
    parts.append(_join(text[start:]) if depth == 0 else text[start:])
    return "".join(parts)


def _join(text: str) -> str:
    text = _COMMAS.sub(lambda m: m[0].replace(",", ""), text)
    return _SPACED.sub(lambda m: m[0].replace(" ", ""), text)
