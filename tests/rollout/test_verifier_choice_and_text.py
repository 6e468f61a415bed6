"""Multiple-choice and text answers."""

import pytest

from cotutor.rollout.verifiers import VerifierPool, verify
from cotutor.rollout.verifiers.plain_text import extract

# Rows: text, the letters read ("" = no answer). Four options A to D.
CHOICES = [
    ("<answer>**A**</answer>", "A"),
    ("(A)", "A"),
    ("A.", "A"),
    ("Ａ", "A"),
    ("A: text", "A"),
    ("A\r\n", "A"),
    ("The answer is B because a car moves.", "B"),
    ("<answer>A B C D</answer>", "A,B,C,D"),
    ("<answer>A or B or C</answer>", "A,B,C"),
    ("Answer: B/C", "B,C"),
    ("The answer is A.", "A"),
    ("The answer is a car.", ""),
    ("Answer: A car", ""),
    ("I think it might be a B or C", ""),
    ("Answer:\n\n**(C)**", "C"),
    ("**Final Answer**: $\\boxed{\\text{(D)}}$", "D"),
    ("The answer is not A but B.", "B"),
    ("The answer is not A.", ""),
    ("So the correct option is (c).", "C"),
    ("<think>The answer is A</think>B", "B"),
    ("<think>The answer is A", ""),
    ("thought without an opening tag: the answer is A</think> The answer is C.", "C"),
    ("<reasoning>the answer is A</reasoning>\n<answer>\nB\n</answer>", "B"),
    ("<answer>B</answer> no, <answer>C</answer>", "C"),
    ("ANSWER: C\nANSWER: D", "D"),
    ("<answer></answer> The answer is B.", ""),
    ("b", "B"),
    ("it is a", ""),
    ("B, because of C.", ""),
    ("Option C is correct.", "C"),
    ("A and B fail; I cannot tell.", ""),
    ("<answer>C because of X</answer>", "C"),
    ("<answer>A car moves</answer>", ""),
    ("The best option is therefore C.", "C"),
    ("The answer is 'C'.", "C"),
    ("The answer is both A and C.", "A,C"),
    ("The answer is neither A nor B but C.", "C"),
    ("The answer is C. Wait, the answer is D.", "D"),
    ("<answer>C</answer> The answer is D.", "C"),
    ("A: 1\nB: 2\nC: 3\nD: 4", ""),
    ("正确答案是 C。", "C"),
    ("Vitamin C is the answer.", ""),
    ("\\boxed{\\textbf{(C)}\\ 3.0}", "C"),
    ("x" * 200_000 + "\n<answer>A</answer>", "A"),
]


@pytest.mark.parametrize(("text", "letters"), CHOICES)
def test_stated_letters(text: str, letters: str) -> None:
    verdicts = {gold: verify("mcq", gold, text, options="ABCD") for gold in "ABCD"}
    for gold, verdict in verdicts.items():
        assert (verdict.extracted or "") == letters
        assert verdict.correct == (letters == gold)
        assert verdict.status == (
            "no_answer" if not letters else "right" if letters == gold else "wrong"
        )


OPTIONS = {"A": "2.0 m", "B": "3.0 m", "C": "$x^2$", "D": "the blue one"}


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("<answer>3.0 m</answer>", "B"),
        ("The blue one.", "D"),
        ("The answer is the blue one.", "D"),
        ("<answer>$x^2$</answer>", "C"),
        ("\\boxed{3.0\\text{ m}}", "B"),
        ("<answer>B: 3.0 m</answer>", "B"),
        ("<answer>B: 2.0 m</answer>", "A,B"),
    ],
)
def test_option_texts(text: str, letters: str) -> None:
    assert verify("mcq", "B", text, options=OPTIONS).extracted == letters


def test_two_options_of_one_row_are_all_there_is() -> None:
    assert verify("mcq", "B", "The answer is B.", options="AB").correct
    assert verify("mcq", "B", "The answer is C.", options="AB").status == "no_answer"


def test_letter_with_the_gold_options_text_is_right() -> None:
    options = {"A": "7.3", "B": "7.30", "C": "7.3"}
    assert verify("mcq", "A", "<answer>C</answer>", options=options).correct
    assert not verify("mcq", "A", "<answer>B</answer>", options=options).correct


def test_several_right_letters() -> None:
    assert verify("mcq", "ABC", "ANSWER: A, B, and C").correct
    assert not verify("mcq", "AB", "ANSWER: A").correct


@pytest.mark.parametrize(
    ("gold", "options"), [("E", "ABCD"), ("", "AB"), ("A", "A"), ("A", {"1": "x"})]
)
def test_impossible_questions_are_errors(gold: str, options: object) -> None:
    with pytest.raises(ValueError, match=r"gold|options"):
        verify("mcq", gold, "A", options=options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: 42%", "42%"),
        ("回答：100百万円", "100百万円"),
        ("line one\nline two", "line two"),
        ("ANSWER: No\nOn reflection …\nANSWER: Yes", "Yes"),
        ("ANSWER:\nA new line", "A new line"),
        ("<think>Answer: 1</think><answer> 2 </answer> 3", "2"),
        ("<think>thinking …", None),
        ("", None),
    ],
)
def test_stated_text(text: str, said: str | None) -> None:
    assert extract(text) == said


def test_required_tag() -> None:
    assert verify("text", "42", "42", tag="answer").status == "no_answer"
    assert verify("text", "42", "no <answer>42</answer>", tag="answer").correct
    assert verify("text", "42", "<move>42</move> <answer>1</answer>", tag="move").correct


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("hello world", "  Hello,\tWORLD! ", True),
        ("elephant", "The elephant", True),
        ("3.5", "35", False),
        ("-5", "5", False),
        ("1,000", "1 000", False),
        ("C++", "C", False),
        ("yes", "**Yes.**", True),
        ("cat", "cats", False),
    ],
)
def test_normalised_comparison(gold: str, text: str, right: bool) -> None:
    assert verify("text", gold, text).correct == right


def test_pool_judges_in_order_and_reports_impossible_rows() -> None:
    with VerifierPool(workers=1, timeout_s=5) as pool:
        verdicts = pool.verify_many(
            [("mcq", "B", "B", {}), ("text", "x", "y", {}), ("mcq", "E", "A", {"options": "AB"})]
        )
    assert [v.status for v in verdicts] == ["right", "wrong", "error"]
    assert "gold" in verdicts[2].detail
