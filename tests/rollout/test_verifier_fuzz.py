"""Random texts, trees and mutations against extractors, grammar, limits and the sandbox's wire."""

import random
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotutor.rollout.verifiers import VerifierPool, verify
from cotutor.rollout.verifiers.grammar import parse
from cotutor.rollout.verifiers.inside import plain_data
from cotutor.rollout.verifiers.lexer import GrammarError, LimitError
from cotutor.rollout.verifiers.normalise import join_thousands, plain_math
from cotutor.rollout.verifiers.unit_tests import extract

MANY = settings(max_examples=300, deadline=None, derandomize=True)
SOME = settings(max_examples=150, deadline=None, derandomize=True)

PIECES = [
    *(
        "A",
        "B",
        "C",
        "I",
        "a",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "**",
        "*",
        "_",
        "`",
        "\n",
        "\r\n",
        " ",
    ),
    *(
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "<reasoning>",
        "</reasoning>",
        "```",
        "$",
        "$$",
    ),
    *("\\boxed{", "\\frac", "\\sqrt", "\\text{", "\\left(", "\\right)", "\\[", "\\]", "\\(", "\\)"),
    *("\\pm", "\\cup", "\\int_0^1", "\\sum_{k=1}^{9}", "dx", "\\begin{pmatrix}", "\\end{pmatrix}"),
    *("the answer is ", "Answer: ", "not ", "and ", "or ", "is correct", "####", "option "),
    *("1", "23", "4.5", ",", ", ", ";", ":", "=", "<", "\\le", "+", "-", "/", "^", "!", "%", "&"),
    *(
        "x",
        "y",
        "e",
        "i",
        "\\pi",
        "sin",
        "\\log_",
        "|",
        "'",
        "°",
        "½",
        "²",
        "−",
        "Ａ",
        "三",
        "\x00",
    ),
    *("python\n", "def f(x):\n", "    return x\n", "\\\\", "\\", '"', "9^9^9", "\u200b", "\ud800"),
]
soups = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
texts = st.one_of(soups, st.text(max_size=200))


@pytest.mark.slow
@MANY
@given(texts)
def test_a_choice_is_one_of_the_options(text: str) -> None:
    verdicts = [verify("mcq", gold, text, options="ABC") for gold in "ABC"]
    assert len({v.extracted for v in verdicts}) == 1
    assert sum(v.correct for v in verdicts) <= 1
    said = verdicts[0].extracted
    assert said is None or set(said.split(",")) <= set("ABC")


@pytest.mark.slow
@MANY
@given(texts)
def test_every_kind_judges_every_text(text: str) -> None:
    for kind in ("text", "numeric", "math"):
        verdict = verify(kind, "137.25", text)
        assert verdict.status in ("right", "wrong", "no_answer", "undecided")
        assert verdict.correct == (verdict.status == "right")
        assert not verdict.correct or "137.25" in (verdict.extracted or "")
    assert extract(text) is None or isinstance(extract(text), str)


@pytest.mark.slow
@MANY
@given(texts)
def test_the_grammar_parses_or_refuses(text: str) -> None:
    for whole_names in (True, False):
        try:
            tree = parse(join_thousands(plain_math(text)), whole_names, whole_names)
        except (GrammarError, LimitError):
            continue
        assert isinstance(tree, tuple)
        assert isinstance(tree[0], str)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(PIECES), st.sampled_from(PIECES), st.sampled_from(PIECES))
def test_kinds_judged_in_the_caller_take_linear_time(a: str, b: str, c: str) -> None:
    repeated = (a + b + c) * (100_000 // len(a + b + c))
    for text in (repeated, f"<answer>{repeated}</answer>"):
        start = time.process_time()
        verify("mcq", "B", text, options="ABC")
        verify("text", "B", text)
        assert time.process_time() - start < 1.0


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=20,
)


def _no_handle(value: object) -> int:
    raise TypeError(f"{type(value)} is no plain data")


@SOME
@given(plain)
def test_plain_data_crosses_the_wire_unchanged(value: object) -> None:
    there_and_back = plain_data.decode(plain_data.encode(value, _no_handle), _no_handle)
    assert there_and_back == value
    assert type(there_and_back) is type(value)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["n", "b", "i", "f", "s", "c", "y", "l", "d", "r", "D", "F", "B", "h", "S"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=15,
)  # fmt: skip


@SOME
@given(junk)
def test_junk_on_the_wire_is_data_or_refused(message: object) -> None:
    try:
        value = plain_data.decode(message, lambda number: number)
    except ValueError:
        return
    assert type(value).__module__ in ("builtins", "decimal", "fractions", "collections")


# Right answers that must stay right, and wrong ones that must stay wrong.
TERMS = ["x^2", "3x", "7", r"\sqrt{2}", r"\frac{x}{5}", r"\sin x", r"e^{-x}", r"2\pi x"]
WRAPPERS = [
    "{}",
    r"\boxed{{{}}}",
    "The answer is ${}$.",
    "$$ {} $$",
    r"\[ {} \]",
    "<answer>{}</answer>",
    "**Final Answer:** ${}$",
    r"<think>\boxed{{0}}</think> so \boxed{{ {} }}.",
    r"\boxed{{y = {}}}",
    "Therefore,\n\n$${}$$",
]


