"""Dialogues as the trainer needs them: sampled for a step, and scored turn by turn.

Three settings are scored: with a teacher who knows the solution (the student's initial weights, so
that every checkpoint has the same teacher), with the student as its own critic, and games.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cotutor.rollout.dialogue import Limits, Partner, converse
from cotutor.rollout.engine import Engine, Sampling, request_seed
from cotutor.rollout.games import GamePartner, game_problem
from cotutor.rollout.teacher import PrivilegedTeacher, SelfCritic
from cotutor.rollout.trajectory import Problem, Trajectory
from cotutor.rollout.verifiers import VerifierPool
from cotutor.trainer.collect import prompt_ids, share
from cotutor.trainer.config import Config
from cotutor.trainer.students import Student
from cotutor.trainer.world import World

_GAME_TURNS = 1000  # games count their own turns


def sample_dialogues(
    engine: Engine,
    guide: Engine,
    student: Student,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    config: Config,
    pool: VerifierPool,
    seed_parts: tuple[object, ...],
    *,
    critic: bool = False,
    seconds: dict[str, float] | None = None,
) -> list[list[Trajectory]]:
    """`samples` finished and judged dialogues of each problem.

    `guide` serves the teacher who knows the solution; with `critic` the student stands in its
    place. Games reply for themselves. `seconds` collects the time of verifying and of feedback.
    """
    groups = []
    for problem in problems:
        start = prompt_ids(student, problem)
        groups.append([Trajectory.start(problem, n, start) for n in range(samples)])
    everything = [d for group in groups for d in group]
    d = config.dialogue
    replies = Sampling(sampling.temperature, sampling.top_p, d.max_guidance_tokens)

    def seed(*parts: object) -> int:
        return request_seed(*seed_parts, *parts)

    teacher: Partner = (
        SelfCritic(engine, student.chat, pool, replies, seed)
        if critic
        else PrivilegedTeacher(
            engine=guide,
            chat=student.chat,
            prompts=student.prompts,
            pool=pool,
            sampling=replies,
            max_prompt_tokens=config.rollout.max_reprompt_tokens,
            redrafts=d.redrafts,
            asks_judge=d.leak_judge,
            seed=seed,
        )
    )
    games = GamePartner(student.chat)
    try:
        for partner, members, turns in (
            (teacher, [t for t in everything if t.problem.kind != "game"], d.max_turns),
            (games, [t for t in everything if t.problem.kind == "game"], _GAME_TURNS),
        ):
            timed = _Timed(partner, {} if seconds is None else seconds)
            limits = Limits(turns, d.max_dialogue_tokens, d.max_guidance_tokens)
            converse(engine, student.chat, members, timed, sampling, limits, seed_parts)
    finally:
        games.close()
    return groups


class _Timed:
    """A partner whose verdicts and replies are timed."""

    def __init__(self, partner: Partner, seconds: dict[str, float]) -> None:
        self._partner = partner
        self._seconds = seconds

    def judge(self, dialogues: Sequence[Trajectory]) -> list[bool]:
        with timed(self._seconds, "verify"):
            return self._partner.judge(dialogues)

    def reply(self, dialogues: Sequence[Trajectory]) -> None:
        with timed(self._seconds, "feedback"):
            self._partner.reply(dialogues)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add what the block takes to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def evaluate_dialogues(
    engine: Engine,
    guide: Engine,
    student: Student,
    problems: Mapping[str, Sequence[Problem]],
    config: Config,
    world: World,
    pool: VerifierPool,
) -> dict[str, dict[str, Any]]:
    """Records of the settings in `config.dialogue.evaluate`; collective, every problem once.

    A record of "teacher" and "self" holds, over all domains, the cumulative accuracy after 1 … n
    answers with its standard error over problems, and the shares and counts of `_tally`; one of
    "games" the mean score of every game. The draws depend on (seed, setting, problem, sample), not
    on the student.
    """
    settings = config.dialogue.evaluate
    return {
        setting: _score(setting, engine, guide, student, problems, config, world, pool)
        for setting in settings
    }


def _score(
    setting: str,
    engine: Engine,
    guide: Engine,
    student: Student,
    problems: Mapping[str, Sequence[Problem]],
    config: Config,
    world: World,
    pool: VerifierPool,
) -> dict[str, Any]:
    if setting == "games":
        asked = [
            game_problem(name, n)
            for name in config.dialogue.games
            for n in range(config.dialogue.episodes_per_game)
        ]
    else:
        asked = [p for members in problems.values() for p in members]
    mine = share(asked, world.rank, world.size)
    limit = config.rollout.max_prompt_tokens
    fitting = [p for p in mine if len(prompt_ids(student, p)) <= limit]
    e = config.evaluation
    started = time.perf_counter()
    groups = sample_dialogues(
        engine,
        guide,
        student,
        fitting,
        1 if setting == "games" else e.samples,
        Sampling(e.temperature, e.top_p, config.rollout.max_response_tokens),
        config,
        pool,
        (config.seed, "dialogue", setting),
        critic=setting == "self",
    )
    seconds = time.perf_counter() - started
    scores = {p.key: (p.domain, _by_turn([], config.dialogue.max_turns)) for p in mine}
    for group in groups:
        problem = group[0].problem
        scores[problem.key] = (problem.domain, _by_turn(group, config.dialogue.max_turns))
    dialogues = [d for group in groups for d in group]
    counts = world.sum({**_tally(dialogues), "too_long": len(mine) - len(fitting)})
    merged = {key: value for part in world.gather(scores) for key, value in part.items()}
    counts["seconds_per_turn"] = max(world.gather(seconds)) / max(1.0, counts["turns"])
    if setting == "games":
        return {"score": _mean_by_domain(merged), **_shares(counts)}
    curve, stderr = _curve([by_turn for _, by_turn in merged.values()])
    domains = {}
    for name in problems:
        domains[name] = _curve([by_turn for domain, by_turn in merged.values() if domain == name])[
            0
        ]
    return {"accuracy": curve, "stderr": stderr, "domains": domains, **_shares(counts)}


def _by_turn(group: Sequence[Trajectory], turns: int) -> list[float]:
    """The share of a problem's dialogues that were right within 1 … n answers; a game's score."""
    if group and group[0].problem.kind == "game":
        return [sum(d.reward for d in group) / len(group)]
    return [
        sum(any(a.score == 1 for a in d.answers[:n]) for d in group) / max(1, len(group))
        for n in range(1, turns + 1)
    ]


def _curve(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Mean and standard error over problems, turn by turn."""
    n = len(values)
    means = [math.fsum(column) / n for column in zip(*values, strict=True)]
    errors = []
    for mean, column in zip(means, zip(*values, strict=True), strict=True):
        variance = math.fsum((v - mean) ** 2 for v in column) / max(1, n - 1)
        errors.append(math.sqrt(variance / n))
    return means, errors


