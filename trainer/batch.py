"""Trajectories → micro-batches of tensors; the shift by one happens here, once.

Sequences are sorted by length and cut into micro-batches by a token budget. No attention mask is
needed and no sequence can see another: either each has a row, padded on the right, where causal
attention never looks from a real token; or all stand packed in one row, kept apart by position ids
that start again at 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cotutor.rollout.trajectory import Role, Trajectory
from cotutor.trainer.algos.base import Rows


@dataclass(frozen=True)
class MicroBatch:
    """B sequences, N trained rows.

    ids (B, L) int64, or packed (1, ΣL) with their position_ids; row_index (N,) int64 into the
    flattened positions whose hidden state predicts the row's target; teacher_ids (B, L′) and
    teacher_row_index (N,) for the same targets in the teacher's context, or None.
    """

    ids: torch.Tensor
    row_index: torch.Tensor
    rows: Rows
    teacher_ids: torch.Tensor | None
    teacher_row_index: torch.Tensor | None
    position_ids: torch.Tensor | None = None
    teacher_position_ids: torch.Tensor | None = None


def plan_micro_batches(
    trajectories: Sequence[Trajectory],
    weights: Sequence[float],
    max_tokens: int,
    turn_weight: float = 0.0,
    *,
    packed: bool = False,
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
    tokens = 0
    for i in kept:
        length = _longest_side(trajectories[i])
        members = plan[-1] if plan else []
        # Sorted, so the newcomer is the longest: it sets the padded length of the micro-batch.
        tokens = tokens + length if packed else length * (len(members) + 1)
        if members and tokens <= max_tokens:
            members.append(i)
        else:
            plan.append([i])
            tokens = length
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
    *,
    packed: bool = False,
) -> MicroBatch:
    """Tensors of these trajectories on `device`; the token at position t is row t − 1's target.

    `turn_weight` is the weight of each token of the teacher's turns; 0 leaves them out.
    """
    ids, position_ids, starts = _lay_out([t.ids[:-1] for t in trajectories], packed, device)
    targets: list[int] = []
    turn_ids: list[int] = []
    sequence_ids: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    sampled: list[bool] = []
    row_index: list[int] = []
    teacher_inputs: list[list[int]] = []
    teacher_rows: list[range] = []
    for b, t in enumerate(trajectories):
        weight_of: dict[Role, float] = {"student": row_weight(t), "teacher": turn_weight}
        roles = [role for role, weight in weight_of.items() if weight > 0]
        turns, own = t.turn_ids(roles), t.turn_ids()
        trained = [n for n, turn in enumerate(turns) if turn >= 0]
        assert trained
        assert trained[0] > 0, "the first token of a sequence has no position that predicts it"
        for n in trained:
            mine = own[n] >= 0
            row_index.append(starts[b] + n - 1)
            targets.append(t.ids[n])
            turn_ids.append(turns[n])
            sequence_ids.append(b)
            logprobs.append(t.logprobs[n])
            advantages.append(t.advantage if mine else 0.0)
            weights.append(weight_of["student" if mine else "teacher"])
            sampled.append(mine)
        if t.teacher_prompt_ids is not None:
            teacher_inputs.append(t.teacher_prompt_ids + [t.ids[n] for n in trained[:-1]])
            first = len(t.teacher_prompt_ids) - 1
            teacher_rows.append(range(first, first + len(trained)))

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
    teacher_ids = teacher_row_index = teacher_position_ids = None
    if teacher_inputs:
        assert len(teacher_inputs) == len(trajectories), "a teacher for all rows or for none"
        teacher_ids, teacher_position_ids, starts = _lay_out(teacher_inputs, packed, device)
        flat = [start + n for start, each in zip(starts, teacher_rows, strict=True) for n in each]
        teacher_row_index = tensor(flat, torch.int64)
    return MicroBatch(
        ids,
        tensor(row_index, torch.int64),
        rows,
        teacher_ids,
        teacher_row_index,
        position_ids,
        teacher_position_ids,
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


def _lay_out(
    sequences: Sequence[Sequence[int]], packed: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """ids, position ids if packed, and each sequence's flat start; padding is id 0, never read."""
    lengths = [len(s) for s in sequences]
    if packed:
        starts = [0, *itertools.accumulate(lengths)][:-1]
        ids = torch.tensor([n for s in sequences for n in s], dtype=torch.int64)[None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return ids.to(device), positions.to(device), starts
    out = torch.zeros(len(sequences), max(lengths), dtype=torch.int64)
    for b, s in enumerate(sequences):
        out[b, : len(s)] = torch.tensor(s, dtype=torch.int64)
    return out.to(device), None, [b * max(lengths) for b in range(len(sequences))]
