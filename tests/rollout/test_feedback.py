"""Sanitiser and filter of a tutor's feedback."""

from __future__ import annotations

import time

import pytest

from cotutor.rollout.feedback import judge_feedback, sanitise

REVEALED = [  # (text, what must be gone)
    ("So we get \\boxed{B}.", "B"),
    ("Hence $\\boxed{\\text{(C)}}$ follows.", "C"),
    ("\\boxed{\\textbf{D}}", "D"),
    ("\\boxed{ A. }", "A"),
    ("Have a look at **B** again.", "B"),
    ("It must be **(C)**, clearly.", "C"),
    ("**D.** fits the data.", "D"),
    ("<b>B</b> fits.", "B"),
    ("__C__ fits.", "C"),
    ("Final answer: B", "B"),
    ("final answer: (b).", "b"),
    ("The final answer is C, as shown.", "C"),
    ("**Final Answer:** D", "D"),
    ("Final answer: 42", "42"),
    ("The final answer is $3.2 \\times 10^5$ J.", "3.2"),
    ("Final answer: lpxcb", "lpxcb"),
    ("The final result should be 56 pC", "56"),
    ("The correct option is B.", "B"),
    ("the correct answer is: option D", "D"),
    ("The correct answer is therefore A because the charge is small.", "A"),
    ("the correct choice here is (C)", "C"),
    ("The right answer to this question is D.", "D"),
    ("The best choice would be B", "B"),
    ("The correct answer (B) follows from the formula.", "B"),
    ("correct option, B, needs the second step.", "B"),
    ("The correct answer should be 56 pC.", "56"),
    ("The answer is B.", "B"),
    ("Answer: C", "C"),
    ('the answer to the question is "D"', "D"),
    ("Your answer should be B.", "B"),
    ("The answer must be Ｂ.", "Ｂ"),
    ("Option B is correct.", "B"),
    ("I think C is the correct answer.", "C"),
    ("Thus (D) is right.", "D"),
    ("The peer chose B, which is correct.", "B"),
    ("A is the best answer", "A"),
    ("You should have chosen C here.", "C"),
    ("Choose option B instead.", "B"),
    ("Redo step 2. Select D.", "D"),
    ("One must pick (A).", "A"),
    ("Therefore, B.", "B"),
    ("so it is option C.", "C"),
    ("The correct value corresponds to option B.", "B"),
    ("the result matches option D", "D"),
    ("<answer>B</answer>", "B"),
    ("<answer>\n12 8 20\n</answer>", "12"),
    ("The solution is\nB", "B"),
]

UNTOUCHED = [
    "Step 2 gives \\boxed{5}, which has the wrong unit.",
    "You boxed \\boxed{3.2 \\times 10^5} without units.",
    "Option B is considered in step 2, but its sign is never checked.",
    "You compare A and B without computing either.",
    "In step 3 the peer rules out option C by its units.",
    "Your final answer is B, but step 2 contradicts it.",
    "The student's answer was C although the energy is conserved.",
    "The answer is a vector, so it needs a direction.",
    "The answer is wrong because the charge was squared.",
    "The final answer is not justified: the second term is missing.",
    "The correct answer is not B.",
    "The correct approach is to use the field E at distance r.",
    "Step A is correct, step B is not.",
    "Part B is right about the sign.",
    "Why did you select B without a derivation?",
    "You chose option D after step 4.",
    "Vitamin C is the right concept, but the mechanism is missing.",
    "**Step 1** is right, **step 3** is not.",
    "7x4 ok\n6x4 wrong: 6x4=24",
    "all ok",
    "Final answer: missing",
    "Is the answer plausible? Check the units.",
    "The value 0.5 in the answer is too small.",
    "",
]


@pytest.mark.parametrize(("text", "secret"), REVEALED)
def test_sanitiser_removes_the_answer(text: str, secret: str) -> None:
    clean, removed = sanitise(text)
    assert secret not in clean
    assert removed >= 1
    assert sanitise(clean) == (clean, 0)


@pytest.mark.parametrize("text", UNTOUCHED)
def test_sanitiser_leaves_the_rest(text: str) -> None:
    assert sanitise(text) == (text, 0)


