"""The embedded demonstration's two domains: problem generators with facts and worked solutions.

*coins*: "Times coins 597 by 4" asks for the product of each digit, without carrying. *runes*:
"Shift runes lpxcb by 4" asks for the letter that follows each one at that distance in a cycle of
twenty. Both are tables of facts ("7x4", "p+4") that are looked up one line at a time, so that what
a model doesn't know can be named, hidden in training, and scored on its own.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from cotutor.rollout.prompts import PromptSet
from cotutor.rollout.trajectory import Problem

RUNES = "bcdfghjklmnpqrstvwxz"  # no vowels: no rune word can look like a word of a prompt


@dataclass(frozen=True)
class Domain:
    """One table of facts: `symbols` op `amounts`, asked about in words of `lengths` symbols."""

    verb: str
    noun: str
    op: str  # "x" or "+", between a symbol and an amount in a fact's name
    symbols: str
    amounts: str
    lengths: tuple[int, ...]
    separator: str  # between the values of the answer


DOMAINS = {
    "coins": Domain("Times", "coins", "x", "23456789", "23456789", (3, 4), " "),
    "runes": Domain("Shift", "runes", "+", RUNES, "1234", (4, 5), ""),
}

TINY = PromptSet(
    system="",
    student="{question}",
    demonstration="Example:\n{demonstration}",
    feedback="Tutor:\n{feedback}",
    closing="Solve again.",
    tutor_system="",
    tutor="Review with concept.\n{question}\n{response}",
    tutor_plain="Review\n{question}\n{response}",
    teacher_system="",
    teacher="Tutor:\n{question}\n{reference}\n{response}",
    neutral="Solve again.",
    leak_judge="",
)


def fact_value(fact: str) -> str:
    """The true value of a fact: "28" for "7x4", "t" for "p+4" (cyclic).

    Raises:
        ValueError: `fact` is not the name of a fact.
    """
    if len(fact) == 3 and fact[2].isdigit():
        symbol, op, amount = (fact[0], fact[1], fact[2])
        if op == "x" and symbol.isdigit():
            return str(int(symbol) * int(amount))
        if op == "+" and symbol in RUNES:
            return RUNES[(RUNES.index(symbol) + int(amount)) % len(RUNES)]
    raise ValueError(f"{fact!r} is no fact: expected a form like '7x4' or 'p+4'")


def wrong_values(fact: str) -> tuple[str, str]:
    """The two slips that a learner plausibly makes: one symbol too early, one too late."""
    symbol, op, amount = (fact[0], fact[1], fact[2])
    if op == "x":
        return str((int(symbol) - 1) * int(amount)), str((int(symbol) + 1) * int(amount))
    index = RUNES.index(fact_value(fact))
    return RUNES[index - 1], RUNES[(index + 1) % len(RUNES)]


def all_facts(domain: str) -> tuple[str, ...]:
    """The names of all facts of a domain, in the table's order."""
    table = DOMAINS[domain]
    return tuple(
        f"{symbol}{table.op}{amount}" for symbol in table.symbols for amount in table.amounts
    )


def write_solution(domain: str, facts: Collection[str], values: Collection[str]) -> str:
    """A worked solution: one line per fact with the given value, then the tagged answer."""
    lines = [f"{fact}={value}" for fact, value in zip(facts, values, strict=True)]
    answer = DOMAINS[domain].separator.join(values)
    return "\n".join([*lines, f"<answer>{answer}</answer>"])


def make_problem(domain: str, symbols: str, amount: str) -> Problem:
    """The problem that asks for `symbols` by `amount`, with its true worked solution."""
    table = DOMAINS[domain]
    facts = tuple(f"{symbol}{table.op}{amount}" for symbol in symbols)
    values = [fact_value(fact) for fact in facts]
    question = f"{table.verb} {table.noun} {symbols} by {amount}"
    return Problem(
        key=f"{domain}: {question}",
        domain=domain,
        question=question,
        gold=table.separator.join(values),
        kind="text",
        solution=write_solution(domain, facts, values),
        source="embedded tasks",
        facts=facts,
    )


def make_problems(
    domain: str, n: int, *, seed: int, exclude: Collection[str] = ()
) -> list[Problem]:
    """Draw `n` different problems whose questions are not in `exclude`.

    Args:
        domain: "coins" or "runes".
        n: how many, ≥ 0.
        seed: the draw is a function of (domain, seed, exclude) and a prefix of every longer one.
        exclude: questions that must not occur, such as those of the training set.

    Raises:
        ValueError: unknown domain, or fewer than `n` such problems exist.
    """
    if domain not in DOMAINS:
        raise ValueError(f"unknown domain {domain!r}: choose one of {', '.join(DOMAINS)}")
    table = DOMAINS[domain]
    rng = random.Random(f"{domain} {seed}")
    taken = set(exclude)
    problems: list[Problem] = []
    misses = 0
    while len(problems) < n:
        # Symbols of one question are distinct: a hint about one of them is never ambiguous.
        symbols = "".join(rng.sample(table.symbols, rng.choice(table.lengths)))
        problem = make_problem(domain, symbols, rng.choice(table.amounts))
        misses += 1
        if problem.question not in taken:
            taken.add(problem.question)
            problems.append(problem)
            misses = 0
        elif misses > 10_000:
            raise ValueError(
                f"{domain} has no {n} different problems outside the {len(exclude)} excluded ones: "
                "ask for fewer"
            )
    return problems
