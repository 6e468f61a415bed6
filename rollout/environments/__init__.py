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

_MAX_TURNS = {"textarena": 30, "reasoning_gym": 5}


def make_environment(name: str) -> Environment:
    """Make the environment of a name; it has to be reset before the first step.

    Args:
        name: "embedded:digits", "embedded:runes", "textarena:<EnvId>" such as
            "textarena:Wordle-v0" (those of `textarena_games.FAMILIES`), or
            "reasoning_gym:<dataset>" such as "reasoning_gym:chain_sum".

    Returns:
        The environment. Making hundreds is cheap: the packages are loaded once, in one process.

    Raises:
        DataError: no such environment, one that can't be offered, or a package that is missing.
    """
    kind, _, game = name.partition(":")
    if kind == "embedded":
        if game not in CODES:
            known = ", ".join(f"embedded:{code}" for code in CODES)
            raise DataError(f"unknown environment {name!r}: choose one of {known}")
        return GuessTheCode(game)
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
        return HostedEnvironment(name, _MAX_TURNS[kind])
    except GameRefused as refusal:
        raise DataError(str(refusal)) from None
