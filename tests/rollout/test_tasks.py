"""The embedded problems: right facts, right solutions, no question twice."""

import itertools

import pytest

from cotutor.rollout.tasks import (
    DOMAINS,
    RUNES,
    all_facts,
    fact_value,
    make_problems,
    wrong_values,
)
from cotutor.rollout.verifiers import verify


def test_products() -> None:
    assert fact_value("7x4") == "28"
    assert fact_value("2x3") == "6"
    for a, b in itertools.product(range(2, 10), repeat=2):
        assert int(fact_value(f"{a}x{b}")) == sum([a] * b)


def test_shifts_are_cyclic() -> None:
    assert fact_value("p+4") == "t"
    assert fact_value("z+1") == "b"
    for letter in RUNES:
        step = letter
        for amount in range(1, 5):
            step = fact_value(f"{step}+1")
            assert fact_value(f"{letter}+{amount}") == step


@pytest.mark.parametrize("name", ["", "7x", "p+44", "ax4", "e+1", "7+4", "p+x"])
def test_no_fact(name: str) -> None:
    with pytest.raises(ValueError, match="is no fact"):
        fact_value(name)


@pytest.mark.parametrize("domain", DOMAINS)
def test_slips_are_wrong(domain: str) -> None:
    facts = all_facts(domain)
    assert len(facts) == len(set(facts)) == {"coins": 64, "runes": 80}[domain]
    for fact in facts:
        early, late = wrong_values(fact)
        assert len({early, late, fact_value(fact)}) == 3


@pytest.mark.parametrize("domain", DOMAINS)
def test_solutions_verify(domain: str) -> None:
    for problem in make_problems(domain, 300, seed=0):
        assert verify(problem.kind, problem.gold, problem.solution).correct
        *lines, answer = problem.solution.split("\n")
        assert lines == [f"{fact}={fact_value(fact)}" for fact in problem.facts]
        values = [fact_value(fact) for fact in problem.facts]
        assert answer == f"<answer>{DOMAINS[domain].separator.join(values)}</answer>"
        wrong = [wrong_values(problem.facts[0])[0], *values[1:]]
        text = f"<answer>{DOMAINS[domain].separator.join(wrong)}</answer>"
        assert not verify(problem.kind, problem.gold, text).correct


def test_question_names_its_facts() -> None:
    problem = make_problems("coins", 1, seed=1)[0]
    verb, noun, digits, by, amount = problem.question.split()
    assert (verb, noun, by) == ("Times", "coins", "by")
    assert problem.facts == tuple(f"{digit}x{amount}" for digit in digits)
    assert len(set(digits)) == len(digits)
    assert problem.domain == "coins"


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_question_twice(domain: str) -> None:
    held_out = make_problems(domain, 200, seed=3)
    taken = {p.question for p in held_out}
    assert len(taken) == 200
    train = make_problems(domain, 1000, seed=1, exclude=taken)
    assert not taken & {p.question for p in train}
    assert len({p.key for p in [*held_out, *train]}) == 1200


def test_draw_is_a_function_of_its_arguments() -> None:
    assert make_problems("runes", 50, seed=7) == make_problems("runes", 80, seed=7)[:50]
    assert make_problems("runes", 50, seed=7) != make_problems("runes", 50, seed=8)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown domain 'gems': choose one of coins, runes"):
        make_problems("gems", 1, seed=0)
    n_questions = 8 * (8 * 7 * 6 + 8 * 7 * 6 * 5)
    with pytest.raises(ValueError, match="ask for fewer"):
        make_problems("coins", n_questions + 1, seed=0)
