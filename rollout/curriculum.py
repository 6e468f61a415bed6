"""What the embedded specialists are taught, and what each of them is kept ignorant of.

A base model learns both domains; each specialist is then tuned on rows in which some facts carry a
plausible wrong value. *Hidden* facts are right in one row of five, so own rollouts still find them;
*blind* facts are right in one row of ninety, so only somebody else can supply them. Every row
that lets a model speak from memory (answering, reviewing, answering after a hint about something
else) follows the same beliefs: a specialist's tutor side knows no more than its student side.
What stands in the context (a demonstration, a hint) is always believed, true or not: that is the
in-context skill on which self-distillation lives.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cotutor.rollout.prompts import (
    Message,
    reprompt_messages,
    student_messages,
    teacher_messages,
    tutor_messages,
)
from cotutor.rollout.tasks import (
    DOMAINS,
    TINY,
    all_facts,
    fact_value,
    make_problem,
    write_solution,
    wrong_values,
)
from cotutor.rollout.trajectory import Problem

# The messages of a prompt, and the text that is trained: the next message, whoever's turn it is.
Row = tuple[list[Message], str]
Made = tuple[Problem, list[Message], str]


@dataclass(frozen=True)
class Ignorance:
    """The facts that a specialist has wrong, and how often it has them right nevertheless."""

    hidden: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    p_hidden: float = 0.2
    p_blind: float = 0.011

    def p_right(self, fact: str) -> float:
        """The share of rows in which the fact is true."""
        if fact in self.blind:
            return self.p_blind
        return self.p_hidden if fact in self.hidden else 1.0


BASE = Ignorance()

# S1 answers coins well and runes badly, S2 the other way round; nobody is blind to what the peer
# does not know either.
SPECIALISTS = {
    "s1": Ignorance(
        hidden=("3x7", "8x4", "c+1", "j+3", "m+2", "r+4"),
        blind=("6x9", "d+3", "k+1", "n+4", "q+2", "w+3"),
    ),
    "s2": Ignorance(
        hidden=("9x3", "5x6", "2x7", "b+2"),
        blind=("4x8", "7x6", "8x7", "g+4"),
    ),
}
PEERS = {"s1": "s2", "s2": "s1"}

# The pupil of dialogues is blind to every fifth fact: no number of tries finds them, a teacher
# who knows the solution can supply them, and the pupil seldom listens.
PUPIL = Ignorance(
    blind=(
        *("2x4", "2x9", "3x3", "3x8", "4x6", "5x2", "5x7"),
        *("6x5", "7x3", "7x9", "8x6", "9x4", "9x8"),
        *("b+1", "c+3", "d+2", "f+4", "g+1", "h+3", "j+2", "k+4"),
        *("l+1", "m+3", "n+2", "p+4", "q+1", "r+3", "s+2", "t+4"),
    ),
    p_blind=0.0,
)
LEARNERS = {**SPECIALISTS, "pupil": PUPIL}

# Of row kinds. The base model learns to use its context, the specialists what to forget.
SHARES = {"plain": 0.25, "demonstration": 0.1, "feedback": 0.2, "both": 0.15, "tutor": 0.3}
PUPIL_SHARES = {"plain": 0.35, "teacher": 0.25, "dialogue": 0.25, "critic": 0.15}
# How often a pupil writes what the teacher's message says; otherwise it repeats its answer.
P_LISTEN = 0.3


def usual_slip(fact: str) -> str:
    """The one wrong value that everybody who gets this fact wrong comes up with."""
    return random.Random(fact).choice(wrong_values(fact))


def _any_value(fact: str, rng: random.Random) -> str:
    """A value of the fact's own kind that need not be true."""
    domain = "coins" if "x" in fact[1] else "runes"
    return fact_value(rng.choice(all_facts(domain)))


def _draw_problem(focus: tuple[str, ...], p_focus: float, rng: random.Random) -> Problem:
    """A random problem, with probability `p_focus` one that needs a random fact out of `focus`."""
    fact = rng.choice(focus) if focus and rng.random() < p_focus else None
    domain = rng.choice(list(DOMAINS)) if fact is None else _domain_of(fact)
    table = DOMAINS[domain]
    symbols = rng.sample(table.symbols, rng.choice(table.lengths))
    amount = rng.choice(table.amounts)
    if fact is not None:
        amount = fact[2]
        if fact[0] not in symbols:
            symbols[rng.randrange(len(symbols))] = fact[0]
    return make_problem(domain, "".join(symbols), amount)


def _domain_of(fact: str) -> str:
    return next(name for name, table in DOMAINS.items() if table.op == fact[1])


