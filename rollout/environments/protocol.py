"""What an environment is: a game or a puzzle that is played in text, one message a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Step:
    """What came of one message.

    Attributes:
        text: what the player is told next; "" when done.
        done: whether the episode is over.
        score: of the whole episode so far, in [0, 1]; final when done.
        invalid: whether the message was no legal move; it takes a turn all the same.
        failure: why the game itself stopped ("time limit", "process lost", or an exception's
            name); "" when it didn't. The score is then the one before this message.
    """

    text: str
    done: bool
    score: float
    invalid: bool = False
    failure: str = ""


class Environment(Protocol):
    """One player's episode after another; the same seed and messages give the same steps.

    Attributes:
        max_turns: messages after which the episode ends.
    """

    max_turns: int

    def reset(self, seed: int) -> str:
        """Start an episode and return the first message to the player: rules and observation.

        Raises:
            RuntimeError: the game of this seed can't be set up.
        """

    def step(self, message: str) -> Step:
        """Play the player's whole turn, whatever text it is; after the end, repeat the last step.

        Raises:
            RuntimeError: no episode was started.
        """

    def render(self) -> str:
        """Return what the player was told last."""

    def score(self) -> float:
        """Return the score of the episode so far, in [0, 1]."""

    def close(self) -> None:
        """Give up the episode; `reset` starts another."""


class GameRefused(ValueError):
    """There is no such game, or it can't be offered: one sentence with the way out."""
