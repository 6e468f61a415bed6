"""Who may tutor whom: the gate at the start of a round, and the peers' voices in a phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotutor.rollout.engine import Engine
from cotutor.trainer.algos.base import Algorithm, Tutor
from cotutor.trainer.collect import ask_tutor
from cotutor.trainer.config import Config
from cotutor.trainer.evaluation import accuracy
from cotutor.trainer.students import Student


def open_gate(algorithm: Algorithm, raw_scores: Mapping[str, Any]) -> dict[str, Any]:
    """The gate's record for a round, from {student: {domain: {problem key: share right}}}."""
    scores = {
        name: {domain: accuracy(values).mean for domain, values in by_domain.items()}
        for name, by_domain in raw_scores.items()
    }
    gate = algorithm.gate(scores)
    return {
        "scores": scores,
        "deltas": {name: g.delta for name, g in gate.items()},
        "cognizant": {name: g.cognizant for name, g in gate.items()},
        "best_domains": {name: sorted(g.best_domains) for name, g in gate.items()},
    }


def start_tutors(
    algorithm: Algorithm,
    config: Config,
    peers: Sequence[Student],
    engines: Sequence[Engine],
    gate: Mapping[str, Any],
) -> list[Tutor]:
    """One `Tutor` for each peer and its engine, with the gate's verdict of this round."""
    anchored = algorithm.config.feedback == "anchored"
    return [
        Tutor(
            peer.name,
            gate["cognizant"][peer.name],
            frozenset(gate["best_domains"][peer.name]),
            _writer(engine, peer, config, anchored),
        )
        for peer, engine in zip(peers, engines, strict=True)
    ]


def _writer(
    engine: Engine, tutor: Student, config: Config, anchored: bool
) -> Callable[[Sequence[tuple[Any, str, int]]], list[str]]:
    def write(requests: Sequence[tuple[Any, str, int]]) -> list[str]:
        engine.wake()
        texts = ask_tutor(engine, tutor, requests, config.rollout, anchored=anchored)
        engine.sleep(level=1)
        return texts

    # Frozen, it is awake only while it is asked: the memory is the student's otherwise.
    engine.sleep(level=1)

    return write
