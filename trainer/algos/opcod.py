"""OPCoD: students that are each strong in another domain tutor each other.

Who samples: one student at a time (its *phase*); the others are frozen copies, its tutors.
Who teaches: the student's own EMA teacher, as in SDPO, but its reprompt also holds a tutor's
feedback on that very rollout. What each token receives: SDPO's loss under c = (s, f).

A run is R rounds. At the start of a round all students are evaluated on the validation problems of
all domains, and that decides who may speak: Δ_i = Σ_d (s_d* − s_d^i)/s_d*, and tutor i is
*cognizant*, hence heard, if Δ_i ≤ τ. Then each student has a phase of K steps. Feedback must
first name a term of the question (the anchor); what fails that check is dropped and counted, and
its rollout falls back to the demonstration alone.

How this differs from GRPO:
1. As SDPO: the signal is a distribution per token.
2. A question on which all rollouts fail still teaches, if the peer knows better.
3. Only text passes between the students, so they may differ in architecture and tokenizer.

Source: arXiv 2606.14368; its Table 4 is the default setting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cotutor.rollout.feedback import judge_feedback
from cotutor.rollout.prompts import strip_thinking
from cotutor.rollout.trajectory import Feedback, Trajectory
from cotutor.trainer.algos.base import GateVerdict, Groups, Phase, StepContext, Tutor, require
from cotutor.trainer.algos.sdpo import SDPO, SDPOConfig


@dataclass(frozen=True)
class OPCoDConfig(SDPOConfig):
    rounds: int = 2
    steps: int = 50  # of each phase; a student takes rounds × steps in all
    # cognizance: by Δ ≤ tau; domain_selective: an incognizant tutor still speaks on problems of
    # the domains where it is the best.
    gate: Literal["cognizance", "always", "never", "domain_selective"] = "cognizance"
    tau: float = 0.2
    feedback: Literal["anchored", "plain"] = "anchored"
    # round_start: the peer as it was when the round began; phase_end: after its own phase.
    tutor_snapshot: Literal["round_start", "phase_end"] = "round_start"

    def check(self, option: str, n_students: int) -> None:
        """Refuse impossible values. Raises ValueError that names the option."""
        super().check(option, n_students)
        require(n_students >= 2, "students", "at least two for opcod", n_students)
        require(self.rounds >= 1, f"{option}.rounds", "at least 1", self.rounds)
        require(self.tau >= 0, f"{option}.tau", "at least 0", self.tau)


_TIE = 1e-9  # accuracies are ratios: a Δ of exactly τ may come out a rounding above it

Scores = Mapping[str, Mapping[str, float]]  # student → domain → accuracy in [0, 1]


def gate_deltas(scores: Scores) -> dict[str, float]:
    """Δ_i = Σ_d (s_d* − s_d^i)/s_d* per student; a domain whose best score s_d* is 0 adds 0."""
    domains = next(iter(scores.values()))
    best = {d: max(s[d] for s in scores.values()) for d in domains}
    return {
        name: sum((best[d] - s[d]) / best[d] for d in domains if best[d] > 0)
        for name, s in scores.items()
    }


def best_domains(scores: Scores, student: str) -> frozenset[str]:
    """The domains on which `student` scores above 0 and nobody scores higher."""
    own = scores[student]
    return frozenset(d for d in own if own[d] > 0 and all(own[d] >= s[d] for s in scores.values()))


def assign_tutors(tutors: Sequence[Tutor], rollout: Trajectory, gate: str) -> list[Tutor]:
    """The tutors that may speak on this rollout, in order."""
    if gate == "never":
        return []
    if gate == "always":
        return list(tutors)
    selective = gate == "domain_selective"
    domain = rollout.problem.domain
    return [t for t in tutors if t.cognizant or (selective and domain in t.best_domains)]


class OPCoD(SDPO):
    feedback = True
    config: OPCoDConfig

    def __init__(self, config: OPCoDConfig) -> None:
        super().__init__(config)

    def schedule(self, n_students: int, n_problems: int, steps: int) -> list[Phase]:
        rounds = range(1, self.config.rounds + 1)
        k = steps or self.config.steps
        return [Phase(r, student, k) for r in rounds for student in range(n_students)]

    def gate(self, scores: Scores) -> dict[str, GateVerdict]:
        deltas = gate_deltas(scores)
        return {
            name: GateVerdict(delta, delta <= self.config.tau + _TIE, best_domains(scores, name))
            for name, delta in deltas.items()
        }

    def may_speak(self, cognizant: bool) -> bool:
        if self.config.gate == "cognizance":
            return cognizant
        return self.config.gate != "never"

    def annotate(self, groups: Groups, context: StepContext) -> dict[str, float]:
        """Ask the tutors for feedback on every rollout, then SDPO's contexts."""
        outcomes = self._collect_feedback([r for group in groups for r in group], context)
        return {**outcomes, **super().annotate(groups, context)}

    def _collect_feedback(
        self, rollouts: Sequence[Trajectory], context: StepContext
    ) -> dict[str, float]:
        # Each rollout is reviewed by one of its tutors, in turn; one batch of requests per tutor.
        requests: dict[str, list[Trajectory]] = defaultdict(list)
        for rollout in rollouts:
            eligible = assign_tutors(context.tutors, rollout, self.config.gate)
            if eligible:
                requests[eligible[rollout.sample % len(eligible)].name].append(rollout)
        counts: Counter[str] = Counter()
        anchored = self.config.feedback == "anchored"
        for tutor in context.tutors:
            asked = requests[tutor.name]
            raws = tutor.write(
                [
                    (
                        r.problem,
                        strip_thinking(r.text),
                        context.seed("tutor", r.problem.key, r.sample),
                    )
                    for r in asked
                ]
            )
            for rollout, raw in zip(asked, raws, strict=True):
                text, outcome, revealed = judge_feedback(raw, rollout.problem.question, anchored)
                rollout.feedback = Feedback(tutor.name, text, outcome, raw, revealed)
                counts[f"feedback/{outcome.split(':')[0]}"] += 1
                counts["feedback/revealed"] += revealed
        counts["feedback/asked"] = sum(len(asked) for asked in requests.values())
        return dict(counts)
