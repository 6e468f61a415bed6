"""Does a tutor's feedback break right answers? `--do break-rate`, the paper's analysis.

Each student answers each validation problem several times, each peer comments on every answer,
and the student answers again with the comment before it. Break rate: the share of right answers
that are wrong afterwards; repair rate: the share of wrong answers that are right afterwards. Both
by tutor, by the gate's verdict on it, and by difficulty: how many of the first answers were wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cotutor.rollout.chat import fit_reprompt
from cotutor.rollout.dialogue import answer
from cotutor.rollout.engine import Sampling, request_seed
from cotutor.rollout.feedback import judge_feedback
from cotutor.rollout.prompts import strip_thinking
from cotutor.rollout.trajectory import Problem, Trajectory
from cotutor.rollout.verifiers import VerifierPool
from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.collect import ask_tutor, judge, sample_groups, share
from cotutor.trainer.config import Config, ConfigError
from cotutor.trainer.engines import release
from cotutor.trainer.evaluation import evaluate
from cotutor.trainer.peers import open_gate
from cotutor.trainer.problem_sets import ProblemSets
from cotutor.trainer.students import Student
from cotutor.trainer.world import World

# Bands of difficulty, as shares of the first answers that were wrong: with 8 samples these are
# the paper's 0–1, 0–4, 5–7 and 7 wrong.
_BANDS = {
    "easiest": (0.0, 1 / 8),
    "easier": (0.0, 4 / 8),
    "harder": (5 / 8, 7 / 8),
    "hardest": (7 / 8, 7 / 8),
}


def break_rate(
    config: Config,
    algorithm: Algorithm,
    students: Sequence[Student],
    problems: ProblemSets,
    world: World,
) -> dict[str, Any]:
    """Rates for every ordered pair of students; see the module. Collective.

    Raises ConfigError if the algorithm has no tutors.
    """
    if not algorithm.feedback:
        raise ConfigError(f"--do break-rate: {config.algo} has no tutors; use --algo opcod")
    r = config.rollout
    sampling = Sampling(r.temperature, r.top_p, r.max_response_tokens)
    everything = [p for domain in problems.validation.values() for p in domain]
    mine = share(everything, world.rank, world.size)
    engines = {s.name: s.start_engine(s.config.model, config, world) for s in students}
    counts: dict[str, dict[str, float]] = {}
    with VerifierPool(r.verifier_workers, r.verifier_timeout_s) as pool:
        scores = {
            s.name: evaluate(
                engines[s.name],
                s,
                problems.validation,
                config.evaluation.validation_samples,
                config,
                world,
                pool,
                "validation",
            )
            for s in students
        }
        gate = open_gate(algorithm, scores)
        for tutee in students:
            seeds = (config.seed, "break-rate", tutee.name)
            first = sample_groups(
                engines[tutee.name], tutee, mine, r.samples_per_question, sampling, seeds
            )
            judge(first, pool)
            for tutor in students:
                if tutor is tutee:
                    continue
                again = _after_feedback(
                    config, algorithm, tutee, tutor, first, sampling, engines, pool
                )
                name = f"{tutor.name} → {tutee.name}"
                counts[name] = world.sum(_count(first, again))
    for engine in engines.values():
        release(engine)
    return {
        "gate": gate,
        "pairs": {
            name: {"cognizant": gate["cognizant"][name.split(" → ")[0]], **_rates(c)}
            for name, c in counts.items()
        },
    }


def _after_feedback(
    config: Config,
    algorithm: Algorithm,
    tutee: Student,
    tutor: Student,
    first: Sequence[Sequence[Trajectory]],
    sampling: Sampling,
    engines: dict[str, Any],
    pool: VerifierPool,
) -> list[Trajectory | None]:
    """The second answer to each first one, in order; None where the feedback was dropped."""
    rollouts = [rollout for group in first for rollout in group]
    anchored = algorithm.config.feedback == "anchored"

    def seed(purpose: str, rollout: Trajectory) -> int:
        key = (purpose, tutor.name, tutee.name, rollout.problem.key, rollout.sample)
        return request_seed(config.seed, *key)

    requests: list[tuple[Problem, str, int]] = [
        (r.problem, strip_thinking(r.text), seed("tutor", r)) for r in rollouts
    ]
    raws = ask_tutor(engines[tutor.name], tutor, requests, config.rollout, anchored=anchored)
    second: list[Trajectory | None] = []
    for rollout, raw in zip(rollouts, raws, strict=True):
        text, _, _ = judge_feedback(raw, rollout.problem.question, anchored)
        if not text:
            second.append(None)
            continue
        limit = config.rollout.max_reprompt_tokens
        ids, _ = fit_reprompt(tutee.chat, tutee.prompts, rollout.problem, "", text, limit)
        second.append(Trajectory.start(rollout.problem, rollout.sample, ids))
    asked = [r for r in second if r is not None]
    answer(engines[tutee.name], tutee.chat, asked, sampling, [seed("again", r) for r in asked])
    judge([asked], pool)
    return second


def _count(
    first: Sequence[Sequence[Trajectory]], second: Sequence[Trajectory | None]
) -> dict[str, float]:
    counts: dict[str, float] = defaultdict(float)
    answers = iter(second)
    for group in first:
        wrong = sum(r.reward == 0 for r in group) / len(group)
        bands = ["all", *(b for b, (low, high) in _BANDS.items() if low <= wrong <= high)]
        for before in group:
            after = next(answers)
            if after is None:
                counts["dropped"] += 1
                continue
            for band in bands:
                was = "right" if before.reward else "wrong"
                counts[f"{band}/{was}"] += 1
                counts[f"{band}/{was}_changed"] += before.reward != after.reward
    return dict(counts)


def _rates(counts: dict[str, float]) -> dict[str, Any]:
    """Rates in [0, 1] with their denominators; None where there is nothing to divide by."""

    def rate(band: str, was: str) -> float | None:
        n = counts.get(f"{band}/{was}", 0.0)
        return counts.get(f"{band}/{was}_changed", 0.0) / n if n else None

    return {
        "dropped": int(counts.get("dropped", 0)),
        **{
            band: {
                "right": int(counts.get(f"{band}/right", 0)),
                "broken": rate(band, "right"),
                "wrong": int(counts.get(f"{band}/wrong", 0)),
                "repaired": rate(band, "wrong"),
            }
            for band in ("all", *_BANDS)
        },
    }