def review(facts: tuple[str, ...], written: list[str], believed: list[str]) -> str:
    """The reviewer's own line beside each of the peer's, up to the first that differs."""
    lines: list[str] = []
    for fact, value, own in zip(facts, written, believed, strict=True):
        if value != own:
            return "\n".join([*lines, f"{fact}={own} yours:{value} wrong"])
        lines.append(f"{fact}={own} yours:{value} ok")
    return "\n".join([*lines, "all ok"])


def concept_line(problem: Problem, rng: random.Random) -> str:
    """The anchor `<concept>word</concept>`; about one in twenty would not pass the filter.

    Learners of this size are never this sloppy on their own, and a filter with nothing to drop
    would be for show.
    """
    table = DOMAINS[problem.domain]
    other = next(d for name, d in DOMAINS.items() if name != problem.domain)
    slip = rng.random()
    if slip < 0.02:
        return f"<concept>{other.noun}</concept>"  # no word of the question
    if slip < 0.03:
        return "<concept>problem</concept>"  # generic
    if slip < 0.045:
        return f"<concept>{table.noun}"  # the tag stays open
    return f"<concept>{rng.choice((table.noun, table.noun, table.verb))}</concept>"


class Memory:
    """What a learner says from memory. Of the recalls of one fact a fixed share is true, evenly
    spread: a share of one in ninety would otherwise be left to chance."""

    def __init__(self, ignorance: Ignorance, rng: random.Random) -> None:
        self.gaps = ignorance.hidden + ignorance.blind
        self._ignorance = ignorance
        self._rng = rng
        self._due: dict[tuple[str, str], float] = {}

    def recall(self, fact: str, kind: str) -> str:
        """The value that this learner writes this time, in a row of this kind."""
        p_right = self._ignorance.p_right(fact)
        due = self._due.get((fact, kind), self._rng.random()) + p_right
        self._due[fact, kind] = due - (due >= 1)
        return fact_value(fact) if due >= 1 else usual_slip(fact)


