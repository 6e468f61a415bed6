"""Every word that a model reads and that no model wrote: prompt sets and how they are filled in."""

from __future__ import annotations

from dataclasses import dataclass

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclass(frozen=True)
class PromptSet:
    """The texts around a question. Placeholders in braces are replaced in one pass, never nested."""

    system: str  # the student's system message when the problem has none; "" for no message
    student: str  # {question}
    demonstration: str  # section of the reprompt: {demonstration}
    feedback: str  # section of the reprompt: {feedback}
    closing: str  # closing instruction of the reprompt
    tutor_system: str
    tutor: str  # anchored feedback: {question} {response}
    tutor_plain: str  # feedback without a concept tag: {question} {response}
