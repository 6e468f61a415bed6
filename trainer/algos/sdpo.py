"""SDPO: a student distils from itself, shown a verified solution or feedback.

Who samples: the student. Who teaches: a teacher with the student's own architecture (by default
an exponential moving average of its weights) that reads a *reprompt*: the question with a
demonstration, feedback, or both, and then scores the very tokens that the student sampled.
What each token receives: the top-K Jensen-Shannon divergence (with a tail bucket) between the
student's and the teacher's next-token distribution, times the token's importance weight, divided
by the length of its response: (1/B) Σ_i mask_i (1/|y_i|) Σ_t w_t JSD(student_t ‖ teacher_t).

How this differs from GRPO:
1. The signal is a distribution per token, not one advantage per response.
2. A wrong response is corrected towards something, not only pushed away from.
3. A group whose rollouts are all right still teaches; one whose rollouts are all wrong, without
   feedback, is masked out (but stays in the denominator B), as it is in GRPO.
4. Each response counts the same, whatever its length; GRPO here counts each token the same.

Source: arXiv 2601.20802; its setting is the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cotutor.kernels import importance_weights, linear_token_logprobs, linear_topk_jsd
from cotutor.rollout.prompts import strip_thinking
from cotutor.rollout.trajectory import Trajectory
from cotutor.trainer.algos.base import (
    Algorithm,
    Groups,
    Heads,
    LossSums,
    Phase,
    Rows,
    StepContext,
    constant_with_warmup,
    one_phase_each,
    require,
)


@dataclass(frozen=True)
class SDPOConfig:
    lr: float = 1e-5
    warmup_steps: int = 5
    steps: int = 100
    # 0: KL(teacher ‖ student), 1: KL(student ‖ teacher), between: Jensen-Shannon.
    alpha: float = 0.5
    k: int = 100
    tail: Literal["exact", "clamped", "drop"] = "exact"
    importance_upper: float = 2.0
    teacher: Literal["ema", "current", "initial", "trust_region"] = "ema"
    # ema: share of the student's weights per step; trust_region: share of the current logits.
    teacher_rate: float = 0.05
    # A rollout never demonstrates itself (the published code; the paper says "earliest correct").
    exclude_self: bool = True
    # Rollouts with neither demonstration nor feedback receive no loss.
    mask_without_context: bool = True

    def check(self, option: str, n_students: int) -> None:
        """Refuse impossible values. Raises ValueError that names the option."""
        require(self.lr > 0, f"{option}.lr", "above 0", self.lr)
        require(self.warmup_steps >= 0, f"{option}.warmup-steps", "at least 0", self.warmup_steps)
        require(self.steps >= 1, f"{option}.steps", "at least 1", self.steps)
        require(0 <= self.alpha <= 1, f"{option}.alpha", "in [0, 1]", self.alpha)
        require(self.k >= 1, f"{option}.k", "at least 1", self.k)
        require(
            self.importance_upper > 0,
            f"{option}.importance-upper",
            "above 0",
            self.importance_upper,
        )
        require(
            0 <= self.teacher_rate <= 1, f"{option}.teacher-rate", "in [0, 1]", self.teacher_rate
        )


def demonstration_for(group: Sequence[Trajectory], sample: int, exclude_self: bool) -> str:
    """The earliest accepted rollout's text, in generation order, thinking removed; or ""."""
    for other in group:
        if other.reward == 1 and not (exclude_self and other.sample == sample):
            text = strip_thinking(other.text)
            if text:
                return text
    return ""


class SDPO(Algorithm):
    denominator = "sequences"

    def __init__(self, config: SDPOConfig) -> None:
        self.config = config
        self.teacher = config.teacher
        self.teacher_rate = config.teacher_rate

    def schedule(self, n_students: int, n_problems: int, steps: int) -> list[Phase]:
        return one_phase_each(n_students, steps or self.config.steps)

    def learning_rate(self, step: int, total: int) -> float:
        return constant_with_warmup(self.config.lr, self.config.warmup_steps, step)

    def annotate(self, groups: Groups, context: StepContext) -> dict[str, float]:
        """Give each rollout its teacher's context: c = (demonstration, feedback)."""
        counts: Counter[str] = Counter()
        for group in groups:
            for rollout in group:
                demonstration = demonstration_for(group, rollout.sample, self.config.exclude_self)
                feedback = rollout.feedback.text if rollout.feedback else ""
                counts["with_demonstration"] += bool(demonstration)
                counts["with_feedback"] += bool(feedback)
                prompt = context.reprompt(rollout.problem, demonstration, feedback)
                if prompt is None:
                    counts["without_context"] += 1
                    if not self.config.mask_without_context:
                        prompt = rollout.ids[: rollout.turns[0].stop]
                rollout.teacher_prompt_ids = prompt
        return dict(counts)

    def row_weights(self, trajectory: Trajectory) -> float:
        if trajectory.teacher_prompt_ids is None:
            return 0.0
        return 1.0 / max(1, len(trajectory.response_ids()))

    def loss(self, heads: Heads, rows: Rows) -> LossSums:
        """Σ rows weight × importance weight × JSD; gradients to `heads.hidden` and `.weight`."""
        assert heads.teacher_hidden is not None
        assert heads.teacher_weight is not None
        with torch.no_grad():
            scored = linear_token_logprobs(
                heads.hidden.detach(),
                heads.weight.detach(),
                rows.targets,
                turn_ids=rows.turn_ids,
                temperature=rows.temperature,
                entropy=True,
                chunk_rows=heads.chunk_rows,
            )
            importance = importance_weights(
                scored.logprobs,
                rows.rollout_logprobs,
                turn_ids=rows.turn_ids,
                sequence_ids=rows.sequence_ids,
                level="token",
                action="truncate",
                upper=self.config.importance_upper,
            )
        jsd = linear_topk_jsd(
            heads.hidden,
            heads.weight,
            heads.teacher_hidden,
            heads.teacher_weight,
            row_weights=rows.weights * importance.weights,
            k=self.config.k,
            alpha=self.config.alpha,
            tail=self.config.tail,
            temperature=rows.temperature,
            chunk_rows=heads.chunk_rows,
        )
        trained = (rows.weights > 0).float()
        sums = {
            "jsd": (jsd.per_row * trained).sum(),
            "student_topk_mass": (jsd.student_topk_mass * trained).sum(),
            "teacher_topk_mass": (jsd.teacher_topk_mass * trained).sum(),
            "rows_with_teacher": trained.sum(),
            **policy_sums(scored.logprobs, scored.entropy, rows),
        }
        return LossSums(jsd.loss, sums)


def policy_sums(
    logprobs: torch.Tensor, entropy: torch.Tensor | None, rows: Rows
) -> dict[str, torch.Tensor]:
    """Sums for metrics and canary over all sampled tokens; logprobs (N,) are the trainer's own."""
    sampled = rows.sampled
    difference = torch.where(sampled, logprobs.detach() - rows.rollout_logprobs, 0.0)
    sums = {
        "sampled_rows": sampled.sum(),
        "abs_logprob_diff": difference.abs().sum(),
        "max_abs_logprob_diff": difference.abs().max(),
        "k3": (torch.exp(difference) - 1 - difference).sum(),
    }
    if entropy is not None:
        sums["entropy"] = torch.where(sampled, entropy.detach(), 0.0).sum()
    return sums
