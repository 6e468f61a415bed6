"""What one rollout is: a problem, append-only token ids, and which of them are trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["prompt", "student", "teacher", "glue"]
FinishReason = Literal["stop", "length"]
_STUDENT: tuple[Role, ...] = ("student",)


@dataclass(frozen=True)
class Problem:
    """A question with its gold answer and the verifier that judges answers to it.

    `key` is a function of the content (domain, question, options), so that equal questions from two
    files are one problem. `source` is "file:line", for messages. `facts` names the pieces of
    knowledge that the question needs (embedded tasks only). `messages` ((role, content) pairs),
    where given, are shown to the student instead of the question's own prompt; they may end with
    the assistant's, where what comes next is the user's.
    """

    key: str
    domain: str
    question: str
    gold: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    solution: str = ""
    source: str = ""
    facts: tuple[str, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Completion:
    """What an engine sampled for one prompt.

    `ids` are the sampled token ids, the end token included when it was sampled; `logprobs` (nats)
    are those of the distribution that was sampled from, temperature applied, one per id.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Turn:
    """A half-open span [start, stop) of a trajectory's ids, written by one role."""

    role: Role
    start: int
    stop: int


@dataclass(frozen=True)
class Feedback:
    """A tutor's words on one rollout. `text` is what the student's teacher sees, "" if dropped."""

    tutor: str
    text: str
    outcome: str
    raw: str
    revealed: int = 0


@dataclass(frozen=True)
class Answer:
    """One judged turn of the student in a dialogue; `score` in [0, 1], 1 when it is right."""

    text: str
    score: float
    status: str
    extracted: str | None = None
    detail: str = ""  # what the verifier saw: the output of hidden unit tests


@dataclass(frozen=True)
class Guidance:
    """What a teacher said after a wrong answer.

    `drafts` holds every text that it wrote, `text` the last one that was told; `leaks` counts the
    drafts that gave the answer away, `neutral` says that all of them did and a fixed sentence was
    told instead.
    """

    text: str
    drafts: tuple[str, ...] = ()
    leaks: int = 0
    neutral: bool = False


@dataclass
class Trajectory:
    """One rollout of one problem: `ids` only ever grow, and are never decoded and re-encoded.

    `logprobs[n]` is the sampler's log-probability of `ids[n]`, 0.0 for ids that nobody sampled.
    `teacher_prompt_ids` is the context under which the distillation teacher scores the student's
    tokens (None: no teacher). `advantage` is broadcast to the student's tokens.
    """

    problem: Problem
    sample: int
    ids: list[int]
    logprobs: list[float]
    turns: list[Turn]
    finish_reason: FinishReason = "stop"
    text: str = ""
    reward: float = 0.0
    extracted: str | None = None
    status: str = ""
    feedback: Feedback | None = None
    teacher_prompt_ids: list[int] | None = None
    advantage: float = 0.0
    # Dialogues alone: the student's turns as judged, and what was said between them.
    answers: list[Answer] = field(default_factory=list)
    guidance: list[Guidance] = field(default_factory=list)

    @classmethod
    def start(cls, problem: Problem, sample: int, prompt_ids: list[int]) -> Trajectory:
        """A trajectory that holds only its prompt."""
        prompt = Turn("prompt", 0, len(prompt_ids))
        return cls(problem, sample, list(prompt_ids), [0.0] * len(prompt_ids), [prompt])

    def append(self, role: Role, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add a turn at the end. Sampled turns bring one log-probability per id."""
        if logprobs is None:
            logprobs = [0.0] * len(ids)
        assert len(ids) == len(logprobs), (len(ids), len(logprobs))
        self.turns.append(Turn(role, len(self.ids), len(self.ids) + len(ids)))
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)

    def turn_ids(self, roles: Collection[Role] = _STUDENT) -> list[int]:
        """For each id the index of the turn it belongs to among those of `roles`, −1 elsewhere.

        This is the only place that says which tokens are trained: those that the student sampled,
        the sampled end token included, whatever their values (masks by position, never by value).
        Only a world model also asks for the teacher's turns.
        """
        numbers = [-1] * len(self.ids)
        turns = (turn for turn in self.turns if turn.role in roles)
        for number, turn in enumerate(turns):
            numbers[turn.start : turn.stop] = [number] * (turn.stop - turn.start)
        return numbers

    def response_ids(self) -> list[int]:
        """The ids of the student's turns, in order."""
        return [i for i, turn in zip(self.ids, self.turn_ids(), strict=True) if turn >= 0]

    def n_tokens(self, role: Role) -> int:
        """How many tokens the turns of a role have."""
        return sum(turn.stop - turn.start for turn in self.turns if turn.role == role)
