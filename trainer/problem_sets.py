"""Training, validation and test problems of every domain, and which ones a step takes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cotutor.rollout import sandbox
from cotutor.rollout.curriculum import LEARNERS, rows
from cotutor.rollout.games import game_problem
from cotutor.rollout.problems import DataError, overlap, read_problems
from cotutor.rollout.tasks import DOMAINS, make_problems
from cotutor.rollout.trajectory import Problem
from cotutor.trainer.config import Config, ConfigError, DataConfig, DomainConfig

# The embedded problems don't depend on a run's seed: reported figures compare.
_TRAIN, _VALIDATION, _TEST = 1, 2, 3


@dataclass(frozen=True)
class ProblemSets:
    """By domain. `notes` counts what was left out or overlaps, for the metrics."""

    train: Mapping[str, list[Problem]]
    validation: Mapping[str, list[Problem]]
    test: Mapping[str, list[Problem]]
    notes: Mapping[str, int] = field(default_factory=dict)


def load_problem_sets(run: Config) -> ProblemSets:
    """Read or generate all problems. Raises DataError or ConfigError that names file or option."""
    config = run.data
    train: dict[str, list[Problem]] = {}
    validation: dict[str, list[Problem]] = {}
    test: dict[str, list[Problem]] = {}
    notes: dict[str, int] = {}
    for domain in config.domains:
        if config.source == "files":
            judging = _judging(domain, run.rollout.allow_restricted_sandbox)
            _read(config, domain, judging, train, validation, test, notes)
        elif config.source == "games":
            train[domain.name], validation[domain.name], test[domain.name] = _games(config, domain)
        else:
            _generate(config, domain, train, validation, test)
    return ProblemSets(train, validation, test, notes)


def _judging(domain: DomainConfig, allow_restricted: bool) -> dict[str, Any]:
    """Options of a domain's verifier. Raises ConfigError where programs can't be run."""
    if domain.kind != "code":
        return {}
    try:
        sandbox.level(allow_restricted)
    except sandbox.SandboxUnavailable as error:
        option = "--rollout.allow-restricted-sandbox"
        raise ConfigError(
            f"data.domains: {domain.name} is judged by running programs, but "
            f"{str(error).replace('set allow_restricted', f'pass {option}')}"
        ) from error
    return {"allow_restricted": allow_restricted}


def _read(
    config: DataConfig,
    domain: DomainConfig,
    judging: Mapping[str, Any],
    train: dict[str, list[Problem]],
    validation: dict[str, list[Problem]],
    test: dict[str, list[Problem]],
    notes: dict[str, int],
) -> None:
    def read(name: str) -> list[Problem]:
        path = Path(config.root) / name
        if not path.is_file():
            raise DataError(
                f"{path}: no such file; set --data.root to the folder that holds {name}"
            )
        extra = {"fields": domain.fields} if domain.fields else {}
        problems, skipped = read_problems(
            path,
            domain=domain.name,
            kind=domain.kind,
            skip_bad_rows=config.skip_bad_rows,
            shown_tests=domain.shown_tests,
            **extra,
        )
        problems = [replace(p, options={**p.options, **judging}) for p in problems]
        notes[f"{domain.name}/skipped_rows"] = notes.get(f"{domain.name}/skipped_rows", 0) + skipped
        return problems

    everything, held_out = read(domain.train), read(domain.test)
    shared = set(overlap(everything, held_out))
    notes[f"{domain.name}/test_questions_also_in_train"] = len(shared)
    # Every run with the same files has the same validation problems, whatever its seed.
    order = sorted(everything, key=lambda p: p.key)
    random.Random(domain.name).shuffle(order)
    n = config.validation_problems_per_domain
    if len(order) <= n:
        raise ConfigError(
            f"--data.validation-problems-per-domain: {domain.name} has only {len(order)} training"
            f" rows, and {n} would be taken out of them"
        )
    chosen = {p.key for p in order[:n]}
    validation[domain.name] = [p for p in everything if p.key in chosen]
    rest = [p for p in everything if p.key not in chosen]
    train[domain.name] = rest[: config.train_problems_per_domain or None]
    test[domain.name] = held_out[: config.test_problems_per_domain or None]


def _games(config: DataConfig, domain: DomainConfig) -> tuple[list[Problem], ...]:
    """Episodes for training, validation and test, by their seeds: none is in two sets."""
    first = config.problem_seed * 1_000_000
    sets = []
    for count in (
        config.train_problems_per_domain,
        config.validation_problems_per_domain,
        config.test_problems_per_domain,
    ):
        seeds = range(first, first + count)
        sets.append([game_problem(domain.game, seed, domain.name) for seed in seeds])
        first += count
    return tuple(sets)


def _generate(
    config: DataConfig,
    domain: DomainConfig,
    train: dict[str, list[Problem]],
    validation: dict[str, list[Problem]],
    test: dict[str, list[Problem]],
) -> None:
    name = domain.name
    if name not in DOMAINS:
        raise ConfigError(
            f"data.domains: {name} is not embedded; choose of {', '.join(DOMAINS)}, or source ="
            ' "files"'
        )
    seed = 10 * config.problem_seed
    test[name] = make_problems(name, config.test_problems_per_domain, seed=seed + _TEST)
    taken = {p.question for p in test[name]}
    n = config.validation_problems_per_domain
    validation[name] = make_problems(name, n, seed=seed + _VALIDATION, exclude=taken)
    taken |= {p.question for p in validation[name]}
    if config.source == "embedded":
        n = config.train_problems_per_domain
        train[name] = make_problems(name, n, seed=seed + _TRAIN, exclude=taken)


def curriculum_problems(config: Config, student: str, exclude: frozenset[str]) -> list[Problem]:
    """The embedded training rows of one student, as problems with given messages and solution."""
    if student != "base" and student not in LEARNERS:
        raise ConfigError(
            f"students: the embedded curriculum teaches base, {', '.join(LEARNERS)}, not {student}"
        )
    n = config.data.train_problems_per_domain * len(config.data.domains)
    stream = itertools.islice(rows(student, config.seed, exclude), n)
    return [
        Problem(
            key=f"{student}/{number}",
            domain="curriculum",
            question=messages[-1]["content"],
            gold="",
            kind="text",
            solution=target,
            messages=tuple((m["role"], m["content"]) for m in messages),
        )
        for number, (messages, target) in enumerate(stream)
    ]


class Sampler:
    """Draws each step's problems, equally many of each domain, epoch after epoch.

    The draw is a function of (seed, step) alone, so a resumed run draws what an uninterrupted one
    would have drawn.
    """

    def __init__(self, problems: Mapping[str, Sequence[Problem]], per_step: int, seed: int) -> None:
        self._problems = {d: list(p) for d, p in problems.items() if p}
        self._seed = seed
        domains = list(self._problems)
        share, rest = divmod(per_step, len(domains))
        self._counts = {d: share + (n < rest) for n, d in enumerate(domains)}
        self._order = _memo(self._shuffled)

    @property
    def n_problems(self) -> int:
        """How many different problems there are to draw."""
        return sum(len(problems) for problems in self._problems.values())

    def _shuffled(self, key: tuple[str, int]) -> list[int]:
        domain, epoch = key
        order = list(range(len(self._problems[domain])))
        random.Random(f"{self._seed} {domain} {epoch}").shuffle(order)
        return order

    def step(self, step: int) -> list[Problem]:
        """The problems of step `step` (from 0)."""
        chosen = []
        for domain, count in self._counts.items():
            problems = self._problems[domain]
            for i in range(step * count, (step + 1) * count):
                epoch, position = divmod(i, len(problems))
                chosen.append(problems[self._order((domain, epoch))[position]])
        return chosen


def _memo(
    function: Callable[[tuple[str, int]], list[int]],
) -> Callable[[tuple[str, int]], list[int]]:
    """Remember the last result for each domain (an epoch is drawn once, old ones are forgotten)."""
    last: dict[str, tuple[int, list[int]]] = {}

    def cached(key: tuple[str, int]) -> list[int]:
        domain, epoch = key
        if domain not in last or last[domain][0] != epoch:
            last[domain] = (epoch, function(key))
        return last[domain][1]

    return cached
