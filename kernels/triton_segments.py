"""Triton kernels for sums over turns and sequences, and for importance weights.

Ids may come in any order, yet nothing is sorted and no atomics are used: a first launch notes the
smallest and largest id of every block of 256 rows, and a program that owns 16 segments then walks
from the first to the last block that can hold one of them. Numbered in order, as a batch has them,
that reads every row about once; in a random order it is as right and slower. Rows number below 2³¹.

Bytes per row, b the item size of the ids: segments 2·b (the ids, for the ranges and again) and the
values' 4 (two log-probs: 2 · item size), and the blocks at the ends of a program's range twice;
importance weights as importance_weights.py says, plus 64 for each 1024 rows of partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import FUSION

BLOCK_ROWS = 256  # rows that share one range of ids
BLOCK_SEGMENTS = 16  # segments that a program owns
BLOCK_RANGES = 1024  # ranges that are looked at together
BLOCK_TOKENS = 1024  # tokens of one program of the weights
PARTIALS = 16  # float32 of partial statistics a program leaves, one of them unused
NO_ID = tl.constexpr(2**31 - 1)

LEVELS = {"token": 0, "turn": 1, "sequence": 2, "geometric": 3}
ACTIONS = {"truncate": 0, "clip": 1, "mask": 2, "reject": 3}


@triton.jit
def _id_ranges_kernel(
    ids_ptr,  # (N,) integer
    ranges_ptr,  # (2, blocks) int32: smallest and largest id >= 0 of each block
    size,
    blocks,
    BLOCK_ROWS: tl.constexpr,
):
    block = tl.program_id(0)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ids = tl.load(ids_ptr + row, mask=row < size, other=-1).to(tl.int32)
    tl.store(ranges_ptr + block, tl.min(tl.where(ids < 0, NO_ID, ids), 0))
    tl.store(ranges_ptr + blocks + block, tl.max(ids, 0))


@triton.jit
def _segment_sums_kernel(
    values_ptr,  # (N,) any float dtype
    minus_ptr,  # (N,) any float dtype, subtracted when HAS_MINUS
    ids_ptr,  # (N,) integer
    other_ids_ptr,  # (N,) integer, rows with a negative one are left out when HAS_OTHER
    turn_sums_ptr,  # (turns,) float32, value of the turn in other_ids for LEVEL 1
    ranges_ptr,  # (2, blocks) int32
    sums_ptr,  # (R,) float32
    counts_ptr,  # (R,) int32
    bad_ptr,  # (R,) int32, rows that condemn their segment, written when FLAG
    size,
    segments,
    blocks,
    log_upper,
    log_lower,
    log_veto,
    HAS_MINUS: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    FLAG: tl.constexpr,
    REJECT: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANGES: tl.constexpr,
):
    low = tl.program_id(0) * BLOCK_SEGMENTS
    mine = low + tl.arange(0, BLOCK_SEGMENTS)

    # Which blocks of rows can hold an id of mine: from the first to the last one.
    first = blocks
    last = -1
    for start in range(0, blocks, BLOCK_RANGES):
        block = start + tl.arange(0, BLOCK_RANGES)
        smallest = tl.load(ranges_ptr + block, mask=block < blocks, other=NO_ID)
        largest = tl.load(ranges_ptr + blocks + block, mask=block < blocks, other=-1)
        hit = (smallest < low + BLOCK_SEGMENTS) & (largest >= low)
        first = tl.minimum(first, tl.min(tl.where(hit, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(hit, block, -1), 0))

    total = tl.zeros((BLOCK_SEGMENTS,), tl.float32)
    count = tl.zeros((BLOCK_SEGMENTS,), tl.int32)
    bad = tl.zeros((BLOCK_SEGMENTS,), tl.int32)
    for at in range(first, last + 1):
        row = at * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        ids = tl.load(ids_ptr + row, mask=row < size, other=-1).to(tl.int32)
        wanted = (ids >= low) & (ids < low + BLOCK_SEGMENTS)
        if HAS_OTHER:
            other = tl.load(other_ids_ptr + row, mask=wanted, other=-1)
            wanted = wanted & (other >= 0)
        d = tl.load(values_ptr + row, mask=wanted, other=0.0).to(tl.float32)
        if HAS_MINUS:
            d -= tl.load(minus_ptr + row, mask=wanted, other=0.0).to(tl.float32)
        member = (ids[None, :] == mine[:, None]) & wanted[None, :]
        total += tl.sum(tl.where(member, d[None, :], 0.0), 1)
        count += tl.sum(member.to(tl.int32), 1)
        if FLAG:
            wrong = d < log_veto
            if REJECT and LEVEL < 2:
                v = d
                if LEVEL == 1:
                    v = tl.load(turn_sums_ptr + other, mask=wanted, other=0.0)
                wrong = wrong | (v > log_upper) | (v < log_lower)
            bad += tl.sum((member & wrong[None, :]).to(tl.int32), 1)

    inside = mine < segments
    tl.store(sums_ptr + mine, total, mask=inside)
    tl.store(counts_ptr + mine, count, mask=inside)
    if FLAG:
        if REJECT and LEVEL >= 2:
            v = total
            if LEVEL == 3:
                v = total / tl.maximum(count, 1).to(tl.float32)
            outside = (v > log_upper) | (v < log_lower)
            bad += (outside & (count > 0)).to(tl.int32)
        tl.store(bad_ptr + mine, bad, mask=inside)


@triton.jit
def _importance_weights_kernel(
    logprobs_ptr,  # (N,) any float dtype
    rollout_ptr,  # (N,) any float dtype
    turn_ids_ptr,  # (N,) integer, or unused
    sequence_ids_ptr,  # (N,) integer, or unused
    turn_sums_ptr,  # (turns,) float32 Σ d, or unused
    sequence_sums_ptr,  # (B,) float32 Σ d, or unused
    sequence_counts_ptr,  # (B,) int32, or unused
    sequence_bad_ptr,  # (B,) int32, dropped where above 0, or unused
    weights_ptr,  # (N,) float32
    keep_ptr,  # (N,) uint8
    partials_ptr,  # (programs, PARTIALS) float32, in the order in which they are stored below
    size,
    upper,
    lower,
    log_upper,
    log_lower,
    max_log_ratio,
    HAS_TURNS: tl.constexpr,
    HAS_SEQUENCES: tl.constexpr,
    LEVEL: tl.constexpr,
    ACTION: tl.constexpr,
    DROPS: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = row < size
    trained = inside
    if HAS_TURNS:
        turn = tl.load(turn_ids_ptr + row, mask=inside, other=-1)
        trained = trained & (turn >= 0)
    if HAS_SEQUENCES:
        sequence = tl.load(sequence_ids_ptr + row, mask=inside, other=-1)
        trained = trained & (sequence >= 0)
    own = tl.load(logprobs_ptr + row, mask=trained, other=0.0).to(tl.float32)
    theirs = tl.load(rollout_ptr + row, mask=trained, other=0.0).to(tl.float32)
    d = own - theirs

    v = d
    if LEVEL == 1:
        v = tl.load(turn_sums_ptr + turn, mask=trained, other=0.0)
    if LEVEL >= 2:
        v = tl.load(sequence_sums_ptr + sequence, mask=trained, other=0.0)
    if LEVEL == 3:
        v /= tl.load(sequence_counts_ptr + sequence, mask=trained, other=1).to(tl.float32)
    above = trained & (v > log_upper)
    below = trained & (v < log_lower)
    keep = trained
    if DROPS:
        keep = keep & (tl.load(sequence_bad_ptr + sequence, mask=trained, other=0) == 0)
    if ACTION == 2:
        keep = keep & (above == 0) & (below == 0)
    if ACTION < 2:
        weight = tl.minimum(tl.exp(tl.minimum(v, log_upper)), upper)
        weight = tl.where(v >= log_upper, upper, weight)
        if ACTION == 1:
            weight = tl.where(v <= log_lower, lower, tl.maximum(weight, lower))
        weight = tl.where(v != v, v, weight)  # minimum and maximum drop a NaN
    else:
        weight = tl.exp(v)
    weight = tl.where(keep, weight, 0.0)
    tl.store(weights_ptr + row, weight, mask=inside)
    tl.store(keep_ptr + row, keep.to(tl.uint8), mask=inside)

    # Partial statistics of this program, in the order of importance_weights.STATS.
    r = tl.exp(tl.minimum(d, max_log_ratio))
    partials_ptr += tl.program_id(0) * PARTIALS
    tl.store(partials_ptr, tl.sum(weight, 0))
    tl.store(partials_ptr + 1, tl.sum(weight * weight, 0))
    tl.store(partials_ptr + 2, tl.sum(keep.to(tl.float32), 0))
    tl.store(partials_ptr + 3, tl.sum(above.to(tl.float32), 0))
    tl.store(partials_ptr + 4, tl.sum(below.to(tl.float32), 0))
    tl.store(partials_ptr + 5, tl.sum(tl.abs(d), 0))
    tl.store(partials_ptr + 6, -tl.sum(d, 0))
    tl.store(partials_ptr + 7, tl.sum(d * d / 2, 0))
    tl.store(partials_ptr + 8, tl.sum(r - 1 - d, 0))
    tl.store(partials_ptr + 9, tl.sum(r * r - 1, 0))
    tl.store(partials_ptr + 10, tl.sum(own, 0))
    tl.store(partials_ptr + 11, tl.sum(theirs, 0))
    tl.store(partials_ptr + 12, tl.sum(trained.to(tl.float32), 0))
    tl.store(partials_ptr + 13, tl.min(tl.where(trained, weight, float("inf")), 0))
    tl.store(partials_ptr + 14, tl.max(weight, 0))


def id_ranges(ids: Tensor) -> Tensor:
    """(2, blocks) int32 smallest and largest id of each block of contiguous ids (N,)."""
    blocks = triton.cdiv(len(ids), BLOCK_ROWS)
    ranges = torch.empty((2, blocks), dtype=torch.int32, device=ids.device)
    if blocks:
        _id_ranges_kernel[(blocks,)](ids, ranges, len(ids), blocks, BLOCK_ROWS=BLOCK_ROWS, **FUSION)
    return ranges


def segment_sums(
    values: Tensor,
    ids: Tensor,
    num_segments: int,
    *,
    minus: Tensor | None = None,
    other_ids: Tensor | None = None,
    turn_sums: Tensor | None = None,
    level: str = "token",
    reject: bool = False,
    bounds: tuple[float, float, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums (R,) float32, counts and condemned rows (R,) int32 of the segments.

    Args:
        values, minus: (N,) contiguous; values − minus is summed.
        ids, other_ids: (N,) contiguous; rows with a negative id in either are left out.
        turn_sums: (turns,) float32, the value of the turn in `other_ids`, for level "turn".
        level, reject: what condemns a row or, for "sequence" and "geometric", a segment.
        bounds: log upper, log lower, log veto; without them nothing is condemned.
    """
    sums = torch.empty(num_segments, dtype=torch.float32, device=values.device)
    counts, bad = torch.zeros((2, num_segments), dtype=torch.int32, device=values.device)
    if num_segments == 0:
        return sums, counts, bad
    ranges = id_ranges(ids)
    log_upper, log_lower, log_veto = bounds or (0.0, 0.0, 0.0)
    _segment_sums_kernel[(triton.cdiv(num_segments, BLOCK_SEGMENTS),)](
        values,
        values if minus is None else minus,
        ids,
        ids if other_ids is None else other_ids,
        sums if turn_sums is None else turn_sums,
        ranges,
        sums,
        counts,
        bad,
        len(ids),
        num_segments,
        ranges.shape[1],
        log_upper,
        log_lower,
        log_veto,
        HAS_MINUS=minus is not None,
        HAS_OTHER=other_ids is not None,
        FLAG=bounds is not None,
        REJECT=reject,
        LEVEL=LEVELS[level],
        BLOCK_SEGMENTS=BLOCK_SEGMENTS,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_RANGES=BLOCK_RANGES,
        **FUSION,
    )
    return sums, counts, bad


