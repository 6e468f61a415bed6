"""Text games as dialogues: the game is the student's partner, and its score the reward."""

from __future__ import annotations

from collections.abc import Sequence

from cotutor.rollout.chat import Chat
from cotutor.rollout.dialogue import tell
from cotutor.rollout.environments import Environment, Step, make_environment
from cotutor.rollout.trajectory import Answer, Problem, Trajectory


def game_problem(game: str, seed: int, domain: str = "") -> Problem:
    """One episode of a game as a problem whose question is the game's first message.

    Raises DataError for a game that can't be made.
    """
    environment = make_environment(game)
    try:
        first = environment.reset(seed)
    finally:
        environment.close()
    return Problem(
        key=f"{game}/{seed}",
        domain=domain or game,
        question=first,
        gold="",
        kind="game",
        options={"game": game, "seed": seed},
        source=game,
        messages=(("user", first),),
    )


class GamePartner:
    """Plays one episode of its problem's game with each dialogue; a `Partner`."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._games: dict[tuple[str, int], Environment] = {}
        self._steps: dict[tuple[str, int], Step] = {}

    def judge(self, dialogues: Sequence[Trajectory]) -> list[bool]:
        """Make the student's move; True where the game is over."""
        over = []
        for dialogue in dialogues:
            key = (dialogue.problem.key, dialogue.sample)
            if key not in self._games:
                self._games[key] = make_environment(dialogue.problem.options["game"])
                self._games[key].reset(dialogue.problem.options["seed"])
            step = self._steps[key] = self._games[key].step(dialogue.text)
            status = "failed" if step.failure else "invalid" if step.invalid else "played"
            dialogue.answers.append(Answer(dialogue.text, step.score, status))
            dialogue.reward, dialogue.status = step.score, status
            if step.done:
                self._games.pop(key).close()
            over.append(step.done)
        return over

    def reply(self, dialogues: Sequence[Trajectory]) -> None:
        """Tell the student what the game said."""
        for dialogue in dialogues:
            tell(self._chat, dialogue, self._steps[dialogue.problem.key, dialogue.sample].text)

    def close(self) -> None:
        """Close the games that were not played to their end."""
        for game in self._games.values():
            game.close()
        self._games.clear()