def test_sanitiser_keeps_what_surrounds_and_counts() -> None:
    text = "Step 1 is right. The correct option is B. Step 3 lacks the unit, so \\boxed{B} is late."
    clean, removed = sanitise(text)
    assert removed == 2
    assert clean == "Step 1 is right. . Step 3 lacks the unit, so is late."


HOSTILE = [
    "the correct answer ", "final answer is ", "**", "\\boxed{", "\\boxed{\\text{", " ", "\n", "A ",
    "answer to the the the the the the ", "correct ((((", "<answer>", "so it is ", "B, which ",
    "correct a b c d e f matches ", "$", '"', "is:", "(", "should have ", "right word word ",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_sanitiser_is_linear_on_hostile_text(piece: str) -> None:
    def seconds(n_chars: int) -> float:
        text = piece * (n_chars // len(piece))
        start = time.process_time()
        judge_feedback(text + "x", "question")
        return time.process_time() - start

    assert seconds(100_000) < 1.5  # 1 MB takes ten times as long; a quadratic pattern minutes


QUESTION = "What is the magnitude of the particle's charge?\n\nA: 50 pC\nB: 56 pC"


@pytest.mark.parametrize(
    ("raw", "outcome", "text"),
    [
        ("<concept>charge</concept> Step 1 is right.", "match:charge", "Step 1 is right."),
        ("<concept>Particle</concept>\nStep 2 fails.", "match:particle", "Step 2 fails."),
        ("<concept>electric charge</concept>Look.", "match:charge", "Look."),
        ("<concept>value of the charge</concept>Look.", "match:charge", "Look."),
        ("<CONCEPT> magnitude </CONCEPT> Look.", "match:magnitude", "Look."),
        (
            "<think>so <concept>x</concept></think><concept>charge</concept> Look.",
            "match:charge",
            "Look.",
        ),
        ("<concept>charge</concept> The answer is B. Redo it.", "match:charge", ". Redo it."),
        ("Step 1 is right.", "no_concept_tag", ""),
        ("<concept>charge Step 1 is right.", "no_concept_tag", ""),
        ("charge</concept> Step 1 is right.", "no_concept_tag", ""),
        ("<concept><concept>charge</concept", "no_concept_tag", ""),
        ("<concept></concept> Step 1 is right.", "empty", ""),
        ("<concept> ** </concept> Step 1 is right.", "empty", ""),
        ("<concept>charge</concept>", "empty", ""),
        ("<concept>charge</concept> .", "empty", ""),
        ("<think>nothing but thoughts", "empty", ""),
        ("<concept>charge</concept> \\boxed{B}", "empty", ""),
        ("<concept>question</concept> Look.", "all_generic", ""),
        ("<concept>the answer of the student</concept> Look.", "all_generic", ""),
        ("<concept>B</concept> Look.", "all_generic", ""),
        ("<concept>56</concept> Look.", "all_generic", ""),
        ("<concept>entropy</concept> Look.", "no_match", ""),
        ("<concept>charges</concept> Look.", "no_match", ""),
        ("<concept>arge</concept> Look.", "no_match", ""),
        ("", "fb_none", ""),
        (" \n", "fb_none", ""),
    ],
)
def test_anchor_filter(raw: str, outcome: str, text: str) -> None:
    shown, got, _ = judge_feedback(raw, QUESTION)
    assert (got, shown) == (outcome, text)


def test_revealed_answers_are_counted_before_the_tag_is_stripped() -> None:
    raw = "<concept>**B**</concept> The correct option is B, look at the charge."
    assert judge_feedback(raw, QUESTION) == ("", "empty", 2)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("Step 1 is right.", ("Step 1 is right.", "plain", 0)),
        ("<think>hm</think>Step 1 is right. Answer: B", ("Step 1 is right.", "plain", 1)),
        ("Answer: B", ("", "empty", 1)),
        ("", ("", "fb_none", 0)),
    ],
)
def test_plain_feedback(raw: str, expected: tuple[str, str, int]) -> None:
    assert judge_feedback(raw, QUESTION, anchored=False) == expected


@pytest.mark.parametrize(
    "piece", ["<concept>", "</concept>", "<concept>a</concept>", "<think>", "</think>"]
)
def test_filter_is_linear_on_hostile_text(piece: str) -> None:
    start = time.process_time()
    judge_feedback(piece * (200_000 // len(piece)), QUESTION)
    assert time.process_time() - start < 4
