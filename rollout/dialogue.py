"""A problem as a dialogue: the student answers, somebody replies, the student answers again.

All dialogues of a batch advance together, a turn at a time, so that the engine is always full. What
a turn says is appended to the trajectory's ids and never rewritten. Who replies is a `Partner`: a
teacher who knows the solution (teacher.py), the student itself, or a game.

A dialogue ends when its partner says so, when an answer is cut by its token budget, when no further
turn would fit into the budget of the whole, or after `max_turns` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cotutor.rollout.chat import Chat
from cotutor.rollout.engine import Engine, Sampling, request_seed
from cotutor.rollout.trajectory import Answer, Trajectory
from cotutor.rollout.verifiers import VerifierPool

Judge = Callable[[Sequence[Trajectory]], list[bool]]


@dataclass(frozen=True)
class Limits:
    """Of one dialogue: answers, tokens in all, and tokens of one message to the student."""

    max_turns: int
    max_dialogue_tokens: int
    max_guidance_tokens: int


class Partner(Protocol):
    """Whoever the student talks to."""

    def judge(self, dialogues: Sequence[Trajectory]) -> list[bool]:
        """Put an `Answer` and the reward so far on each dialogue; True where it is over."""

    def reply(self, dialogues: Sequence[Trajectory]) -> None:
        """Append a message to the student onto each dialogue, ready for its next answer."""


def converse(
    engine: Engine,
    chat: Chat,
    dialogues: Sequence[Trajectory],
    partner: Partner,
    sampling: Sampling,
    limits: Limits,
    seed_parts: tuple[object, ...],
) -> None:
    """Carry every dialogue from its prompt to its end, in place.

    Afterwards `status` is that of the last answer, "truncated" where an answer was cut, or
    "out_of_room" where the budget of the whole ended a dialogue. A request's seed is a function of
    (seed_parts, problem, sample, turn).
    """
    active = list(dialogues)
    for turn in range(1, limits.max_turns + 1):
        if not active:
            return
        seeds = [request_seed(*seed_parts, d.problem.key, d.sample, turn) for d in active]
        answer(engine, chat, active, sampling, seeds)
        for dialogue in active:
            if dialogue.finish_reason == "length":
                # Its end is missing: it is never judged, and no partner sees it as finished.
                dialogue.answers.append(Answer(dialogue.text, 0.0, "truncated"))
                dialogue.reward, dialogue.status = 0.0, "truncated"
        active = [d for d in active if d.finish_reason == "stop"]
        over = partner.judge(active)
        active = [d for d, ended in zip(active, over, strict=True) if not ended]
        if turn == limits.max_turns:
            return
        active = _with_room(active, limits.max_guidance_tokens + sampling.max_tokens, limits)
        partner.reply(active)
        # A message may be longer than its budget: a game's, or one that is encoded anew.
        active = _with_room(active, sampling.max_tokens, limits)


def _with_room(dialogues: Sequence[Trajectory], wanted: int, limits: Limits) -> list[Trajectory]:
    """The dialogues that have `wanted` tokens left; the others end here."""
    roomy = []
    for dialogue in dialogues:
        if len(dialogue.ids) + wanted <= limits.max_dialogue_tokens:
            roomy.append(dialogue)
        else:
            dialogue.status = "out_of_room"
    return roomy


def answer(
    engine: Engine,
    chat: Chat,
    rollouts: Sequence[Trajectory],
    sampling: Sampling,
    seeds: Sequence[int],
) -> None:
    """Sample the student's next turn onto each rollout, in place."""
    completions = engine.generate([rollout.ids for rollout in rollouts], sampling, seeds)
    for rollout, completion in zip(rollouts, completions, strict=True):
        rollout.append("student", completion.ids, completion.logprobs)
        rollout.finish_reason = completion.finish_reason
        rollout.text = chat.decode(completion.ids)


def tell(chat: Chat, dialogue: Trajectory, text: str) -> None:
    """Append a message to the student, as plain text whatever it says."""
    last = dialogue.turns[-1]
    bridge = chat.bridge(dialogue.ids[last.start : last.stop], chat.known(text))
    dialogue.append("glue", bridge.before)
    dialogue.append("teacher", bridge.content)
    dialogue.append("glue", bridge.after)


def verify_answers(pool: VerifierPool, dialogues: Sequence[Trajectory]) -> list[bool]:
    """Judge the last answer of each dialogue by its problem's verifier; True where it is right."""
    verdicts = pool.verify_many(
        [(d.problem.kind, d.problem.gold, d.text, d.problem.options) for d in dialogues]
    )
    for dialogue, verdict in zip(dialogues, verdicts, strict=True):
        score = float(verdict.correct)
        dialogue.answers.append(
            Answer(dialogue.text, score, verdict.status, verdict.extracted, verdict.detail)
        )
        dialogue.reward, dialogue.status = score, verdict.status
        dialogue.extracted = verdict.extracted
    return [verdict.correct for verdict in verdicts]
