"""How a step's problems are dealt out to the ranks."""

from __future__ import annotations

import random

import pytest

from cotutor.rollout.trajectory import Problem
from cotutor.trainer.collect import share


def problem(key: str, characters: int, **more) -> Problem:
    return Problem(key, "d", "x" * characters, gold="", kind="text", **more)


def shares(problems: list[Problem], ranks: int) -> list[list[Problem]]:
    return [share(problems, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [0, 1, 3, 7, 32])
def test_each_problem_goes_to_one_rank(ranks, n):
    generator = random.Random(n)
    problems = [problem(f"p{i}", generator.randint(0, 2000)) for i in range(n)]
    dealt = shares(problems, ranks)
    assert sorted(p.key for part in dealt for p in part) == sorted(p.key for p in problems)
    counts = [len(part) for part in dealt]
    assert max(counts) - min(counts) <= 1
    for part in dealt:  # in the order in which they came
        assert part == [p for p in problems if p in part]
    if ranks == 1:
        assert dealt == [problems]


def test_lengths_are_balanced():
    """Long ones at every other place: taken in turn, one rank would read all of them."""
    problems = [problem(f"p{i}", 900 if i % 2 else 100) for i in range(16)]
    loads = [sum(len(p.question) for p in part) for part in shares(problems, 2)]
    assert loads == [8 * 500, 8 * 500]
    few_heavy = [problem(f"q{i}", 3000 if i < 2 else 50 + i) for i in range(8)]
    loads = [sum(len(p.question) for p in part) for part in shares(few_heavy, 2)]
    assert max(loads) - min(loads) < 20


def test_messages_and_solutions_count():
    told = problem("told", 0, messages=(("user", "y" * 400), ("assistant", "z" * 400)))
    solved = problem("solved", 10, solution="s" * 790)
    problems = [told, problem("short", 10), solved, problem("brief", 12)]
    for part in shares(problems, 2):
        assert len({p.key for p in part} & {"told", "solved"}) == 1
