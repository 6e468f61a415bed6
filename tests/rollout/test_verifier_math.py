"""Mathematical, numeric and symbolic answers, judged in this process."""

import pytest

from cotutor.rollout.verifiers import verify
from cotutor.rollout.verifiers.grammar import parse
from cotutor.rollout.verifiers.lexer import GrammarError, LimitError

# gold, text, right
MATH = [
    ("7", r"first \boxed{5}, then \boxed{7}", True),
    ("5", r"first \boxed{5}, then \boxed{7}", False),
    ("3", "so $x = 3$", True),
    ("x=3", "3", True),
    ("3", r"\boxed{x = 1 + 2 = 3}", True),
    ("x=2", "y=2", False),
    ("y = 2x + 1", r"\boxed{2x+1}", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac12", "½", True),
    ("1.5", "1½", True),
    (r"\frac{1}{3}", "0.33", False),
    (r"\frac{1}{3}", "0.333333", True),
    ("5/4", "1 1/4", True),
    (r"2\frac{2}{3}", r"\frac83", True),
    ("1234567", "1,234,567", True),
    ("1234567", r"1{,}234{,}567", True),
    ("1234567", r"1\,234\,567", True),
    ("32349", "32, 349", False),
    ("50%", "0.5", True),
    ("50%", "50", True),
    ("50%", "51%", False),
    ("-3", "−3", True),
    ("3", "-3", False),
    ("90", r"90^\circ", True),
    (r"\sin 30^\circ", r"\frac12", True),
    ("15 cm", r"15\text{ cm}", True),
    ("15", "15 centimeters", True),
    ("15 cm", "15 km", False),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}", True),
    (r"\pm 5", "5", False),
    (r"\{1,2,3\}", r"\{3,1,2\}", True),
    (r"\{1,2,3\}", r"\{1,2\}", False),
    ("(1,2)", "(2,1)", False),
    ("(1,2)", r"\left( 1, \frac42 \right)", True),
    ("[0,1)", "[0, 1)", True),
    ("[0,1)", "(0,1)", False),
    (r"(-\infty,-8)\cup(8,\infty)", r"(8,\infty) \cup (-\infty,-8)", True),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
        True,
    ),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", False),
    (r"x^2/4 + y^2/3 = 1", "3x^2 + 4y^2 = 12", True),
    ("3x+4y+14=0", "3x-y+13=0", False),
    ("x < 1", "-x > -1", True),
    ("x < 1", r"x \le 1", False),
    ("x^2+2x+1", "(1+x)^2", True),
    ("x^2+2x+1", "x^2+2x+2", False),
    (r"\sec^2 y", r"1+\tan^2 y", True),
    ("|x|", "x", False),
    (r"\sqrt{8}", r"2\sqrt2", True),
    ("2", r"\frac{1+\sqrt5}{2}", False),
    ("11:21", "22:42", True),
    (r"0.\overline{3}", r"\frac13", True),
    ("p=5,q=2;p=7,q=2", "(5,2),(7,2)", True),
    ("1,2", r"\boxed{2} and \boxed{1}", True),
    ("2", r"\boxed{1} and \boxed{2}", True),
    (r"\text{Even}", "even", True),
    ("12_5", "12_{5}", True),
    (r"\sqrt\pi/2", r"\int_0^\infty e^{-x^2}\,dx", True),
    ("1/4", r"\int_0^1 \int_0^1 xy\,dx\,dy", True),
    ("2^{100}+1", "2^{100}", False),
    ("262537412640768744", r"e^{\pi\sqrt{163}}", False),
    (r"1, 2, \ldots, n", r"1, 3, \ldots, 2n-1", False),
    ("f(x)=0", r"\forall x>0, f(x)=0", False),
    ("42", "<think>\\boxed{42}</think> \\boxed{41}", False),
    ("42", "<answer>41</answer> no: 42", False),
]


@pytest.mark.parametrize(("gold", "text", "right"), MATH)
def test_mathematics(gold: str, text: str, right: bool) -> None:
    assert verify("math", gold, text).status == ("right" if right else "wrong")


@pytest.mark.parametrize("text", ["", "   ", "I do not know.", "<think>42", r"\boxed{}"])
def test_nothing_stated(text: str) -> None:
    assert verify("math", "42", text).status == "no_answer"


def test_precision_is_in_decimals() -> None:
    assert verify("math", r"\frac13", "0.33", precision=2).correct
    assert not verify("math", r"\frac13", "0.32", precision=2).correct


HOSTILE = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    "1000000!",
    "(" * 3000 + "1" + ")" * 3000,
    r"\sqrt{" * 500 + "2" + "}" * 500,
    r"\frac{" * 2000,
    "-" * 3000 + "1",
    "*".join(["x"] * 700),
    "x" * 20_000,
    "1" * 50_000,
    "(x+1)^{100000}",
    r"\binom{1000000}{500000}",
    r"\sum_{k=1}^{10^9} k",
    r"\Gamma(10^{30})",
    "|" * 1000,
    "1," * 2000 + "1",
    "__import__('os').system('touch pwned')",
    "().__class__.__bases__[0].__subclasses__()",
]


# hypothesis watches the garbage collector, and a budget that ends just there is reported by Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("answer", HOSTILE, ids=lambda a: a[:20])
@pytest.mark.parametrize("kind", ["math", "expression", "numeric"])
def test_hostile_answers_are_never_right(kind: str, answer: str) -> None:
    for text in (answer, rf"\boxed{{{answer}}}", f"The answer is {answer}"):
        assert verify(kind, "7", text).status in ("wrong", "no_answer", "undecided")


