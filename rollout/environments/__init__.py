"""Games and puzzles played in text over several turns, for evaluation and training.

Three kinds by name. "embedded:<game>" needs nothing. "textarena:<EnvId>" and
"reasoning_gym:<dataset>" need the extra `games`; their code runs in a process of its own, which
is killed when a step takes too long (see `hosted.py`).
"""

from __future__ import annotations

import importlib.util

from cotutor.rollout.problems import DataError

from .embedded import CODES, GuessTheCode
from .hosted import HostedEnvironment
from .protocol import Environment, GameRefused, Step

__all__ = ["Environment", "Step", "make_environment"]

# Ten hands of poker take about 40 turns.
_MAX_TURNS = {"textarena": 50, "reasoning_gym": 5}


def make_environment(name: str, max_turns: int | None = None) -> Environment:
    """Make the environment of a name; it has to be reset before the first step.

    Args:
        name: "embedded:digits", "embedded:runes", "textarena:<EnvId>" such as
            "textarena:Wordle-v0" (those of `textarena_games.FAMILIES`), or
            "reasoning_gym:<dataset>" such as "reasoning_gym:chain_sum".
        max_turns: the player's messages in an episode, ≥ 1; None: 5, and 50 for TextArena, where a
            game that is cut short scores what it has by then.

    Returns:
        The environment. Making hundreds is cheap: the packages are loaded once, in one process.

    Raises:
        DataError: no such environment, one that can't be offered, a package that is missing, or
            `max_turns` below 1.
    """
    if max_turns is not None and max_turns < 1:
        raise DataError(f"{name} can't be played in {max_turns} turns: max_turns must be 1 or more")
    kind, _, game = name.partition(":")
    if kind == "embedded":
        if game not in CODES:
            known = ", ".join(f"embedded:{code}" for code in CODES)
            raise DataError(f"unknown environment {name!r}: choose one of {known}")
        return GuessTheCode(game, max_turns or 5)
    if kind not in _MAX_TURNS:
        raise DataError(
            f"unknown environment {name!r}: a name begins with embedded:, textarena: or "
            "reasoning_gym:, as in embedded:digits"
        )
    if importlib.util.find_spec(kind) is None:
        raise DataError(
            f"{name} needs the package {kind}, which isn't installed: pip install cotutor[games]"
        )
    try:
        return HostedEnvironment(name, max_turns or _MAX_TURNS[kind])
    except GameRefused as refusal:
        raise DataError(str(refusal)) from None
