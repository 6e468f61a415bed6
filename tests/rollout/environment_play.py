"""Shared by the tests of environments: one episode from start to end."""

import importlib.util

import pytest

from cotutor.rollout.environments import Environment, Step

needs_textarena = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="textarena isn't installed"
)
needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym isn't installed"
)


def play(environment: Environment, seed: int, moves: list[str]) -> list[Step]:
    """Play the moves in turn until it is over, and check what holds for every step."""
    first = environment.reset(seed)
    assert first
    assert environment.render() == first
    steps = [Step(first, False, 0.0)]
    for turn in range(environment.max_turns):
        step = environment.step(moves[turn % len(moves)])
        assert isinstance(step.score, float)
        assert 0.0 <= step.score <= 1.0
        assert bool(step.text) != step.done
        assert (environment.render(), environment.score()) == (step.text, step.score)
        steps.append(step)
        if step.done:
            break
    assert steps[-1].done
    assert environment.step("[again]") == steps[-1]
    return steps


def tagged(guess: str) -> str:
    return f"I think that <answer>{guess}</answer>."
