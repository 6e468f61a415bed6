"""Which of a teacher's messages reveal the answer."""

from __future__ import annotations

import time

import pytest

from cotutor.rollout.leak import leaks
from cotutor.rollout.tasks import make_problems
from cotutor.rollout.trajectory import Problem

OPTIONS = {"A": "osmosis", "B": "active transport", "C": "diffusion", "D": "42 kJ"}
PROGRAM = '''\
import math

def area(r):
    """Area of a disc."""
    # the formula
    square = r ** 2
    result = math.pi * square
    if r < 0:
        return None
    return result
'''


def problem(kind: str, gold: str, **more: object) -> Problem:
    return Problem(key="k", domain="d", question="Q", gold=gold, kind=kind, **more)  # type: ignore[arg-type]


NUMBERS = [  # (gold, message, whether it leaks)
    ("42", "So it is 42.", True),
    ("42", "42", True),
    ("42", "\\boxed{42}", True),
    ("42", "Check $42$ again.", True),
    ("42", "**42** is what remains", True),
    ("42", "__42__ is what remains", True),
    ("42", "You need 42.0 of them", True),
    ("42", "You need 4.2e1 of them", True),
    ("42", "You need $4.2 \\times 10^{1}$", True),
    ("42", "It is 4 2, written together", True),
    ("42", "full width: ４２", True),
    ("42", "zero width: 4\u200b2", True),
    ("42", "soft hyphen and joiner: 4\u00ad\u20602", True),
    ("42", "combining marks: 4\u0332 2".replace(" 2", "2\u0332"), True),
    ("42", "keycaps: 4\ufe0f\u20e32\ufe0f\u20e3", True),
    ("42", "Arabic digits: ٤٢", True),
    ("42", "4{}2", True),
    ("42", "\\text{42} apples", True),
    ("42", "that makes 42cm", True),
    ("42", "that makes 42 dollars", True),
    ("42", "that makes $42", True),
    ("42", "that makes \\$42", True),
    ("42", "forty-two of them", True),
    ("42", "Forty Two of them", True),
    ("42", "84/2 is simpler", True),
    ("42", "subtract: 50 - 42", True),
    ("42", "420 is too much", False),
    ("42", "142 is too much", False),
    ("42", "1.42 is too little", False),
    ("42", "42.5 is close", False),
    ("42", "0.42 is close", False),
    ("42", "the index x_42", False),
    ("42", "the index $x_{42}$", False),
    ("42", "the power $2^{42}$", False),
    ("42", "the variable x42", False),
    ("42", "10,042 is too much", False),
    ("42", "42,000 is too much", False),
    ("42", "version 1.42.3", False),
    ("42", "-42 has the wrong sign", False),
    ("42", "the 42nd term", False),
    ("42", "the product 42x", False),
    ("42", "$42\\pi$ is an area", False),
    ("-42", "so -42", True),
    ("-42", "so −42", True),
    ("-42", "so 42 below", False),
    ("1234", "1,234 in all", True),
    ("1234", "1 234 in all", True),
    ("1234", "1{,}234 in all", True),
    ("1,234", "1234 in all", True),
    ("1234", "12,345 in all", False),
    ("\\$32,000", "He has 32000 left", True),
    ("1/2", "take \\frac{1}{2} of it", True),
    ("\\frac{1}{2}", "take ½ of it", True),
    ("\\frac{1}{2}", "take 0.5 of it", True),
    ("0.5", "take \\dfrac12 of it", True),
    ("0.5", "take 50% of it", True),
    ("1/2", "take 1/20 of it", False),
    ("1/2", "take 11/2 of it", False),
    ("3/2", "take 1 1/2 of it", True),
    ("3/2", "take 1½ of it", True),
    ("12\\text{ cm}", "it is 12 cm long", True),
    ("x = 7", "it is 7", True),
    ("3", "Look at step 3 again.", False),
    ("3", "Steps 1, 2 and 3 hold.", False),
    ("3", "Fine so far.\n3. Check the units.", False),
    ("3", "Step 2 needs 3 of them.", True),
    ("30", "Step 30 is wrong.", True),
    ("3", "Step 2: the answer is 3", True),
]


@pytest.mark.parametrize(("gold", "message", "expected"), NUMBERS)
def test_numbers(gold: str, message: str, expected: bool) -> None:
    for kind in ("math", "numeric"):
        assert leaks(message, problem(kind, gold)) == expected


