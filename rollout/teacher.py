"""Who replies to a wrong answer: a teacher who knows the solution, or the student itself.

The privileged teacher reads the question, the reference (a worked solution, or what hidden unit
tests printed) and the student's last answer, and writes guidance. A message that gives the answer
away (leak.py) is written anew, up to `redrafts` times, then replaced by a fixed sentence; drafts
and leaks stay on the dialogue, where they are counted. The student never sees the reference.

Source: RL²F, arXiv 2602.16066; the words are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cotutor.rollout.chat import Chat
from cotutor.rollout.dialogue import tell, verify_answers
from cotutor.rollout.engine import Engine, Sampling
from cotutor.rollout.leak import leaks
from cotutor.rollout.prompts import PromptSet, leak_judge_messages, teacher_messages
from cotutor.rollout.trajectory import Guidance, Problem, Trajectory
from cotutor.rollout.verifiers import VerifierPool

Seed = Callable[..., int]  # (purpose, problem key, sample, turn, draft) → a request's seed


@dataclass(frozen=True)
class PrivilegedTeacher:
    """Guides with the solution at hand; a `Partner`.

    Attributes:
        engine, chat, prompts: the model that writes, and its words; it is the student's kind, so
            its chat renders the message into the dialogue too.
        sampling: of a message; `max_tokens` is its budget.
        max_prompt_tokens: a request that is longer is answered by the neutral sentence.
        redrafts: how often a leaking message is written again.
        asks_judge: also ask the model whether its message gives the answer away.
    """

    engine: Engine
    chat: Chat
    prompts: PromptSet
    pool: VerifierPool
    sampling: Sampling
    max_prompt_tokens: int
    redrafts: int
    asks_judge: bool
    seed: Seed

    def judge(self, dialogues: Sequence[Trajectory]) -> list[bool]:
        """Right answers end a dialogue."""
        return verify_answers(self.pool, dialogues)

    def reply(self, dialogues: Sequence[Trajectory]) -> None:
        """Write guidance on each last answer and append it."""
        drafts: list[list[str]] = [[] for _ in dialogues]
        leaking = [0] * len(dialogues)
        told: list[str | None] = [None] * len(dialogues)
        prompts = [self._prompt(d) for d in dialogues]
        open_ = [n for n, prompt in enumerate(prompts) if len(prompt) <= self.max_prompt_tokens]
        for draft in range(self.redrafts + 1):
            if not open_:
                break
            texts = self._write(
                [prompts[n] for n in open_],
                [self._seed("guidance", dialogues[n], draft) for n in open_],
                self.sampling,
            )
            revealing = self._reveal([dialogues[n] for n in open_], texts, draft)
            again = []
            for n, text, leak in zip(open_, texts, revealing, strict=True):
                drafts[n].append(text)
                if leak:
                    leaking[n] += 1
                    again.append(n)
                elif text.strip():
                    told[n] = text
            open_ = again
        for n, dialogue in enumerate(dialogues):
            said = told[n]
            shown = self.prompts.neutral if said is None else said
            dialogue.guidance.append(Guidance(shown, tuple(drafts[n]), leaking[n], said is None))
            tell(self.chat, dialogue, shown)

    def _prompt(self, dialogue: Trajectory) -> list[int]:
        text = self.chat.known(dialogue.text)
        messages = teacher_messages(self.prompts, dialogue.problem, reference(dialogue), text)
        return self.chat.prompt(messages)

    def _write(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[str]:
        completions = self.engine.generate(prompts, sampling, seeds)
        return [self.chat.decode(completion.ids) for completion in completions]

    def _reveal(
        self, dialogues: Sequence[Trajectory], texts: Sequence[str], draft: int
    ) -> list[bool]:
        """Which of the messages give the answer away."""
        found = [
            leaks(text, d.problem, said=_said(d)) for d, text in zip(dialogues, texts, strict=True)
        ]
        if not self.asks_judge:
            return found
        asked = [n for n, leak in enumerate(found) if not leak and texts[n].strip()]
        questions = [
            leak_judge_messages(
                self.prompts, dialogues[n].problem, answer_of(dialogues[n].problem), texts[n]
            )
            for n in asked
        ]
        verdicts = self._write(
            [self.chat.prompt(messages) for messages in questions],
            [self._seed("leak judge", dialogues[n], draft) for n in asked],
            Sampling(0.0, 1.0, 8),
        )
        for n, verdict in zip(asked, verdicts, strict=True):
            found[n] = verdict.strip().casefold().startswith("yes")
        return found

    def _seed(self, purpose: str, dialogue: Trajectory, draft: int) -> int:
        turn = len(dialogue.answers)
        return self.seed(purpose, dialogue.problem.key, dialogue.sample, turn, draft)


@dataclass(frozen=True)
class SelfCritic:
    """The student in the teacher's place, without any privilege; a `Partner`.

    It continues the dialogue itself where the teacher would speak: the same context that a world
    model is trained to predict the teacher's words from.
    """

    engine: Engine
    chat: Chat
    pool: VerifierPool
    sampling: Sampling
    seed: Seed

    def judge(self, dialogues: Sequence[Trajectory]) -> list[bool]:
        """Right answers end a dialogue: what is measured is how soon one comes."""
        return verify_answers(self.pool, dialogues)

    def reply(self, dialogues: Sequence[Trajectory]) -> None:
        """Sample the message to the student from the student."""
        for dialogue in dialogues:
            last = dialogue.turns[-1]
            dialogue.append("glue", self.chat.open_turn(dialogue.ids[last.start : last.stop]))
        seeds = [
            self.seed("critique", d.problem.key, d.sample, len(d.answers), 0) for d in dialogues
        ]
        completions = self.engine.generate([d.ids for d in dialogues], self.sampling, seeds)
        for dialogue, completion in zip(dialogues, completions, strict=True):
            dialogue.append("teacher", completion.ids, completion.logprobs)
            dialogue.append("glue", self.chat.close_turn(completion.ids))
            text = self.chat.decode(completion.ids)
            dialogue.guidance.append(Guidance(text, (text,)))


def reference(dialogue: Trajectory) -> str:
    """What the teacher knows: what the hidden tests said, the worked solution, or the answer."""
    problem = dialogue.problem
    if problem.kind == "code" and dialogue.answers and dialogue.answers[-1].detail:
        return dialogue.answers[-1].detail
    return problem.solution or answer_of(problem)


def answer_of(problem: Problem) -> str:
    """The gold answer as a text; of a program the reference solution."""
    return problem.solution if problem.kind == "code" else problem.gold


def _said(dialogue: Trajectory) -> str:
    """What the student has read and written so far."""
    texts = [dialogue.problem.question, *(a.text for a in dialogue.answers)]
    return "\n".join([*texts, *(g.text for g in dialogue.guidance)])
