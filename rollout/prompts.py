"""Every word that a model reads and that no model wrote: prompt sets and how they are filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cotutor.rollout.trajectory import Problem

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

_THINK_TAG = re.compile(r"<(/?)think>")
# The tags around what is quoted to a tutor or teacher: a quoted text must not close or open them.
_BLOCK_TAG = re.compile(r"<(?=/?(?:response|question|reference|message)>)")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class PromptSet:
    """The texts around a question. Placeholders in braces are replaced in one pass, never nested.

    The reprompt is the question, the sections that have something to say, and the closing
    instruction, with an empty line between them.
    """

    system: str  # the student's system message when the problem has none; "" for no message
    student: str  # {question}
    demonstration: str  # section of the reprompt: {demonstration}
    feedback: str  # section of the reprompt: {feedback}
    closing: str  # closing instruction of the reprompt
    tutor_system: str
    tutor: str  # anchored feedback: {question} {response}
    tutor_plain: str  # feedback without a concept tag: {question} {response}
    teacher_system: str
    teacher: str  # guidance of a teacher who knows a reference: {question} {reference} {response}
    neutral: str  # what the student is told when the teacher's guidance reveals the answer
    leak_judge: str  # asks for yes or no: {question} {answer} {message}; "" where it isn't offered


_TUTOR_QUESTION = """\
A peer was asked this question:

<question>
{question}
</question>

The peer wrote:

<response>
{response}
</response>

