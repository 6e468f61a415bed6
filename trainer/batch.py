"""Trajectories → right-padded micro-batches of tensors; the shift by one happens here, once.

Sequences are sorted by length and cut into micro-batches by a token budget. Padding stands on the
right, where causal attention never looks from a real token, so no attention mask is needed and
no sequence can see another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cotutor.rollout.trajectory import Role, Trajectory
from cotutor.trainer.algos.base import Rows


@dataclass(frozen=True)
class MicroBatch:
    """B sequences, N trained rows.

    ids (B, L) int64; row_index (N,) int64 into the flattened (B·L) positions whose hidden state
    predicts the row's target; teacher_ids (B, L′) and teacher_row_index (N,) for the same targets
    in the teacher's context, or None.
    """

    ids: torch.Tensor
    row_index: torch.Tensor
    rows: Rows
    teacher_ids: torch.Tensor | None
    teacher_row_index: torch.Tensor | None


def plan_micro_batches(
    trajectories: Sequence[Trajectory],
    weights: Sequence[float],
    max_tokens: int,
    turn_weight: float = 0.0,
) -> list[list[int]]:
    """Indices of the trajectories with trained tokens, sorted by length, cut by token budget.

    Trained are the student's tokens where the weight is above 0, and the teacher's turns where
    `turn_weight` is. A sequence longer than the budget has a micro-batch of its own.
    """
    kept = [
        i
        for i, t in enumerate(trajectories)
        if (weights[i] > 0 and t.n_tokens("student")) or (turn_weight > 0 and t.n_tokens("teacher"))
    ]
    kept.sort(key=lambda i: (_longest_side(trajectories[i]), i))
    plan: list[list[int]] = []
    for i in kept:
        # Sorted, so the newcomer is the longest: it sets the padded length of the micro-batch.
        if plan and _longest_side(trajectories[i]) * (len(plan[-1]) + 1) <= max_tokens:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def _longest_side(trajectory: Trajectory) -> int:
    student = len(trajectory.ids)
    if trajectory.teacher_prompt_ids is None:
        return student
    return max(student, len(trajectory.teacher_prompt_ids) + len(trajectory.response_ids()))


def make_micro_batch(
    trajectories: Sequence[Trajectory],
    row_weight: Callable[[Trajectory], float],
    temperature: float,
    device: torch.device,
    turn_weight: float = 0.0,
) -> MicroBatch:
    """Tensors of these trajectories on `device`; the token at position t is row t − 1's target.

    `turn_weight` is the weight of each token of the teacher's turns; 0 leaves them out.
    """
    inputs = [t.ids[:-1] for t in trajectories]
    length = max(len(i) for i in inputs)
    targets: list[int] = []
    turn_ids: list[int] = []
    sequence_ids: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    sampled: list[bool] = []
    row_index: list[int] = []
    teacher_inputs: list[list[int]] = []
    teacher_starts: list[list[int]] = []
    for b, t in enumerate(trajectories):
        weight_of: dict[Role, float] = {"student": row_weight(t), "teacher": turn_weight}
        roles = [role for role, weight in weight_of.items() if weight > 0]
        turns, own = t.turn_ids(roles), t.turn_ids()
        trained = [n for n, turn in enumerate(turns) if turn >= 0]
        assert trained
        assert trained[0] > 0, "the first token of a sequence has no position that predicts it"
        for n in trained:
            mine = own[n] >= 0
            row_index.append(b * length + n - 1)
            targets.append(t.ids[n])
            turn_ids.append(turns[n])
            sequence_ids.append(b)
            logprobs.append(t.logprobs[n])
            advantages.append(t.advantage if mine else 0.0)
            weights.append(weight_of["student" if mine else "teacher"])
            sampled.append(mine)
        if t.teacher_prompt_ids is not None:
            teacher_inputs.append(t.teacher_prompt_ids + [t.ids[n] for n in trained[:-1]])
            start = len(t.teacher_prompt_ids) - 1
            teacher_starts.append(list(range(start, start + len(trained))))

    def tensor(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    rows = Rows(
        targets=tensor(targets, torch.int64),
        turn_ids=tensor(turn_ids, torch.int32),
        sequence_ids=tensor(sequence_ids, torch.int32),
        rollout_logprobs=tensor(logprobs, torch.float32),
        advantages=tensor(advantages, torch.float32),
        weights=tensor(weights, torch.float32),
        sampled=tensor(sampled, torch.bool),
        temperature=temperature,
    )
    teacher_ids = teacher_row_index = None
    if teacher_inputs:
        assert len(teacher_inputs) == len(trajectories), "a teacher for all rows or for none"
        teacher_ids = _pad(teacher_inputs).to(device)
        width = teacher_ids.shape[1]
        flat = [b * width + n for b, starts in enumerate(teacher_starts) for n in starts]
        teacher_row_index = tensor(flat, torch.int64)
    return MicroBatch(
        _pad(inputs).to(device),
        tensor(row_index, torch.int64),
        rows,
        teacher_ids,
        teacher_row_index,
    )


def empty_micro_batch(teacher: bool, temperature: float, device: torch.device) -> MicroBatch:
    """One token that is not trained, so that a rank without work meets every collective."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    zero = torch.zeros(1, device=device)
    rows = Rows(
        targets=index,
        turn_ids=torch.full((1,), -1, dtype=torch.int32, device=device),
        sequence_ids=torch.zeros(1, dtype=torch.int32, device=device),
        rollout_logprobs=zero,
        advantages=zero,
        weights=zero,
        sampled=torch.zeros(1, dtype=torch.bool, device=device),
        temperature=temperature,
    )
    return MicroBatch(ids, index, rows, ids if teacher else None, index if teacher else None)


def _pad(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """(B, L) int64, padded on the right with id 0, whose positions are never read."""
    out = torch.zeros(len(sequences), max(len(s) for s in sequences), dtype=torch.int64)
    for b, s in enumerate(sequences):
        out[b, : len(s)] = torch.tensor(s, dtype=torch.int64)
    return out
