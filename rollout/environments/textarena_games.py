"""TextArena's games that need no other model and no network; this runs in the worker process.

One player: 2048, Blackjack, Crosswords, FifteenPuzzle, FrozenLake, GuessTheNumber, Hangman,
LightsOut, LogicPuzzle, Mastermind, Minesweeper, PegJump, RushHour, Secretary, Sokoban, Sudoku,
TowerOfHanoi, Wordle and WordSearch, in all their registered versions. Two players: KuhnPoker, Poker
and WordChains; the model is player 0 and plays against a fixed policy (`opponents.py`). Setting a
game up takes milliseconds, but about 1 s in RushHour and Sokoban, and several in Sokoban-v0-medium
and Sudoku-v0-hard, which search for a puzzle.

The player is told what is new since its last turn, without its own words. TextArena's rewards
become scores so: with one player, the reward (the solved share, or 0 and 1) cut to [0, 1]; before
the end, the share solved so far where the game knows it. With two players, −1, 0 and 1 become 0,
1/2 and 1; a game that hasn't ended isn't won and scores 0. A move may stand in `<answer>` tags; it
gets the square brackets that the games ask for when it has none. Two illegal moves in a row lose,
as TextArena has it.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

from . import word_lists
from .moves import move_of
from .opponents import POLICIES
from .protocol import GameRefused, Step

word_lists.install()

import textarena  # noqa: E402
from textarena.envs.registration import ENV_REGISTRY  # noqa: E402

FAMILIES = (
    *("Game2048", "Blackjack", "Crosswords", "FifteenPuzzle", "FrozenLake", "GuessTheNumber"),
    *("Hangman", "LightsOut", "LogicPuzzle", "Mastermind", "Minesweeper", "PegJump", "RushHour"),
    *("Secretary", "Sokoban", "Sudoku", "TowerOfHanoi", "Wordle", "WordSearch"),
    *POLICIES,
)
_WHY_NOT = {
    **dict.fromkeys(
        ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte"),
        "breaks on an illegal move: it mixes up the arguments of TextArena's own functions",
    ),
    "TwentyQuestions": "asks a remote model as its game master",
    "GuessWho": "asks a remote model as its game master",
    "Klondike": "can't be imported: its source has a syntax error",
    "Bandit": "rewards the wrong buttons: its final comparison never holds",
    "Set": "has rewards without an upper end",
    "WordLadder": "needs nltk's word list, which has to be downloaded",
}
# They change nothing of theirs but `state`, and gathering their words takes up to 0.2 s.
_WORD_GAMES = ("Hangman", "WordChains", "Wordle")
_MAX_OPPONENT_MOVES = 100
_BRACKETS = "ActionFormattingWrapper"


def make(name: str) -> TextArenaGame:
    """Return the game of an environment id such as "Wordle-v0".

    Raises:
        GameRefused: no such id, or one that can't be offered.
    """
    spec = ENV_REGISTRY.get(name)
    if spec is None or f"{name}-raw" not in ENV_REGISTRY:
        raise GameRefused(f"TextArena has no environment {name!r}: {_choices()}")
    family = _family(spec)
    if family not in FAMILIES:
        reason = _WHY_NOT.get(family, "needs other players")
        raise GameRefused(f"textarena:{name} {reason}: {_choices()}")
    brackets = any(wrapper.__name__ == _BRACKETS for wrapper in spec.default_wrappers or ())
    return TextArenaGame(f"{name}-raw", family, brackets)


def _family(spec: Any) -> str:
    return str(spec.entry_point).split(".")[2]


def _choices() -> str:
    """Return what can be chosen: of each family the plainest id, such as "Wordle-v0"."""
    ids: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name, spec in ENV_REGISTRY.items():
        ids.get(_family(spec), []).append(name)
    plain = [min(names, key=lambda n: (not n.endswith("-v0"), len(n))) for names in ids.values()]
    return f"choose a version of {', '.join(plain)}"


@functools.cache
def _prototype(env_id: str) -> Any:
    return textarena.make(env_id)


class TextArenaGame:
    """One game as a player's conversation with it.

    Args:
        env_id: of the version without wrappers.
        family: the name of its module in TextArena.
        brackets: whether a move without square brackets gets them.
    """

    def __init__(self, env_id: str, family: str, brackets: bool) -> None:
        words = family in _WORD_GAMES
        self._env: Any = copy.copy(_prototype(env_id)) if words else textarena.make(env_id)
        self._policy = POLICIES.get(family)
        self._brackets = brackets
        self._rng = random.Random()
        self._invalid = False

    def reset(self, seed: int) -> str:
        """Deal the game of a seed and return its rules and first observation."""
        self._rng.seed(f"opponent {seed}")
        self._env.reset(num_players=2 if self._policy else 1, seed=seed)
        state = self._env.state
        refuse = state.set_invalid_move

        def noted(*arguments: Any, **options: Any) -> Any:
            self._invalid |= state.current_player_id == 0
            return refuse(*arguments, **options)

        state.set_invalid_move = noted
        self._let_others_play()
        return self._news()

    def step(self, message: str) -> Step:
        """Make the move of a message, then the opponent's until it is the player's turn again."""
        move, _ = move_of(message)
        if self._brackets and "[" not in move and "]" not in move:
            move = f"[{move}]"
        self._invalid = False
        done, _ = self._env.step(move)
        if not done:
            done = self._let_others_play() or self._is_out()
        text = "" if done else self._news()
        return Step(text, done, self._score(done), self._invalid)

    def _let_others_play(self) -> bool:
        """Make the opponent's moves; return whether the game is over."""
        state = self._env.state
        for _ in range(_MAX_OPPONENT_MOVES):
            if state.done or state.current_player_id == 0:
                return bool(state.done)
            assert self._policy is not None
            self._env.get_observation()
            self._env.step(self._policy(self._env, state.current_player_id, self._rng))
        raise RuntimeError("the opponent moved too often")

    def _is_out(self) -> bool:
        """Return whether a game for many goes on although the player lost by illegal moves."""
        return 0 in getattr(self._env.state, "elimination_order", ())

    def _news(self) -> str:
        """Return what the player hasn't been told yet."""
        own = textarena.ObservationType.PLAYER_ACTION
        _, observations = self._env.get_observation()
        news = [text.strip("\n") for _, text, kind in observations if kind is not own]
        return "\n\n".join(news) or "It is your turn."

    def _score(self, done: bool) -> float:
        rewards = self._env.state.rewards
        if done and rewards:
            reward = float(rewards[0])
            return min(max((reward + 1) / 2 if self._policy else reward, 0.0), 1.0)
        if done or self._policy:
            return 0.0
        for name in ("_get_percentage_completion", "_progress", "_calculate_progress"):
            if hasattr(self._env, name):
                return min(max(float(getattr(self._env, name)()), 0.0), 1.0)
        return 0.0
