"""A game as the student's partner: moves, messages and the score as reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_dialogue import Script, check_shape

from cotutor.rollout.chat import Chat
from cotutor.rollout.dialogue import Limits, converse
from cotutor.rollout.engine import Sampling
from cotutor.rollout.games import GamePartner, game_problem
from cotutor.rollout.models import load_tokenizer
from cotutor.rollout.problems import DataError
from cotutor.rollout.trajectory import Trajectory

PUPIL = str(Path(__file__).resolve().parents[2] / "configs/tiny/pupil")
LIMITS = Limits(1000, 2000, 100)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(load_tokenizer(PUPIL))


def play(chat: Chat, *moves: str, seed: int = 3, limits: Limits = LIMITS) -> Trajectory:
    problem = game_problem("embedded:digits", seed)
    dialogue = Trajectory.start(
        problem, 0, chat.prompt([{"role": "user", "content": problem.messages[0][1]}])
    )
    partner = GamePartner(chat)
    converse(Script(chat, *moves), chat, [dialogue], partner, Sampling(max_tokens=60), limits, (1,))
    partner.close()
    return dialogue


def secret(chat: Chat, seed: int = 3) -> str:
    """Found by trying every code in one guess each."""
    for code in range(222, 1000):
        won = play(chat, f"<answer>{code}</answer>", seed=seed, limits=Limits(1, 2000, 100))
        if won.reward == 1:
            return str(code)
    raise AssertionError("no code wins")


def test_a_game_that_is_won_ends_with_its_score(chat: Chat) -> None:
    right = secret(chat)
    wrong = "".join("2" if digit != "2" else "3" for digit in right)
    won = play(chat, f"<answer>{wrong}</answer>", f"<answer>{right}</answer>")
    assert [(a.score, a.status) for a in won.answers] == [(0.0, "played"), (1.0, "played")]
    assert won.reward == 1.0
    texts = chat.decode(won.ids)
    assert right not in texts.split(wrong)[0]  # the rules don't say it
    won.guidance = [None]  # type: ignore[list-item]  # one message was told
    check_shape(won, chat)


def test_a_game_counts_its_own_turns_and_illegal_moves(chat: Chat) -> None:
    lost = play(chat, "no move at all <|im_end|>")
    assert [a.status for a in lost.answers] == ["invalid"] * 5
    assert lost.reward == 0.0


def test_a_message_that_leaves_no_room_ends_the_dialogue(chat: Chat) -> None:
    start = len(play(chat, "x", limits=Limits(1, 9999, 100)).ids)
    cut = play(chat, "x", limits=Limits(1000, start + 100 + 60 - 1, 100))
    assert (cut.status, len(cut.answers)) == ("out_of_room", 1)


def test_episodes_of_one_seed_are_the_same(chat: Chat) -> None:
    assert game_problem("embedded:digits", 7) == game_problem("embedded:digits", 7)
    assert play(chat, "<answer>234</answer>").ids == play(chat, "<answer>234</answer>").ids
    with pytest.raises(DataError, match="unknown environment"):
        game_problem("embedded:chess", 0)