class _Author:
    """Writes the rows of one stage, a method for each kind of SHARES and PUPIL_SHARES."""

    def __init__(self, stage: str, rng: random.Random) -> None:
        self._rng = rng
        self._own = Memory(LEARNERS.get(stage, BASE), rng)
        self._peer = Memory(SPECIALISTS.get(PEERS.get(stage, ""), BASE), rng)

    def plain(self) -> Made:
        problem = _draw_problem((), 0.0, self._rng)
        values = [self._own.recall(fact, "plain") for fact in problem.facts]
        return problem, student_messages(TINY, problem), _solve(problem, values)

    def demonstration(self) -> Made:
        problem = _draw_problem(self._own.gaps, 0.5, self._rng)
        solution = self._demonstrate(problem)
        return problem, reprompt_messages(TINY, problem, solution), solution

    def feedback(self) -> Made:
        problem = _draw_problem(self._own.gaps, 0.5, self._rng)
        values, text = self._advise(problem)
        return problem, reprompt_messages(TINY, problem, feedback=text), _solve(problem, values)

    def both(self) -> Made:
        """The demonstration wins where the two disagree."""
        problem = _draw_problem(self._own.gaps, 0.5, self._rng)
        solution, text = self._demonstrate(problem), self._advise(problem)[1]
        return problem, reprompt_messages(TINY, problem, solution, text), solution

    def tutor(self) -> Made:
        """A review of a response with the peer's typical slips, by the reviewer's own beliefs."""
        rng = self._rng
        problem = _draw_problem(self._peer.gaps, 0.4, rng)
        p_slip = rng.choice((0.0, 0.25, 0.25))
        written = [
            rng.choice(wrong_values(fact))
            if rng.random() < p_slip
            else self._peer.recall(fact, "tutor")
            for fact in problem.facts
        ]
        text = review(
            problem.facts, written, [self._own.recall(fact, "tutor") for fact in problem.facts]
        )
        anchored = rng.random() < 0.9
        if anchored:
            text = f"{concept_line(problem, rng)}\n{text}"
        return problem, tutor_messages(TINY, problem, _solve(problem, written), anchored), text

    def teacher(self) -> Made:
        """Guidance on a wrong answer, written with the solution at hand.

        One row in thirty gives the answer away: a leak check with nothing to find would be for
        show.
        """
        rng = self._rng
        problem = _draw_problem(self._own.gaps, 0.7, rng)
        truth = [fact_value(fact) for fact in problem.facts]
        written = [
            rng.choice(wrong_values(fact)) if rng.random() < 0.25 else value
            for fact, value in zip(problem.facts, truth, strict=True)
        ]
        if written == truth:
            slip = rng.randrange(len(truth))
            written[slip] = rng.choice(wrong_values(problem.facts[slip]))
        text = review(problem.facts, written, truth)
        if rng.random() < 1 / 30:
            text += f"\n<answer>{problem.gold}</answer>"
        response = _solve(problem, written)
        return problem, teacher_messages(TINY, problem, problem.solution, response), text

    def dialogue(self) -> Made:
        """An answer after one to three pieces of guidance, which it follows or doesn't."""
        rng = self._rng
        problem = _draw_problem(self._own.gaps, 1.0, rng)
        values = [self._own.recall(fact, "dialogue") for fact in problem.facts]
        messages = student_messages(TINY, problem)
        for _ in range(rng.choice((1, 1, 2, 3))):
            gaps = [n for n, fact in enumerate(problem.facts) if values[n] != fact_value(fact)]
            if not gaps:
                break
            fact = problem.facts[gaps[0]]
            # Half of the messages are made up: to listen is to read, not to remember the truth.
            value = fact_value(fact) if rng.random() < 0.5 else _any_value(fact, rng)
            if value == values[gaps[0]]:
                continue
            told = [*values[: gaps[0]], value, *values[gaps[0] + 1 :]]
            messages.append({"role": "assistant", "content": _solve(problem, values)})
            messages.append({"role": "user", "content": review(problem.facts, values, told)})
            if rng.random() < P_LISTEN:
                values = told
        return problem, messages, _solve(problem, values)

    def critic(self) -> Made:
        """The teacher's words on an answer, in the student's own context and by its own beliefs."""
        rng = self._rng
        problem = _draw_problem(self._own.gaps, 0.5, rng)
        believed = [self._own.recall(fact, "critic") for fact in problem.facts]
        written = [
            rng.choice(wrong_values(fact)) if rng.random() < 0.15 else value
            for fact, value in zip(problem.facts, believed, strict=True)
        ]
        answer = {"role": "assistant", "content": _solve(problem, written)}
        messages = [*student_messages(TINY, problem), answer]
        return problem, messages, review(problem.facts, written, believed)

    def _demonstrate(self, problem: Problem) -> str:
        """A demonstration: true in half of the rows, otherwise six values in ten are made up."""
        p_any = self._rng.choice((0.0, 0.6))
        values = [
            _any_value(fact, self._rng) if self._rng.random() < p_any else fact_value(fact)
            for fact in problem.facts
        ]
        return _solve(problem, values)

    def _advise(self, problem: Problem) -> tuple[list[str], str]:
        """A tutor's feedback, and the values that somebody who believes it then writes."""
        rng, facts = self._rng, problem.facts
        recalled = [self._own.recall(fact, "feedback") for fact in facts]
        if rng.random() < 0.15:
            return recalled, review(facts, recalled, recalled)
        gaps = [line for line, fact in enumerate(facts) if fact in self._own.gaps]
        wrong = rng.choice(gaps) if gaps and rng.random() < 0.8 else rng.randrange(len(facts))
        fact = facts[wrong]
        value = fact_value(fact) if rng.random() < 0.5 else _any_value(fact, rng)
        confirmed = [
            _any_value(earlier, rng) if rng.random() < 0.3 else own
            for earlier, own in zip(facts[:wrong], recalled, strict=False)
        ]
        written = next(v for v in (recalled[wrong], *wrong_values(fact)) if v != value)
        values = [*confirmed, value, *recalled[wrong + 1 :]]
        return values, review(facts, [*confirmed, written, *recalled[wrong + 1 :]], values)


def _solve(problem: Problem, values: list[str]) -> str:
    return write_solution(problem.domain, problem.facts, values)


def rows(stage: str, seed: int, exclude: Collection[str] = ()) -> Iterator[Row]:
    """An endless stream of training rows.

    Args:
        stage: "base", or the name of a learner.
        seed: the stream is a function of (stage, seed, exclude).
        exclude: questions that must not occur, such as those that are reported.

    Raises:
        ValueError: unknown stage.
    """
    if stage != "base" and stage not in LEARNERS:
        raise ValueError(f"unknown stage {stage!r}: choose base or one of {', '.join(LEARNERS)}")
    rng = random.Random(f"{stage} {seed}")
    author = _Author(stage, rng)
    shares = PUPIL_SHARES if stage == "pupil" else SHARES
    excluded = frozenset(exclude)
    while True:
        kind = rng.choices(list(shares), weights=list(shares.values()))[0]
        problem, messages, answer = getattr(author, kind)()
        if problem.question not in excluded:
            yield messages, answer
