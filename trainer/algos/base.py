"""What the loop asks of an algorithm: who trains when, what each token receives, and the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from cotutor.rollout.trajectory import Trajectory

MAX = "max_"  # how names of greatest values begin, among names of sums
Groups = Sequence[Sequence[Trajectory]]  # one group: the rollouts of one problem, in sample order


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps of one student. `round` counts from 1."""

    round: int
    student: int
    steps: int


class GateVerdict(NamedTuple):
    """One student in one round: Δ ≥ 0, may it tutor, and the domains where nobody is better."""

    delta: float
    cognizant: bool
    best_domains: frozenset[str]


@dataclass(frozen=True)
class Tutor:
    """A frozen peer that may be asked for feedback.

    `write(requests)` takes (problem, response text, seed) triples and returns raw texts, in order.
    `cognizant` is the gate's verdict for this round; `best_domains` are those where this peer has
    the best validation score.
    """

    name: str
    cognizant: bool
    best_domains: frozenset[str]
    write: Callable[[Sequence[tuple[Any, str, int]]], list[str]]


@dataclass(frozen=True)
class StepContext:
    """What `annotate` may use besides the rollouts.

    `reprompt(problem, demonstration, feedback)` renders the teacher's prompt within its budget and
    counts what it cut, None if nothing of either is left; `seed(*key)` is a 63-bit function of
    (run seed, step, key).
    """

    tutors: Sequence[Tutor]
    reprompt: Callable[[Any, str, str], list[int] | None]
    seed: Callable[..., int]


@dataclass(frozen=True)
class Rows:
    """The trained tokens of one micro-batch, one row each; N rows from B sequences.

    targets (N,) int64; turn_ids, sequence_ids (N,) int32; rollout_logprobs (N,) float32 nats;
    advantages (N,) float32; weights (N,) float32, 0 for padding rows; sampled (N,) bool, True where
    the student sampled the target, False in the teacher's turns of a dialogue, which only a world
    model trains (no rollout log-prob, no advantage); temperature > 0.
    """

    targets: torch.Tensor
    turn_ids: torch.Tensor
    sequence_ids: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sampled: torch.Tensor
    temperature: float


@dataclass(frozen=True)
class Heads:
    """Hidden states at the trained rows and the LM heads: (N, D), (V, D); teacher's may be None."""

    hidden: torch.Tensor
    weight: torch.Tensor
    teacher_hidden: torch.Tensor | None = None
    teacher_weight: torch.Tensor | None = None
    chunk_rows: int | None = None


class LossSums(NamedTuple):
    """`loss`: a scalar sum with a gradient; `sums`: detached 0-d sums for metrics, by name;
    those whose name begins with MAX are greatest values instead."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]


def require(ok: bool, option: str, wanted: str, got: object) -> None:
    """Raise ValueError "--<option> must be <wanted>; got <got>" unless `ok`."""
    if not ok:
        raise ValueError(f"{option} must be {wanted}; got {got}")


def constant_with_warmup(lr: float, warmup_steps: int, step: int) -> float:
    """Linear over the first `warmup_steps` steps (step 0 is not 0), then constant."""
    return lr * min(1.0, (step + 1) / max(1, warmup_steps))


def one_phase_each(n_students: int, steps: int) -> list[Phase]:
    """Every student alone, one after the other."""
    return [Phase(1, student, steps) for student in range(n_students)]


class Algorithm(ABC):
    """One algorithm. Attributes say what it needs; the loop provides just that."""

    config: Any
    on_policy = True  # False: it trains on given solutions, no engine samples
    teacher: Literal["ema", "current", "initial", "trust_region"] | None = None
    teacher_rate = 0.0  # EMA rate, or the interpolation rate of trust_region
    feedback = False  # peers tutor: validation scores, gate and tutor engines are needed
    denominator: Literal["sequences", "tokens"] = "tokens"  # of the sum of row losses
    # The weight of a world model: the mean over all tokens of the teacher's turns; 0: none.
    world_model_coef = 0.0
    # Who guides the student through a dialogue of several turns, knowing the solution: the student
    # itself, or its initial weights. None: a single turn.
    guide: Literal["self", "frozen"] | None = None

    @abstractmethod
    def schedule(self, n_students: int, n_problems: int, steps: int) -> list[Phase]:
        """The run as phases. `steps` > 0 replaces the configured number of steps of a phase."""

    @abstractmethod
    def learning_rate(self, step: int, total: int) -> float:
        """The rate of a student's optimizer step `step` (from 0) of `total` over all its phases."""

    def gate(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, GateVerdict]:
        """Verdicts from {student: {domain: accuracy}}; asked only where `feedback` is True."""
        return {}

    def may_speak(self, cognizant: bool) -> bool:
        """Can a peer with this verdict be heard in a round? False: it needs no engine."""
        return self.feedback and cognizant

    @abstractmethod
    def annotate(self, groups: Groups, context: StepContext) -> dict[str, float]:
        """Put advantages or teacher contexts on the rollouts; returns counts for the metrics."""

    @abstractmethod
    def row_weights(self, trajectory: Trajectory) -> float:
        """The weight of each trained token of a rollout, before the global denominator; 0: out."""

    @abstractmethod
    def loss(self, heads: Heads, rows: Rows) -> LossSums:
        """The sum over rows of weight × loss, undivided."""