FORMULAS = [
    ("x+1", "so f(x) = x + 1", True),
    ("x+1", "\\boxed{x+1}", True),
    ("X+1", "$x + 1$", True),
    ("x+1", "so 2x+1", False),
    ("x+1", "so x+12", False),
    ("x+1", "so x+1^3", False),
    ("\\sqrt{2}", "so √2", True),
    ("\\sqrt{2}", "so \\sqrt 2", True),
    ("\\sqrt{2}", "so \\sqrt{20}", False),
    ("12\\pi", "so $12 \\pi$", True),
    ("p - q", "**p - q** it is", True),
    ("x**2", "so x**2 it is", True),
    ("4210_{5}", "so 4210_5", True),
    ("4210_{5}", "so $4210_{5}$", True),
    ("4210_{5}", "so $4210_{50}$", False),
    ("90^\\circ", "**90°**", True),
    ("\\left( \\frac{3}{2}, -13 \\right)", "so (3/2, -13)", True),
    ("\\left( \\frac{3}{2}, -13 \\right)", "so $\\left(\\dfrac32, -13\\right)$", True),
    ("\\left( \\frac{3}{2}, -13 \\right)", "so (3/2, -1)", False),
    ("(1,2)", "the point ( 1, 2 )", True),
    ("(1,2)", "the point (1, 20)", False),
    ("3, 5", "they are 3 and 5", True),
    ("3, 5", "they are 3 and 50", False),
    ("\\text{Monday}", "what day precedes Tuesday? monday", True),
    ("\\text{Monday}", "Mondays are different", False),
    ("x", "What is x in line 2?", False),
    ("x", "The answer is x.", True),
]


@pytest.mark.parametrize(("gold", "message", "expected"), FORMULAS)
def test_formulas(gold: str, message: str, expected: bool) -> None:
    assert leaks(message, problem("math", gold)) == expected


KNOWN = [  # (message, whether it leaks the 2 that the student has read)
    ("You added the 2 apples twice.", False),
    ("Your answer is 2, but look at the units.", False),
    ("Your answer should be 2.", True),
    ("The answer is 2.", True),
    ("the answer is **2**", True),
    ("The answer is not 2.", False),
    ("answer: two", True),
    ("The final result comes out to exactly $2$.", True),
    ("You should get 2 at the end.", True),
    ("You should get 20 at the end.", False),
    ("\\boxed{2}", True),
    ("\\boxed{20}", False),
    ("<answer>2</answer>", True),
    ("So:\n2\nThink.", True),
    ("the answer is \uff12", True),
]


@pytest.mark.parametrize(("message", "expected"), KNOWN)
def test_what_the_student_knows_counts_only_as_the_answer(message: str, expected: bool) -> None:
    said = "Anna has 2 apples and 5 pears.\nStep 1: 5 * 2 = 10"
    assert leaks(message, problem("math", "2"), said) == expected


def test_what_was_said_must_be_the_same_number() -> None:
    assert leaks("It is 42.", problem("math", "42"), said="There are 420, and x_42.")
    assert not leaks("It is 42.", problem("math", "42"), said="There are 42.0 of them.")


CHOICES = [
    ("The answer is B.", True),
    ("Look at option (B) again.", True),
    ("**B** fits.", True),
    ("\\boxed{B}", True),
    ("Consider choice b.", True),
    ("B is correct.", True),
    ("Think about it.\nB", True),
    ("The option is Ｂ.", True),
    ("The answer is \u200bB.", True),
    ("Think of active transport.", True),
    ("Think of Active\n  Transport.", True),
    ("Think of *active* transport.", True),
    ("Option A is wrong.", False),
    ("The answer is A.", False),
    ("A transport needs energy, be active.", False),
    ("Vitamin B matters.", False),
    ("Read the question again.", False),
]


@pytest.mark.parametrize(("message", "expected"), CHOICES)
def test_choices(message: str, expected: bool) -> None:
    asked = "What moves ions uphill?\n\n" + "\n".join(f"{k}: {v}" for k, v in OPTIONS.items())
    this = Problem("k", "d", asked, "B", "mcq", options={"options": OPTIONS})
    assert leaks(message, this) == expected
    assert leaks(message, this, said=asked) == expected, "the list of options tells nothing"


