"""RL²F: a dialogue is worth whether the student got there; what is learned is to use feedback.

Who samples: the student, turn after turn; between its turns a teacher who knows the solution (the
student's own weights, or its initial ones) says what is wrong without giving the answer away. Who
teaches: nobody; the verifier's reward of the whole dialogue does. What each token receives: a
token of the student's turns the dialogue's group-relative advantage, as in GRPO; a token of the
teacher's turns nothing, or with `world_model_coef` the cross-entropy of predicting it in the
student's own context, where the solution never stands, as a mean over all such tokens; prompts
and template glue nothing.

How this differs from GRPO:
1. A trajectory has several turns of the student; the reward is 1 if one of its answers is right.
2. The advantage of the whole dialogue reaches every turn, the first wrong answer included.
3. The world model's tokens have a denominator of their own.

Source: RL²F, arXiv 2602.16066; the objective is GRPO's, arXiv 2402.03300.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cotutor.trainer.algos.base import Groups, Heads, LossSums, Rows, StepContext, require
from cotutor.trainer.algos.grpo import GRPO, GRPOConfig, clipped_surrogate, score_targets
from cotutor.trainer.algos.sdpo import policy_sums


@dataclass(frozen=True)
class RL2FConfig(GRPOConfig):
    # Whose weights guide: the student's own as they are, or as they were at the start.
    teacher: Literal["self", "frozen"] = "self"
    # Weight of the cross-entropy of the teacher's turns; 0: they are not trained.
    world_model_coef: float = 0.0

    def check(self, option: str, n_students: int) -> None:
        """Refuse impossible values. Raises ValueError that names the option."""
        super().check(option, n_students)
        coef = self.world_model_coef
        require(coef >= 0, f"{option}.world-model-coef", "at least 0", coef)


class RL2F(GRPO):
    config: RL2FConfig

    def __init__(self, config: RL2FConfig) -> None:
        super().__init__(config)
        self.guide = config.teacher
        self.world_model_coef = config.world_model_coef

    def annotate(self, groups: Groups, context: StepContext) -> dict[str, float]:
        """Give each dialogue its group-relative advantage; count how the dialogues went."""
        counts = super().annotate(groups, context)
        dialogues = [dialogue for group in groups for dialogue in group]
        said = [guidance for dialogue in dialogues for guidance in dialogue.guidance]
        return {
            **counts,
            "right_at_once": sum(bool(d.answers) and d.answers[0].score == 1 for d in dialogues),
            "turns": sum(len(d.answers) for d in dialogues),
            "guidance/messages": len(said),
            "guidance/drafts": sum(len(g.drafts) for g in said),
            "guidance/leaks": sum(g.leaks for g in said),
            "guidance/neutral": sum(g.neutral for g in said),
            "guidance/tokens": sum(d.n_tokens("teacher") for d in dialogues),
        }

    def loss(self, heads: Heads, rows: Rows) -> LossSums:
        """−Σ weight × (clipped surrogate of the student's rows + log p of the teacher's)."""
        scored = score_targets(heads, rows)
        surrogate, sums = clipped_surrogate(scored.logprobs, rows, self.config)
        predicted = torch.where(rows.sampled, 0.0, scored.logprobs)
        sums |= policy_sums(scored.logprobs, scored.entropy, rows)
        if self.world_model_coef:
            told = ~rows.sampled & (rows.weights > 0)
            sums["world_model"] = -torch.where(told, scored.logprobs.detach(), 0.0).sum()
            sums["teacher_rows"] = told.sum()
        return LossSums(-(rows.weights * (surrogate + predicted)).sum(), sums)
