"""A tutor's words before a student's teacher sees them: thinking out, answers out, anchor checked."""

from __future__ import annotations


def sanitise(text: str) -> tuple[str, int]:
    """Return the text without revealed answers, and how many were removed."""
    raise NotImplementedError


def judge_feedback(raw: str, question: str, anchored: bool = True) -> tuple[str, str, int]:
    """Return (text to show, outcome, revealed answers removed); the text is "" unless it is kept."""
    raise NotImplementedError
