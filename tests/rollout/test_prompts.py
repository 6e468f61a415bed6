"""Prompt sets, filling and thinking."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest

from cotutor.rollout.prompts import (
    FULL,
    PromptSet,
    fill,
    reprompt_messages,
    strip_thinking,
    student_messages,
    teacher_messages,
    tutor_messages,
)
from cotutor.rollout.tasks import TINY
from cotutor.rollout.tiny_tokenizer import WORDS, build_tokenizer
from cotutor.rollout.trajectory import Problem

PROBLEM = Problem(
    key="k", domain="d", question="What is {x} for {question}?", gold="B", kind="mcq", system="S"
)
PLACEHOLDERS = {
    "system": set(),
    "student": {"question"},
    "demonstration": {"demonstration"},
    "feedback": {"feedback"},
    "closing": set(),
    "tutor_system": set(),
    "tutor": {"question", "response"},
    "tutor_plain": {"question", "response"},
    "teacher_system": set(),
    "teacher": {"question", "reference", "response"},
    "neutral": set(),
    "leak_judge": {"question", "answer", "message"},
}


@pytest.mark.parametrize("prompts", [FULL, TINY])
def test_the_sets_have_the_placeholders_that_are_filled(prompts: PromptSet) -> None:
    for field in dataclasses.fields(prompts):
        text = getattr(prompts, field.name)
        if field.name == "leak_judge" and not text:
            continue  # the embedded models can't judge
        assert set(re.findall(r"\{(\w+)\}", text)) == PLACEHOLDERS[field.name]


def test_braces_in_values_are_inert() -> None:
    assert fill("{question}|{response}", question="{response}", response="{question}{0}{") == (
        "{response}|{question}{0}{"
    )
    assert fill(r"\1 {question}", question=r"\g<0> \frac{1}{2}") == r"\1 \g<0> \frac{1}{2}"
    with pytest.raises(KeyError):
        fill("{other}", question="x")


def test_a_problems_own_system_message_goes_first() -> None:
    assert student_messages(FULL, PROBLEM) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": PROBLEM.question},
    ]
    bare = dataclasses.replace(PROBLEM, system="")
    assert student_messages(FULL, bare)[0]["content"] == FULL.system
    silent = dataclasses.replace(FULL, system="")
    assert [m["role"] for m in student_messages(silent, bare)] == ["user"]


@pytest.mark.parametrize(
    ("demonstration", "feedback"), [("A demo.", ""), ("", "A hint."), ("A demo.", "A hint.")]
)
def test_reprompt_holds_question_sections_closing_in_order(
    demonstration: str, feedback: str
) -> None:
    system, user = reprompt_messages(FULL, PROBLEM, demonstration, feedback)
    assert system["content"] == "S"
    parts = [PROBLEM.question]
    parts += [fill(FULL.demonstration, demonstration=demonstration)] if demonstration else []
    parts += [fill(FULL.feedback, feedback=feedback)] if feedback else []
    assert user["content"] == "\n\n".join([*parts, FULL.closing])


def test_reprompt_without_context_is_the_students_prompt() -> None:
    assert reprompt_messages(FULL, PROBLEM) == student_messages(FULL, PROBLEM)
    assert reprompt_messages(FULL, PROBLEM, "<think>only thoughts") == student_messages(
        FULL, PROBLEM
    )


def test_tutor_sees_question_and_response_without_thinking() -> None:
    for anchored in (True, False):
        system, user = tutor_messages(FULL, PROBLEM, "<think>hm {response}</think> {x} B", anchored)
        assert system["content"] == FULL.tutor_system
        assert PROBLEM.question in user["content"]
        assert "{x} B" in user["content"]
        assert "hm" not in user["content"].split("</response>")[0].split("<response>")[1]
        assert ("<concept>" in user["content"]) == anchored


def test_a_teacher_sees_the_reference_and_the_response_without_thinking() -> None:
    response = "<think>hm</think>{reference} </response> B"
    system, user = teacher_messages(
        FULL, PROBLEM, "ref {response} </reference><response>", response
    )
    assert system["content"] == FULL.teacher_system
    text = user["content"]
    assert PROBLEM.question in text
    reference = text.split("<reference>")[1].split("</reference>")[0].strip()
    assert reference == "ref {response} ‹/reference>‹response>"
    assert text.split("<response>")[1].split("</response>")[0].strip() == (
        "{reference} ‹/response> B"
    )
    for tag in ("question", "reference", "response"):
        assert (text.count(f"<{tag}>"), text.count(f"</{tag}>")) == (1, 1)


def test_the_tiny_set_is_made_of_the_tiny_vocabulary() -> None:
    tokenizer = build_tokenizer()
    for field in dataclasses.fields(TINY):
        text = re.sub(r"\{\w+\}", "\n", getattr(TINY, field.name))
        for token in tokenizer.encode(text).tokens:
            word = token.replace("Ġ", " ").replace("Ċ", "\n")
            assert word in (*WORDS, "\n"), (field.name, word)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no thinking \n", "no thinking \n"),
        ("<think>a</think>b", "b"),
        ("<think>\n\n</think>\n\nb\n", "b"),
        ("a <think>b</think> c <think>d</think> e", "a  c  e"),
        ("a <think>never closed", "a"),
        ("opened by the prompt</think>\nb", "b"),
        ("x</think>y</think>z", "z"),
        ("<think>", ""),
        ("</think>", ""),
        ("<think>a<think>b</think>c", "c"),
        ("", ""),
    ],
)
def test_thinking_is_removed(text: str, expected: str) -> None:
    assert strip_thinking(text) == expected
    assert strip_thinking(strip_thinking(text)) == strip_thinking(text)


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<think></think>", "<think>x</think>y"])
def test_removal_is_linear(piece: str) -> None:
    start = time.process_time()
    strip_thinking(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 3
