"""GRPO: a response is worth what it scored above the mean of its group.

Who samples: the student. Who teaches: nobody; the verifier's reward does. What each token
receives: the advantage A = r − mean(r) of its response (divided by the group's standard deviation
when `normalize_std`), through the clipped surrogate min(ρ A, clip(ρ, 1 − 0.2, 1 + 0.28) A), times
a truncated importance weight between trainer and sampler; no KL term. The loss is the mean over
all trained tokens of the step, on all ranks.

How this differs from the textbook:
1. One optimizer step per batch, so the old policy is the current one: ρ = 1 with the gradient of
   log π, and the clip binds only where a batch is used for several steps.
2. Each token counts the same (textbook: each response), so long responses weigh more.
3. A group with equal rewards has advantage exactly 0; such groups are counted.

Source: arXiv 2402.03300, eq. 3; the asymmetric clip: arXiv 2503.14476.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from cotutor.kernels import TokenLogprobs, importance_weights, linear_token_logprobs
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
from cotutor.trainer.algos.sdpo import policy_sums


@dataclass(frozen=True)
class GRPOConfig:
    lr: float = 1e-5
    warmup_steps: int = 5
    steps: int = 100
    normalize_std: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_upper: float = 2.0

    def check(self, option: str, n_students: int) -> None:
        """Refuse impossible values. Raises ValueError that names the option."""
        require(self.lr > 0, f"{option}.lr", "above 0", self.lr)
        require(self.warmup_steps >= 0, f"{option}.warmup-steps", "at least 0", self.warmup_steps)
        require(self.steps >= 1, f"{option}.steps", "at least 1", self.steps)
        require(0 <= self.clip_low < 1, f"{option}.clip-low", "in [0, 1)", self.clip_low)
        require(self.clip_high >= 0, f"{option}.clip-high", "at least 0", self.clip_high)
        require(
            self.importance_upper > 0,
            f"{option}.importance-upper",
            "above 0",
            self.importance_upper,
        )


def group_advantages(rewards: list[float], normalize_std: bool) -> list[float]:
    """r − mean, over the population's standard deviation on request; exactly 0 if all are equal."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.pstdev(rewards) if normalize_std else 1.0
    return [(r - mean) / scale for r in rewards]


class GRPO(Algorithm):
    def __init__(self, config: GRPOConfig) -> None:
        self.config = config

    def schedule(self, n_students: int, n_problems: int, steps: int) -> list[Phase]:
        return one_phase_each(n_students, steps or self.config.steps)

    def learning_rate(self, step: int, total: int) -> float:
        return constant_with_warmup(self.config.lr, self.config.warmup_steps, step)

    def annotate(self, groups: Groups, context: StepContext) -> dict[str, float]:
        """Give each rollout its group-relative advantage; count the groups without a signal."""
        counts = {"groups": 0.0, "groups_all_right": 0.0, "groups_all_wrong": 0.0}
        for group in groups:
            rewards = [rollout.reward for rollout in group]
            advantages = group_advantages(rewards, self.config.normalize_std)
            for rollout, advantage in zip(group, advantages, strict=True):
                rollout.advantage = advantage
            counts["groups"] += 1
            counts["groups_all_right"] += min(rewards) == 1
            counts["groups_all_wrong"] += max(rewards) == 0
        return counts

    def row_weights(self, trajectory: Trajectory) -> float:
        # Without an advantage a token's gradient is exactly 0: it costs nothing, but it counts.
        return float(trajectory.advantage != 0)

    def loss(self, heads: Heads, rows: Rows) -> LossSums:
        """−Σ rows weight × importance weight × clipped surrogate."""
        scored = score_targets(heads, rows)
        surrogate, sums = clipped_surrogate(scored.logprobs, rows, self.config)
        sums |= policy_sums(scored.logprobs, scored.entropy, rows)
        return LossSums(-(rows.weights * surrogate).sum(), sums)


def score_targets(heads: Heads, rows: Rows) -> TokenLogprobs:
    """Log-probs and entropies of the rows' targets, (N,) nats, with gradients to the heads.

    Sampled targets at the temperature that they were sampled with, the teacher's at 1.
    """
    temperature: float | torch.Tensor = rows.temperature
    if rows.temperature != 1.0:
        temperature = torch.where(rows.sampled, rows.temperature, 1.0)
    return linear_token_logprobs(
        heads.hidden,
        heads.weight,
        rows.targets,
        turn_ids=rows.turn_ids,
        temperature=temperature,
        entropy=True,
        chunk_rows=heads.chunk_rows,
    )


def clipped_surrogate(
    logprobs: torch.Tensor, rows: Rows, config: GRPOConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weight × min(ρ A, clip(ρ) A) by row, and its health as sums; 0 if not sampled."""
    old_logprobs = logprobs.detach()
    importance = importance_weights(
        old_logprobs,
        rows.rollout_logprobs,
        turn_ids=torch.where(rows.sampled, rows.turn_ids, -1),
        sequence_ids=rows.sequence_ids,
        level="token",
        action="truncate",
        upper=config.importance_upper,
    )
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * rows.advantages, clipped * rows.advantages)
    truncated = importance.weights >= config.importance_upper
    return importance.weights * surrogate, {"importance_truncated": truncated.sum()}
