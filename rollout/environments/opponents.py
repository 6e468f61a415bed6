"""The other player of TextArena's two-player games: fixed policies, random only by the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .word_lists import everyday_words

Policy = Callable[[Any, int, random.Random], str]


def kuhn_poker(env: Any, me: int, rng: random.Random) -> str:
    """Play the equilibrium: bet or call with a king, bluff with a jack one time in three."""
    state = env.state.game_state
    card, actions = state["player_cards"][me], state["current_legal_action_tree"]
    if "check" in actions:
        bets = card == 2 or (card == 0 and rng.random() < 1 / 3)
        return "[bet]" if bets else "[check]"
    checked = state["starting_player"] == me
    calls = card == 2 or (card == 1 and rng.random() < (2 / 3 if checked else 1 / 3))
    return "[call]" if calls else "[fold]"


def poker(env: Any, me: int, rng: random.Random) -> str:
    """Never bet, never fold: check, or call what was bet."""
    state = env.state.game_state
    return "[call]" if state["current_bet"] > state["player_bets"][me] else "[check]"


def word_chains(env: Any, me: int, rng: random.Random) -> str:
    """Take any everyday word that fits; give up when there is none."""
    state = env.state.game_state
    fitting = [
        word
        for word in everyday_words()
        if len(word) == state["required_length"]
        and word.startswith(state["required_start_letter"])
        and word not in state["used_words"]
    ]
    return f"[{rng.choice(fitting)}]" if fitting else "[]"


POLICIES: dict[str, Policy] = {
    "KuhnPoker": kuhn_poker,
    "Poker": poker,
    "WordChains": word_chains,
}