@SOME
@given(st.lists(st.sampled_from(TERMS), min_size=2, max_size=5, unique=True), st.data())
def test_the_order_and_dress_of_a_sum_do_not_matter(terms: list[str], data: st.DataObject) -> None:
    gold = " + ".join(terms)
    shuffled = data.draw(st.permutations(terms))
    joint = data.draw(st.sampled_from([" + ", "+", r"\,+\,", r" + {}"]))
    wrapper = data.draw(st.sampled_from(WRAPPERS))
    text = wrapper.replace("{}", "SUM").replace("{{", "{").replace("}}", "}")
    text = text.replace("SUM", joint.join(shuffled))
    assert verify("math", gold, text).status == "right"


@SOME
@given(st.lists(st.sampled_from(TERMS), min_size=1, max_size=4, unique=True), st.data())
def test_a_changed_value_is_wrong(terms: list[str], data: st.DataObject) -> None:
    gold = " + ".join(terms)
    changed = data.draw(
        st.sampled_from(["1.01({})", "-({})", "{} + 0.001", r"\frac{101}{100}({})", "({})^2"])
    ).replace("{}", gold)
    for kind in ("math", "expression"):
        assert verify(kind, gold, rf"\boxed{{{changed}}}").status == "wrong"


@SOME
@given(
    st.integers(1, 10**9) | st.fractions(min_value=-1000, max_value=1000, max_denominator=99),
    st.data(),
)
def test_numbers_in_any_dress(value: int | Fraction, data: st.DataObject) -> None:
    if value == 0:
        return
    written = f"{value:,}" if isinstance(value, int) else str(value)
    dress = data.draw(st.sampled_from(["{}", "The answer is {}.", r"\boxed{{{}}}", "A: {}"]))
    right, wrong = dress.format(written), dress.format(f"{float(value) * 1.01:.9g}")
    for kind in ("math", "numeric"):
        assert verify(kind, str(value), right).status == "right"
        assert verify(kind, str(value), wrong).status == "wrong"
        assert not verify(kind, str(value), dress.format(f"-({written})")).correct


@SOME
@given(st.integers(2, 26), st.data())
def test_letters_in_any_dress(count: int, data: st.DataObject) -> None:
    letters = [chr(ord("A") + i) for i in range(count)]
    gold, other = data.draw(st.permutations(letters))[:2]
    options = {letter: f"option text {letter.lower()}{letter.lower()}" for letter in letters}
    dress = data.draw(
        st.sampled_from(
            [
                *("{}", "({})", "**{}**", "{}.", "{}: {t}", "<answer>{}</answer>", "{t}"),
                *("The answer is {}.", "Answer: {}", "**Answer:** {}) {t}", "Final answer - {}"),
                *("<think>The answer is A</think>\n\n{}", "The correct option is ({}).\r\n"),
                "\\boxed{{{}}}",
            ]
        )
    )
    for letter in (gold, other):
        text = dress.format(letter, t=options[letter])
        verdict = verify("mcq", gold, text, options=options)
        assert verdict.extracted == letter
        assert verdict.correct == (letter == gold)
    both = f"<answer>{gold} or {other}</answer>"
    assert verify("mcq", gold, both, options=options).status == "wrong"


def _bomb(rng: random.Random, depth: int) -> str:
    """Return a random expression that grows fast."""
    if depth == 0:
        return rng.choice(["9", "x", "10^6", "n!", r"\pi", "0.5", "99999"])
    inner = [_bomb(rng, depth - 1) for _ in range(2)]
    shapes = ["{0}^{{{1}}}", "({0})!", r"\binom{{{0}}}{{{1}}}", r"\sqrt{{{0}}}", "{0}/{1}"]
    shapes += [
        r"\sum_{{k=1}}^{{{0}}} {1}",
        r"\int_0^{{{0}}} {1}\,dx",
        "({0}+{1})^{{99}}",
        "{0},{1}",
    ]
    shapes += [r"\prod_{{k=1}}^{{{0}}} k", r"\Gamma({0})", "e^{{{0}}}", "|{0}-{1}|", r"\zeta({0})"]
    return rng.choice(shapes).format(*inner)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(workers=2, timeout_s=1.0) as shared:
        yield shared


@pytest.mark.slow
def test_bombs_end_in_time_and_are_never_right(pool: VerifierPool) -> None:
    rng = random.Random(7)
    bombs = [rf"\boxed{{{_bomb(rng, rng.randint(1, 5))}}}" for _ in range(80)]
    start = time.monotonic()
    kinds = [("math", "expression")[i % 2] for i in range(len(bombs))]
    verdicts = pool.verify_many(
        [(kind, "-7.77", bomb, {}) for kind, bomb in zip(kinds, bombs, strict=True)]
    )
    assert {v.status for v in verdicts} <= {"wrong", "undecided", "timed_out"}
    assert time.monotonic() - start < len(bombs) * 1.2