def _mean_by_domain(scores: Mapping[str, tuple[str, list[float]]]) -> dict[str, float]:
    by_domain: dict[str, list[float]] = {}
    for domain, values in scores.values():
        by_domain.setdefault(domain, []).append(values[0])
    return {name: math.fsum(values) / len(values) for name, values in sorted(by_domain.items())}


def _tally(dialogues: Sequence[Trajectory]) -> dict[str, float]:
    """Counts over dialogues, for sums over ranks.

    `repeats` are answers that are, word for word, the dialogue's answer before them.
    """
    said = [guidance for d in dialogues for guidance in d.guidance]
    return {
        "dialogues": len(dialogues),
        "turns": sum(len(d.answers) for d in dialogues),
        "second_answers": sum(max(0, len(d.answers) - 1) for d in dialogues),
        "repeats": sum(
            before.text.strip() == after.text.strip()
            for d in dialogues
            for before, after in zip(d.answers, d.answers[1:], strict=False)
        ),
        "messages": len(said),
        "drafts": sum(len(g.drafts) for g in said),
        "leaks": sum(g.leaks for g in said),
        "neutral": sum(g.neutral for g in said),
        "student_tokens": sum(d.n_tokens("student") for d in dialogues),
        "teacher_tokens": sum(d.n_tokens("teacher") for d in dialogues),
        "truncated": sum(d.status == "truncated" for d in dialogues),
        "out_of_room": sum(d.status == "out_of_room" for d in dialogues),
        "invalid_moves": sum(a.status == "invalid" for d in dialogues for a in d.answers),
        "failed_games": sum(d.status == "failed" for d in dialogues),
    }


def _shares(counts: Mapping[str, float]) -> dict[str, Any]:
    """The counts that are reported as they are, and the rates made of the others."""
    turns = max(1.0, counts["turns"])
    return {
        "repeated": counts["repeats"] / max(1.0, counts["second_answers"]),
        "leaked": counts["leaks"] / max(1.0, counts["drafts"]),
        "student_tokens_per_turn": counts["student_tokens"] / turns,
        "teacher_tokens_per_message": counts["teacher_tokens"] / max(1.0, counts["messages"]),
        "seconds_per_turn": round(counts["seconds_per_turn"], 5),
        **{
            name: int(counts[name])
            for name in (
                *("dialogues", "turns", "messages", "neutral", "truncated", "out_of_room"),
                *("too_long", "invalid_moves", "failed_games"),
            )
        },
    }
