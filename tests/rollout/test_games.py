"""TextArena and reasoning-gym: played from start to end, side by side, and after a lost process."""

import json
import subprocess
import sys
import time
from collections import deque

import pytest
from environment_play import needs_reasoning_gym, needs_textarena, play, tagged

from cotutor.rollout.environments import Step, hosted, make_environment

# TextArena.


@needs_textarena
def test_wordle_from_start_to_end() -> None:
    """Keep the words that fit all feedback: what a player who uses it can do."""
    words = [word for word in everyday_words() if len(word) == 5]
    assert 100 < len(words) < 300
    environment = make_environment("textarena:Wordle-v0")
    scores = []
    for seed in range(10):
        environment.reset(seed)
        left = words
        while True:
            guess = left[0]
            step = environment.step(f"I take [{guess}].")
            assert not step.failure
            if step.done:
                break
            if step.invalid:
                left = left[1:]
                continue
            feedback = step.text.split("\n")[3].replace(" ", "")
            left = [w for w in left if w != guess and wordle_feedback(w, guess) == feedback]
        scores.append(step.score)
    assert sum(score == 1.0 for score in scores) >= 8


def everyday_words() -> list[str]:
    """Return the words that secrets are drawn from, out of TextArena's files."""
    code = (
        "import json\n"
        "from cotutor.rollout.environments import word_lists\n"
        "word_lists.install()\n"
        "print(json.dumps(word_lists.everyday_words()))"
    )
    words: list[str] = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    return words


def wordle_feedback(secret: str, guess: str) -> str:
    rest = [s for s, g in zip(secret, guess, strict=True) if s != g]
    marks = []
    for s, g in zip(secret, guess, strict=True):
        if s == g:
            marks.append("G")
        elif g in rest:
            rest.remove(g)
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


@needs_textarena
def test_frozen_lake_from_start_to_end() -> None:
    environment = make_environment("textarena:FrozenLake-v0")
    for seed in range(10):
        text = environment.reset(seed)
        rows = [line.split("|")[1:-1] for line in text.split("\n") if line.startswith("|")]
        grid = [[cell.strip() for cell in row] for row in rows]
        for move in way(grid):
            step = environment.step(move)
            assert not step.invalid
        assert step == Step("", True, 1.0)
    environment.reset(0)
    assert environment.step("[left]").invalid  # a wall
    step = environment.step("[up]")
    assert (step.done, step.score) == (True, 0.0)


def way(grid: list[list[str]]) -> list[str]:
    """Return the moves of a shortest way from the upper left corner to G."""
    queue: deque[tuple[int, int, list[str]]] = deque([(0, 0, [])])
    seen = {(0, 0)}
    while queue:
        row, column, moves = queue.popleft()
        if grid[row][column] == "G":
            return moves
        for move, dr, dc in (("up", -1, 0), ("down", 1, 0), ("left", 0, -1), ("right", 0, 1)):
            r, c = row + dr, column + dc
            if 0 <= r < 4 and 0 <= c < 4 and grid[r][c] != "H" and (r, c) not in seen:
                seen.add((r, c))
                queue.append((r, c, [*moves, f"[{move}]"]))
    raise AssertionError("no way")


@needs_textarena
@pytest.mark.parametrize(
    ("name", "moves", "scores"),
    [
        ("textarena:KuhnPoker-v0-extreme", ["[check]", "[fold]"], {0.0, 0.5, 1.0}),
        ("textarena:Poker-v0-small", ["[fold]"], {0.0}),
        ("textarena:WordChains-v0", ["[zzz]"], {0.0}),
    ],
)
def test_two_player_scores(name: str, moves: list[str], scores: set[float]) -> None:
    environment = make_environment(name)
    for seed in range(5):
        steps = play(environment, seed, moves)
        assert {step.score for step in steps[:-1]} == {0.0}  # not won before the end
        assert steps[-1].score in scores


@needs_textarena
def test_word_chains_can_be_won_and_lost() -> None:
    environment = make_environment("textarena:WordChains-v0")
    words, scores = everyday_words(), set()
    for seed in range(20):
        text, used = environment.reset(seed), set()
        while True:
            rule = text[text.rindex("Next word must:") :]
            letter, length = rule.split("'")[1], int(rule.split("exactly ")[1].split()[0])
            fitting = [w for w in words if w[0] == letter and len(w) == length and w not in used]
            step = environment.step(f"[{(fitting or ['none'])[0]}]")
            assert not step.failure
            if step.invalid or step.done:
                break
            used.add(fitting[0])
            text = step.text
        while not step.done:
            step = environment.step("[none]")
        scores.add(step.score)
    assert scores == {0.0, 1.0}


@needs_textarena
def test_hundreds_side_by_side() -> None:
    environments = [make_environment("textarena:Wordle-v0") for _ in range(300)]
    for seed, environment in enumerate(environments):
        environment.reset(seed)
    start = time.perf_counter()
    for seed, environment in enumerate(environments):
        environment.reset(seed)
    seconds = time.perf_counter() - start
    assert len({environment.step("[house]").text for environment in environments}) > 20
    for environment in environments:
        environment.close()
    assert seconds < 15  # 50 ms each, on a busy machine; measured: 5 ms


# reasoning-gym.


@needs_reasoning_gym
def test_question_answered_at_the_second_try() -> None:
    environment = make_environment("reasoning_gym:chain_sum")
    text = environment.reset(3)
    assert "57 + 87 + 70 =" in text
    assert environment.step("214").invalid  # no tag
    assert environment.step(tagged("213")) == Step(
        "Not right: it scores 0.00 of 1. Try again.", False, 0.0
    )
    assert environment.step(tagged("214")) == Step("", True, 1.0)
    assert environment.reset(4) != text


@needs_reasoning_gym
def test_what_a_scorer_cannot_read_is_wrong() -> None:
    environment = make_environment("reasoning_gym:prime_factorization")
    environment.reset(0)
    step = environment.step(tagged("two times three"))
    assert (step.done, step.score, step.invalid, step.failure) == (False, 0.0, True, "")


# The process that all of them share.


@needs_textarena
def test_games_of_a_lost_process_go_on() -> None:
    lost, kept = (make_environment("textarena:Wordle-v0") for _ in range(2))
    expected = play(kept, 8, ["[house]", "[table]", "[apple]"])
    lost.reset(8)
    kept.reset(8)
    assert kept.step("[house]") == expected[1]
    lost._step_limit_s = 0.0  # type: ignore[attr-defined]
    assert lost.step("[house]") == Step("", True, 0.0, failure="time limit")
    assert kept.step("[table]") == expected[2]
    process = hosted._host._process
    assert process is not None
    process.kill()
    process.wait()
    assert kept.step("[apple]") == expected[3]