"""

FULL = PromptSet(
    system=(
        "Solve the problem step by step. Then put the final answer alone, without its derivation, "
        "between <answer> and </answer>."
    ),
    student="{question}",
    demonstration=(
        "One attempt at this question that was checked and found right:\n\n{demonstration}"
    ),
    feedback="Comments of a peer on an earlier attempt at this question:\n\n{feedback}",
    closing=(
        "Now solve the question yourself, from the beginning, in your own words and in the "
        "required format. Do not mention the attempt or the comments above."
    ),
    tutor_system=(
        "You review a peer's work on questions of your field. You help the peer to find out where "
        "the reasoning holds and where it breaks, and leave the answer to the peer."
    ),
    tutor=_TUTOR_QUESTION
    + (
        "Begin with the one technical term on which this question turns. Copy it word for word "
        "from the question, between <concept> and </concept>.\n"
        "Then write three to five sentences, about 80 words in all. Point to particular steps of "
        "the response; say which are right, and which are wrong or missing and why. Never state "
        "the answer: name neither an option's letter nor the final value."
    ),
    tutor_plain=_TUTOR_QUESTION
    + (
        "Write three to five sentences, about 80 words in all. Point to particular steps of the "
        "response; say which are right, and which are wrong or missing and why. Never state the "
        "answer: name neither an option's letter nor the final value."
    ),
    teacher_system=(
        "You guide a student who has not solved a problem yet. You know more than the student, and "
        "you use it to see where the student goes astray, never to hand over the result."
    ),
    teacher=(
        "A student is working on this problem:\n\n<question>\n{question}\n</question>\n\n"
        "Only you can see this, a worked solution or what happened when the student's program was "
        "tested:\n\n<reference>\n{reference}\n</reference>\n\n"
        "The student's latest attempt, which is not right:\n\n"
        "<response>\n{response}\n</response>\n\n"
        "Write two to four sentences to the student. Find the first step of the attempt that goes "
        "wrong, say what is wrong with it, and ask a question or give a hint that leads past it. "
        "The student must find the answer alone: do not state it, do not write down the steps or "
        "the program that are missing, and do not mention that you have seen anything but the "
        "attempt."
    ),
    neutral=(
        "This attempt is not right yet. Compare each of its steps with the problem, find the first "
        "one that does not follow, and solve the problem again from there."
    ),
    leak_judge=(
        "<question>\n{question}\n</question>\n\nIts answer, which a student has to find:\n\n"
        "<reference>\n{answer}\n</reference>\n\nA teacher told the student:\n\n"
        "<message>\n{message}\n</message>\n\n"
        "Could the student now write down the answer without any further work? Say yes or no."
    ),
)


# A programming problem with the tests that its reader may see: {question} {tests}.
SHOWN_TESTS = (
    "{question}\n\nWrite it in Python. The program will be tested like this:\n\n"
    "```python\n{tests}\n```"
)


def fill(template: str, **values: str) -> str:
    """Replace `{name}` by `values["name"]`, in one pass: braces in a value stay as they are.

    Raises:
        KeyError: the template has a placeholder of another name.
    """
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def strip_thinking(text: str) -> str:
    """Return the text without its `<think>…</think>` parts and the white space around it.

    A part that is never closed reaches to the end; one that is only closed (the prompt opened it)
    begins at the start. A text without such parts comes back as it is.
    """
    kept: list[str] = []
    position, inside = 0, False
    for tag in _THINK_TAG.finditer(text):
        if tag[1]:
            if not inside:
                kept.clear()
            position, inside = tag.end(), False
        elif not inside:
            kept.append(text[position : tag.start()])
            position, inside = tag.end(), True
    if position == 0:
        return text
    if not inside:
        kept.append(text[position:])
    return "".join(kept).strip()


def student_messages(prompts: PromptSet, problem: Problem) -> list[Message]:
    """The messages that ask the student; the problem's own system message goes before the set's."""
    return _messages(
        problem.system or prompts.system, fill(prompts.student, question=problem.question)
    )


def reprompt_messages(
    prompts: PromptSet, problem: Problem, demonstration: str = "", feedback: str = ""
) -> list[Message]:
    """The messages under which the self-teacher scores a response.

    Without a demonstration and without feedback there is nothing to add: these are the student's.
    Thinking is removed from the demonstration.
    """
    demonstration = strip_thinking(demonstration)
    parts = [fill(prompts.student, question=problem.question)]
    if demonstration:
        parts.append(fill(prompts.demonstration, demonstration=demonstration))
    if feedback:
        parts.append(fill(prompts.feedback, feedback=feedback))
    if len(parts) > 1:
        parts.append(prompts.closing)
    return _messages(problem.system or prompts.system, "\n\n".join(parts))


def tutor_messages(
    prompts: PromptSet, problem: Problem, response: str, anchored: bool = True
) -> list[Message]:
    """The messages that ask a tutor for feedback on a response, its thinking removed.

    Tags of the response that would close or open the prompt's own blocks are broken.
    """
    template = prompts.tutor if anchored else prompts.tutor_plain
    response = _quoted(strip_thinking(response))
    return _messages(
        prompts.tutor_system, fill(template, question=problem.question, response=response)
    )


def teacher_messages(
    prompts: PromptSet, problem: Problem, reference: str, response: str
) -> list[Message]:
    """The messages that ask a teacher for guidance on a response, its thinking removed.

    Args:
        prompts: the texts around what is quoted.
        problem: what the student was asked.
        reference: what only the teacher knows: a worked solution, or the output of hidden tests.
        response: the student's latest turn.

    Tags of the response or the reference (a program under test prints what it likes) that would
    close or open the prompt's own blocks are broken.
    """
    quoted = {"reference": _quoted(reference), "response": _quoted(strip_thinking(response))}
    user = fill(prompts.teacher, question=problem.question, **quoted)
    return _messages(prompts.teacher_system, user)


def leak_judge_messages(
    prompts: PromptSet, problem: Problem, answer: str, message: str
) -> list[Message]:
    """The messages that ask whether a teacher's message gives the answer away."""
    values = {"question": problem.question, "answer": answer, "message": _quoted(message)}
    return _messages("", fill(prompts.leak_judge, **values))


def _quoted(text: str) -> str:
    """A text whose tags can't close or open the prompt's own blocks."""
    return _BLOCK_TAG.sub("‹", text)


def _messages(system: str, user: str) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user}]
