"""SFT: cross-entropy on given responses; makes the specialists that others start from.

Who samples: nobody; the responses are the problems' worked solutions. Who teaches: they do.
What each token of a response receives: −log p; the loss is the mean over all trained tokens.

How this differs from GRPO: no engine, no reward, no negative examples.

Full fine-tuning, or LoRA on all linear layers with `--policy.lora-rank`; exports are merged.
Source of the default setting: arXiv 2606.14368 (the initial students).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotutor.kernels import linear_token_logprobs
from cotutor.rollout.trajectory import Trajectory
from cotutor.trainer.algos.base import (
    Algorithm,
    Groups,
    Heads,
    LossSums,
    Phase,
    Rows,
    StepContext,
    one_phase_each,
    require,
)


@dataclass(frozen=True)
class SFTConfig:
    lr: float = 2e-4
    warmup_share: float = 0.1
    batch_size: int = 16
    epochs: int = 3

    def check(self, option: str, n_students: int) -> None:
        """Refuse impossible values. Raises ValueError that names the option."""
        require(self.lr > 0, f"{option}.lr", "above 0", self.lr)
        require(
            0 <= self.warmup_share < 1, f"{option}.warmup-share", "in [0, 1)", self.warmup_share
        )
        require(self.batch_size >= 1, f"{option}.batch-size", "at least 1", self.batch_size)
        require(self.epochs >= 1, f"{option}.epochs", "at least 1", self.epochs)


class SFT(Algorithm):
    on_policy = False

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def schedule(self, n_students: int, n_problems: int, steps: int) -> list[Phase]:
        per_epoch = math.ceil(n_problems / self.config.batch_size)
        return one_phase_each(n_students, steps or self.config.epochs * per_epoch)

    def learning_rate(self, step: int, total: int) -> float:
        """Linear warm-up, then half a cosine down to 0."""
        warmup = max(1, round(self.config.warmup_share * total))
        if step < warmup:
            return self.config.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def annotate(self, groups: Groups, context: StepContext) -> dict[str, float]:
        return {}

    def row_weights(self, trajectory: Trajectory) -> float:
        return 1.0

    def loss(self, heads: Heads, rows: Rows) -> LossSums:
        """−Σ rows weight × log p(target)."""
        scored = linear_token_logprobs(
            heads.hidden,
            heads.weight,
            rows.targets,
            turn_ids=rows.turn_ids,
            chunk_rows=heads.chunk_rows,
        )
        return LossSums(-(rows.weights * scored.logprobs).sum(), {})