def test_grammar_refuses_and_limits() -> None:
    for text in ("a.b", "x @ y", "'x'", r"\write18{ls}", "[1"):
        with pytest.raises(GrammarError):
            parse(text)
    with pytest.raises(LimitError, match="nested"):
        parse("(" * 60 + "1" + ")" * 60)
    with pytest.raises(LimitError, match="characters"):
        parse("1+" * 3000 + "1")


NUMBERS = [
    ("3", "The answer is $3.00", {}, True),
    ("1234.5", "1,234.5", {}, True),
    ("0.5", "50%", {}, True),
    ("6.02e23", r"6.02 \times 10^{23}", {}, True),
    ("-0.5", "got -½ as the result", {}, True),
    ("293", "Answer: m+n = 256+37 = 293", {}, True),
    ("256", "Answer: m+n = 256+37 = 293", {}, False),
    ("1000", "-(1,000)", {}, False),
    ("-1000", "-(1,000)", {}, True),
    ("5/6", "1/2 + 1/3", {}, True),
    ("7", "7.07", {}, False),
    ("7", "7.07", {"rel_tol": 0.011}, True),
    ("7", "7.07", {"abs_tol": 0.1}, True),
    ("7", "7 and then 8", {}, False),
    ("7", "7 and then 8", {"location": "any"}, True),
    ("26", "3 eggs at $2\nA: 26", {}, True),
]


@pytest.mark.parametrize(("gold", "text", "options", "right"), NUMBERS)
def test_numbers(gold: str, text: str, options: dict[str, object], right: bool) -> None:
    assert verify("numeric", gold, text, **options).correct == right


def test_numeric_options_are_checked() -> None:
    assert verify("numeric", "7", "no number").status == "no_answer"
    with pytest.raises(ValueError, match="location"):
        verify("numeric", "7", "7", location="middle")
    with pytest.raises(ValueError, match="negative"):
        verify("numeric", "7", "7", rel_tol=-1.0)


LAYERS = "exp(-(x + 1)/epsilon) + exp((x - 1)/epsilon)"
STEP = "Integral(exp(-t**2)*sin(x*t), (t, 0, 1))"
EXPRESSIONS = [
    (LAYERS, "exp((x - 1)/epsilon) + exp(-(1 + x)/epsilon)", "right"),
    (LAYERS, r"$$e^{-\frac{x+1}{\epsilon}} + e^{\frac{x-1}{\epsilon}}$$", "right"),
    (LAYERS, r"\boxed{2e^{-1/\varepsilon}\cosh(x/\varepsilon)}", "right"),
    (LAYERS, "u(x) = exp(-(x + 1)/epsilon) + exp((x - 1)/epsilon)", "right"),
    (LAYERS, "exp(-(x + 1)/epsilon)", "wrong"),
    (LAYERS, "1.01*exp(-(x + 1)/epsilon) + exp((x - 1)/epsilon)", "wrong"),
    (LAYERS, "exp(-(x + 1)/epsilon) - exp((x - 1)/epsilon)", "wrong"),
    ("erf(x/sqrt(2))", r"\boxed{\frac{2}{\sqrt\pi}\int_0^{x/\sqrt2} e^{-t^2}\,dt}", "right"),
    ("erf(x)", r"\boxed{1-\operatorname{erfc}(x)}", "right"),
    (STEP, "Integral(sin(x*s)*exp(-s**2), (s, 0, 1))", "right"),
    (STEP, "Integral(cos(x*s)*exp(-s**2), (s, 0, 1))", "wrong"),
    ("Piecewise((0, x < 0), (x, True))", "x*Heaviside(x)", "right"),
    ("Abs(x)", "sqrt(x**2)", "right"),
    ("Abs(x)", "x", "wrong"),
    ("sin(x)**2", "1 - cos(x)**2", "right"),
    ("gamma(x + 1)", "factorial(x)", "right"),
    ("besselj(0, x)", "besselj(1, x)", "wrong"),
    ("sqrt(2)*x", "x", "wrong"),
    ("x", "nothing to see", "no_answer"),
]


@pytest.mark.parametrize(("gold", "text", "status"), EXPRESSIONS)
def test_expressions(gold: str, text: str, status: str) -> None:
    assert verify("expression", gold, text).status == status


def test_a_term_that_vanishes_inside_the_domain_still_counts() -> None:
    domain = {"x": [0, 1], "epsilon": [0.001, 0.01]}
    assert verify("expression", "1+exp(-x/epsilon)", "1", domain=domain).status == "wrong"


def test_what_no_step_decides_is_undecided() -> None:
    # Real at no point that is tried, and nothing to simplify.
    gold, text = "log(-1 - x**2)", "log(-1 - x**2) + besselj(0, sqrt(-1 - x**2))"
    assert verify("expression", gold, text, simplify_s=0.2).status == "undecided"


def test_value_at_stated_parameters() -> None:
    options = {"parameters": {"x": 2.0}}
    assert verify("expression", "0.5+0.25j", r"\boxed{\frac12+\frac{ix}{8}}", **options).correct
    assert not verify("expression", "0.5+0.25j", r"\boxed{\frac12+\frac{ix}{4}}", **options).correct


def test_domains_are_checked() -> None:
    with pytest.raises(ValueError, match="domain of x"):
        verify("expression", "x", "x", domain={"x": [1, 0]})


def test_unknown_kinds_and_options() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        verify("maths", "1", "1")
    with pytest.raises(TypeError):
        verify("math", "1", "1", tolerance=1)
    with pytest.raises(ValueError, match="empty"):
        verify("math", " ", "1")
