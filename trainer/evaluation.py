"""Accuracy of a student on given problems: avg@k, with the standard error over problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotutor.rollout.engine import Engine, Sampling
from cotutor.rollout.trajectory import Problem
from cotutor.rollout.verifiers import VerifierPool
from cotutor.trainer.collect import judge, prompt_ids, sample_groups, share
from cotutor.trainer.config import Config
from cotutor.trainer.dialogues import sample_dialogues
from cotutor.trainer.students import Student
from cotutor.trainer.world import World


@dataclass(frozen=True)
class Accuracy:
    """avg@k over `problems` problems, in [0, 1]; `stderr` over problems (0 for fewer than two).

    `truncated` counts responses cut by length, `too_long` problems whose prompt exceeds the budget;
    both are wrong.
    """

    mean: float
    stderr: float
    problems: int
    truncated: int = 0
    too_long: int = 0


def evaluate(
    engine: Engine,
    student: Student,
    problems: Mapping[str, Sequence[Problem]],
    samples: int,
    config: Config,
    world: World,
    pool: VerifierPool,
    purpose: str,
) -> dict[str, dict[str, float]]:
    """Mean accuracy by problem key, for each domain; collective, every problem once.

    A game is played to its end and counts by its score.

    Returns {domain: {key: share of right samples}}, with {"__truncated"} and {"__too_long"} counts
    beside them. The sampling seeds depend on (seed, purpose, problem, sample), not on the student:
    the start and the end of a run are compared on the same draws.
    """
    everything = [p for domain in problems.values() for p in domain]
    mine = share(everything, world.rank, world.size)
    limit = config.rollout.max_prompt_tokens
    fitting = [p for p in mine if len(prompt_ids(student, p)) <= limit]
    e = config.evaluation
    sampling = Sampling(e.temperature, e.top_p, config.rollout.max_response_tokens)
    seeds = (config.seed, purpose)
    single = [p for p in fitting if p.kind != "game"]
    groups = sample_groups(engine, student, single, samples, sampling, seeds)
    judge(groups, pool)
    games = [p for p in fitting if p.kind == "game"]
    groups += sample_dialogues(
        engine, engine, student, games, samples, sampling, config, pool, seeds
    )
    scores: dict[str, dict[str, float]] = {domain: {} for domain in problems}
    for p in mine:
        scores[p.domain][p.key] = 0.0
    for group in groups:
        problem = group[0].problem
        scores[problem.domain][problem.key] = sum(r.reward for r in group) / samples
        for r in group:
            if r.finish_reason == "length":
                _count(scores[problem.domain], "__truncated")
    fits = {p.key for p in fitting}
    for p in mine:
        if p.key not in fits:
            _count(scores[p.domain], "__too_long")
    merged: dict[str, dict[str, float]] = {domain: {} for domain in problems}
    for part in world.gather(scores):
        for domain, values in part.items():
            for key, value in values.items():
                if key.startswith("__"):
                    value += merged[domain].get(key, 0.0)
                merged[domain][key] = value
    return merged


def _count(scores: dict[str, float], name: str) -> None:
    scores[name] = scores.get(name, 0.0) + 1


def accuracy(scores: Mapping[str, float], keys: Sequence[str] | None = None) -> Accuracy:
    """Summarise one domain's scores by problem, over all problems or over `keys` alone."""
    wanted = [k for k in scores if not k.startswith("__")] if keys is None else list(keys)
    values = [scores[k] for k in wanted]
    n = len(values)
    mean = math.fsum(values) / n if n else 0.0
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else 0.0
    return Accuracy(
        mean,
        math.sqrt(variance / n) if n else 0.0,
        n,
        int(scores.get("__truncated", 0)),
        int(scores.get("__too_long", 0)),
    )
