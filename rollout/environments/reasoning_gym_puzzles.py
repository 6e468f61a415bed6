"""reasoning-gym's data sets: one question, several tries; this runs in the worker process.

The score is that of the data set's own `score_answer`, the best so far, and the player is told what
its try scored. Data sets whose scorer runs text as Python are refused: an answer is a model's text.
"""

from __future__ import annotations

import warnings
from typing import Any

from .moves import move_of
from .protocol import GameRefused, Step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

# Their scorers pass text to `eval` or to sympy's parser, which is the same.
_RUNS_TEXT = {
    *("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens"),
    *("number_sorting", "polynomial_multiplication", "puzzle24", "simple_integration"),
    *("spiral_matrix", "string_insertion"),
}
_WHY_NOT = {
    "composite": "is a mixture of data sets",
    "game_of_life_halting": "accepts any text as an answer to some of its questions",
    **dict.fromkeys(_RUNS_TEXT, "runs text as Python to score an answer"),
}
_FORMAT = "Write your final answer as <answer>...</answer>."


def make(name: str) -> Puzzle:
    """Return the puzzle of a data set such as "chain_sum".

    Raises:
        GameRefused: no such data set, or one that can't be offered.
    """
    if name not in DATASETS:
        raise GameRefused(
            f"reasoning-gym has no data set {name!r}: choose one of {', '.join(sorted(DATASETS))}"
        )
    if name in _WHY_NOT:
        raise GameRefused(f"reasoning_gym:{name} {_WHY_NOT[name]}: choose another data set")
    return Puzzle(name)


class Puzzle:
    """One question of a data set.

    Args:
        name: of the data set.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        self._best = 0.0

    def reset(self, seed: int) -> str:
        """Make the question of a seed and return it."""
        self._dataset = reasoning_gym.create_dataset(self._name, seed=seed % 2**31, size=1)
        self._entry = self._dataset[0]
        self._best = 0.0
        return f"{self._entry['question'].strip()}\n\n{_FORMAT}"

    def step(self, message: str) -> Step:
        """Score the answer in a message's tag; it is over when it is right."""
        answer, tagged = move_of(message)
        if not tagged:
            return Step(f"There was no answer. {_FORMAT}", False, self._best, True)
        try:
            score = float(self._dataset.score_answer(answer, self._entry))
        except Exception:  # some scorers raise on what they can't read
            return Step(f"That can't be read as an answer. {_FORMAT}", False, self._best, True)
        score = score if 0.0 <= score <= 1.0 else 0.0
        self._best = max(self._best, score)
        if score == 1.0:
            return Step("", True, 1.0)
        return Step(f"Not right: it scores {score:.2f} of 1. Try again.", False, self._best)