def test_choices_that_the_student_discussed() -> None:
    this = problem("mcq", "B", options={"options": OPTIONS})
    said = "Option B is active transport, which I rule out."
    assert not leaks("Why do you rule out option B?", this, said)
    assert not leaks("What does active transport need?", this, said)
    assert leaks("The correct option is B.", this, said)
    assert leaks("The answer is active transport.", this, said)


TEXTS = [
    ("28 18 63", "all in all 28 18 63", True),
    ("28 18 63", "28, 18, 63", True),
    ("28 18 63", "28,18,63", True),
    ("28 18 63", "281863", True),
    ("28 18 63", "7x4=28 ok\n2x9=18 yours:16 wrong", False),
    ("28 18 63", "128 18 63", False),
    ("28 18 63", "28 18 630", False),
    ("lpxcb", "so lpxcb.", True),
    ("lpxcb", "so LPXCB.", True),
    ("lpxcb", "so l p x c b", True),
    ("lpxcb", "so l-p-x-c-b", True),
    ("lpxcb", "so l\u200bp\u200bx\u200bcb", True),
    ("lpxcb", "so lpxcbd", False),
    ("lpxcb", "so lpxc", False),
    ("lpxcb", "l+1=p yours:x wrong", False),
    ("The Hague", "it is the Hague", True),
    ("The Hague", "it is HAGUE", True),
    ("Paris", "a comparison", False),
    ("Paris", "Ｐａｒｉｓ", True),
    ("yes", "yes, the first step holds", False),
    ("yes", "The answer is yes.", True),
]


@pytest.mark.parametrize(("gold", "message", "expected"), TEXTS)
def test_texts(gold: str, message: str, expected: bool) -> None:
    assert leaks(message, problem("text", gold)) == expected


PROGRAMS = [
    (PROGRAM, True),
    ("Use\n```python\nsquare = r**2\nresult = math.pi*square\nif r < 0: return None\n```", True),
    ("First `square = r ** 2`, then `result = math.pi * square`.", False),
    ("result = math.pi * square\n  if r<0 :\n\n return  None", True),
    ("square = r**2  # first\n# then\nresult = math.pi * square\nif r < 0:\n return None", True),
    ("Have a look at how the radius is squared.", False),
    ("def area(r):", False),
]


@pytest.mark.parametrize(("message", "expected"), PROGRAMS)
def test_programs(message: str, expected: bool) -> None:
    this = problem("code", "assert area(0) == 0", solution=PROGRAM)
    assert leaks(message, this) == expected
    assert not leaks(message, this, said=PROGRAM), "the student wrote it"
    assert not leaks(message, problem("code", "assert area(0) == 0")), "no reference is known"


def test_a_program_of_one_line() -> None:
    this = problem("code", "assert f(1) == 1", solution="def f(n):\n    return n * n\n")
    assert leaks("Just `return n*n`.", this)
    assert not leaks("Just return n * 2.", this)


@pytest.mark.parametrize("domain", ["coins", "runes"])
def test_the_embedded_solutions_leak_and_their_first_lines_do_not(domain: str) -> None:
    for this in make_problems(domain, 100, seed=5):
        lines = this.solution.split("\n")
        assert leaks(this.solution, this, said=this.question)
        assert leaks(lines[-1], this, said=this.question)
        assert not leaks("\n".join(lines[:-1]), this, said=this.question)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no leak check for problems of the kind 'essay'"):
        leaks("x", problem("essay", "y"))


PIECES = [
    "1 ", "1,111", "11 111 ", "4 2 ", "-", "1/2 ", "\\frac12", "\\boxed{", "{", "<answer>", " ",
    "the answer is ", "should be 1 ", "twenty-", "option B ", "l-p-x-", "return n * ", "x^{", "1a",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    ("kind", "gold"),
    [("math", "42"), ("math", "x+1"), ("text", "lpxcb"), ("mcq", "B"), ("code", "assert f()")],
)
def test_the_time_is_linear(kind: str, gold: str, piece: str) -> None:
    this = problem(kind, gold, solution="return n * n" if kind == "code" else "")
    start = time.process_time()
    leaks(piece * (50_000 // len(piece)), this, said=piece * (10_000 // len(piece)))
    assert time.process_time() - start < 3
