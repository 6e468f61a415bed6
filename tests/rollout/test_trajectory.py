"""What a trajectory keeps, and which of its tokens are trained."""

from __future__ import annotations

import pytest

from cotutor.rollout.trajectory import Problem, Trajectory

PROBLEM = Problem(key="k", domain="d", question="q", gold="g", kind="text")


def dialogue() -> Trajectory:
    trajectory = Trajectory.start(PROBLEM, 0, [1, 2, 3])
    trajectory.append("student", [4, 9], [-0.5, -0.1])
    trajectory.append("glue", [7])
    trajectory.append("tutor", [5, 9], [-1.0, -2.0])
    trajectory.append("glue", [7])
    trajectory.append("student", [9], [-0.3])
    return trajectory


def test_ids_and_logprobs_only_grow() -> None:
    trajectory = Trajectory.start(PROBLEM, 0, [1, 2, 3])
    for role, ids, logprobs in [("student", [4, 9], [-0.5, -0.1]), ("glue", [7], None)]:
        before = list(trajectory.ids), list(trajectory.logprobs)
        trajectory.append(role, ids, logprobs)  # type: ignore[arg-type]
        assert trajectory.ids == before[0] + ids
        assert trajectory.logprobs == before[1] + (logprobs or [0.0] * len(ids))


def test_turns_cover_all_ids_without_gaps() -> None:
    turns = dialogue().turns
    assert turns[0].start == 0
    assert [turn.stop for turn in turns[:-1]] == [turn.start for turn in turns[1:]]
    assert turns[-1].stop == len(dialogue().ids)


def test_trained_are_the_students_tokens_end_token_included_whatever_their_values() -> None:
    # 9 is the end token: trained where the student sampled it, not where the tutor did.
    assert dialogue().turn_ids() == [-1, -1, -1, 0, 0, -1, -1, -1, -1, 1]
    assert dialogue().response_ids() == [4, 9, 9]


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2]
    trajectory = Trajectory.start(PROBLEM, 0, prompt)
    trajectory.append("student", [3], [-1.0])
    assert prompt == [1, 2]


def test_logprobs_must_fit_the_ids() -> None:
    with pytest.raises(AssertionError):
        Trajectory.start(PROBLEM, 0, [1]).append("student", [1, 2], [-1.0])