def importance_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    turn_ids: Tensor | None,
    sequence_ids: Tensor | None,
    turn_sums: Tensor | None,
    per_sequence: tuple[Tensor, Tensor, Tensor] | None,
    *,
    level: str,
    action: str,
    drops: bool,
    limits: tuple[float, float, float, float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (N,) float32, keep (N,) bool and partial statistics (programs, PARTIALS) float32.

    `per_sequence` is what `segment_sums` returned; `limits` are upper, lower, their logarithms and
    the cap on log ratios in the statistics. All tensors are contiguous.
    """
    size, device = len(logprobs), logprobs.device
    weights = torch.empty(size, dtype=torch.float32, device=device)
    keep = torch.empty(size, dtype=torch.uint8, device=device)
    programs = triton.cdiv(size, BLOCK_TOKENS)
    partials = torch.zeros((max(programs, 1), PARTIALS), dtype=torch.float32, device=device)
    partials[:, 13] = torch.inf  # the smallest weight of no tokens
    sums, counts, bad = per_sequence or (weights, weights, weights)
    if programs:
        _importance_weights_kernel[(programs,)](
            logprobs,
            rollout_logprobs,
            logprobs if turn_ids is None else turn_ids,
            logprobs if sequence_ids is None else sequence_ids,
            weights if turn_sums is None else turn_sums,
            sums,
            counts,
            bad,
            weights,
            keep,
            partials,
            size,
            *limits,
            HAS_TURNS=turn_ids is not None,
            HAS_SEQUENCES=sequence_ids is not None,
            LEVEL=LEVELS[level],
            ACTION=ACTIONS[action],
            DROPS=drops,
            PARTIALS=PARTIALS,
            BLOCK_TOKENS=BLOCK_TOKENS,
            **FUSION,
        )
    return weights, keep.view(torch.bool), partials
