"""What every verifier answers with, and the bound on what it reads."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["right", "wrong", "no_answer", "timed_out", "undecided", "error"]

# Longer texts are judged by their end, where the last statement is [characters].
MAX_TEXT_CHARS = 200_000


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer; `correct` is True exactly when `status` is "right".

    Attributes:
        correct: whether the reward is 1.
        extracted: the answer that was read out of the text, None when there is none.
        status: "right"; "wrong"; "no_answer" (nothing stated); "timed_out" (a limit on time, memory
            or output was met); "undecided" (neither equality nor difference could be shown);
            "error" (the verifier itself failed or was asked for something impossible).
        detail: why, or per-test results of code, cut to a few hundred characters.
    """

    correct: bool
    extracted: str | None
    status: Status
    detail: str = ""


def judged(same: bool, extracted: str, detail: str = "") -> Verdict:
    """Return the verdict on an answer that was read: "right" when `same`, else "wrong"."""
    return Verdict(same, extracted, "right" if same else "wrong", detail)


def unjudged(status: Status, extracted: str | None = None, detail: str = "") -> Verdict:
    """Return a verdict without reward: no answer, timed out, undecided or error."""
    return Verdict(False, extracted, status, detail)
