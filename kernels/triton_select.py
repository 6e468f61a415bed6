"""Triton kernels: the exact K largest logits of a row, from about K of its blocks.

1. `_candidate_blocks_kernel` keeps the K blocks with the largest maxima (equal maxima: the lower
   block). No other block can hold a top-K element: each kept block holds one that comes first.
2. `_filter_kernel` reads these blocks, once, and lists the logits that reach the K-th largest
   maximum: a little over K of them on real rows.
3. `_select_kernel` finds the exact K-th largest of the list bit by bit and takes equal logits from
   the lowest id up. A row that lists more than the list holds is taken from its blocks instead: in
   one read where fewer than K logits lie above the bound (plateaus), otherwise (sorted rows, fewer
   than K blocks) in five: a histogram of each byte of the keys first. Exact on any row.

As in triton_topk.py the statistics of the visited blocks are rewritten without the chosen ids;
listed logits that aren't chosen go into the last block, which holds no token of its own.

Bytes per row (b = bytes per logit, B = V/128 blocks): candidates 4 B + 4 K; filter and selection
128 b K + 44 K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import FUSION
from .triton_topk import (
    BLOCK,
    _row_start,
    _sum_exp,
    logits_shape,
    row_layout,
    temperature_arguments,
)

TILE = 16  # candidate blocks that one program holds at a time
LOWEST = tl.constexpr(-2147483648)  # sorts below every float
SIGN = tl.constexpr(1 << 31)


@triton.jit
def _order(z):
    """Integers that compare as the floats do; -0.0 equals 0.0."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _candidate_blocks_kernel(
    maxima_ptr,  # (rows, blocks) float32
    candidates_ptr,  # (rows, keep) int32, out, ascending
    bounds_ptr,  # (rows,) int32, out: key of the keep-th largest maximum
    blocks,
    keep,  # min(K, blocks that hold a token)
    BLOCKS: tl.constexpr,  # power of two, at least blocks
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(maxima_ptr + row * blocks + block, mask=block < blocks, other=0.0)
    key = tl.where(block < blocks, _order(maxima), LOWEST)

    # the keep-th largest key, from its sign down
    bound = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= keep, 0, LOWEST)
    for i in range(31):
        higher = bound | (1 << (30 - i))
        bound = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= keep, higher, bound)

    # blocks above it, and as many equal ones as are missing, the lowest first
    above = key > bound
    equal = (key == bound) & (block < blocks)
    missing = keep - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(candidates_ptr + row * keep + place, block, mask=chosen)
    tl.store(bounds_ptr + row, bound)


@triton.jit
def _load_blocks(z_ptr, stride_column, candidates_ptr, start, keep, vocab, TILE, BLOCK):
    """(block ids, columns, logits, keys) of candidates start ... start + TILE."""
    j = start + tl.arange(0, TILE)
    block = tl.load(candidates_ptr + j, mask=j < keep, other=0)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (j < keep)[:, None] & (column < vocab)
    at = column.to(tl.int64) * stride_column
    z = tl.load(z_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    return block, column, z, tl.where(inside, _order(z), LOWEST)


@triton.jit
def _places(chosen, before):
    """Place of each chosen element in row-major order, from `before` on, and their number."""
    count = chosen.to(tl.int32)
    per_block = tl.sum(count, 1)
    place = tl.cumsum(count, 1) + (tl.cumsum(per_block, 0) - per_block)[:, None] + before - 1
    return place, before + tl.sum(per_block, 0)


@triton.jit
def _filter_kernel(
    z_ptr,  # (rows, V) any float dtype
    candidates_ptr,  # (rows, K) int32, ascending
    bounds_ptr,  # (rows,) int32
    list_ids_ptr,  # (rows, LIST) int32, out
    list_values_ptr,  # (rows, LIST) float32, out
    counts_ptr,  # (rows, 2) int32, out: logits at or above the bound, also beyond LIST; above it
    maxima_ptr,  # (rows, blocks) float32, rewritten at the candidates
    sums_ptr,  # (rows, blocks) float32, rewritten at the candidates
    taus_ptr,  # (rows,) float32 or unused
    inner,
    stride_outer,
    stride_inner,
    stride_column,
    blocks,
    keep,
    vocab,
    inverse_tau,
    HAS_TAUS: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if HAS_TAUS:
        inverse_tau = 1.0 / tl.load(taus_ptr + row)
    z_ptr += _row_start(row, inner, stride_outer, stride_inner)
    bound = tl.load(bounds_ptr + row)
    wide = row.to(tl.int64)
    candidates_ptr += wide * keep
    maxima_ptr += wide * blocks
    sums_ptr += wide * blocks
    taken = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    for start in range(0, keep, TILE):
        block, column, z, key = _load_blocks(
            z_ptr, stride_column, candidates_ptr, start, keep, vocab, TILE, BLOCK
        )
        above += tl.sum(tl.sum((key > bound).to(tl.int32), 1), 0)
        high = (key >= bound) & (key > LOWEST)
        place, taken = _places(high, taken)
        at = wide * LIST + place
        tl.store(list_ids_ptr + at, column, mask=high & (place < LIST))
        tl.store(list_values_ptr + at, z, mask=high & (place < LIST))
        top, total = _sum_exp(tl.where(high, float("-inf"), z), inverse_tau)
        candidate = start + tl.arange(0, TILE) < keep
        tl.store(maxima_ptr + block, top, mask=candidate)
        tl.store(sums_ptr + block, total, mask=candidate)
    tl.store(counts_ptr + wide * 2, taken)
    tl.store(counts_ptr + wide * 2 + 1, above)


@triton.jit
def _select_from_list(
    list_ids_ptr, list_values_ptr, count, ids_ptr, values_ptr, maxima_ptr, sums_ptr, blocks, k,
    inverse_tau, LIST: tl.constexpr,
):  # fmt: skip
    """The k largest of `count` listed logits; the others are the last block's statistics."""
    lane = tl.arange(0, LIST)
    z = tl.load(list_values_ptr + lane, mask=lane < count, other=float("-inf"))
    ids = tl.load(list_ids_ptr + lane, mask=lane < count, other=0)
    key = tl.where(lane < count, _order(z), LOWEST)
    bound = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, LOWEST)
    for i in range(31):
        higher = bound | (1 << (30 - i))
        bound = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= k, higher, bound)
    above = key > bound
    equal = (key == bound) & (lane < count)
    missing = k - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place, ids.to(tl.int64), mask=chosen)
    tl.store(values_ptr + place, z, mask=chosen)
    rest = tl.where(chosen, float("-inf"), z)
    top = tl.max(rest, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    tl.store(maxima_ptr + blocks - 1, top)
    tl.store(sums_ptr + blocks - 1, tl.sum(tl.exp((rest - anchor) * inverse_tau), 0))


@triton.jit
def _next_digit(
    z_ptr, stride_column, candidates_ptr, keep, vocab, prefix, needed, shift,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The byte at `shift` of the `needed`-th largest unsigned key that starts with `prefix`.

    Returns the longer prefix, and which of the keys that start with it is sought.
    """
    bins = tl.arange(0, 256)
    counts = tl.zeros((256,), tl.int32)
    for start in range(0, keep, TILE):
        _block, _column, _z, key = _load_blocks(
            z_ptr, stride_column, candidates_ptr, start, keep, vocab, TILE, BLOCK
        )
        digit = (key.to(tl.uint32, bitcast=True) ^ SIGN ^ prefix) >> shift
        # what starts otherwise falls into bin 0, whose count nothing depends on
        digit = tl.where(digit < 256, digit, 0).to(tl.int32)
        counts += tl.histogram(tl.reshape(digit, (TILE * BLOCK,)), 256)
    higher = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    found = tl.max(tl.where(higher + counts >= needed, bins, 0), 0)
    needed -= tl.sum(tl.where(bins > found, counts, 0), 0)
    return prefix | (found.to(tl.uint32) << shift), needed


@triton.jit
def _select_from_blocks(
    z_ptr, stride_column, candidates_ptr, keep, vocab, ids_ptr, values_ptr, maxima_ptr, sums_ptr,
    bound, needed, digits, inverse_tau, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The logits of the candidate blocks above `bound`, and the first `needed` equal to it.

    With `digits` = 4 the bound isn't known: it is the `needed`-th largest key, found first.
    """
    prefix = tl.where(digits > 0, tl.full((), 0, tl.uint32), bound.to(tl.uint32, bitcast=True))
    for i in range(digits):
        prefix, needed = _next_digit(
            z_ptr, stride_column, candidates_ptr, keep, vocab, prefix, needed, 24 - 8 * i,
            TILE, BLOCK,
        )  # fmt: skip
    bound = tl.where(digits > 0, (prefix ^ SIGN).to(tl.int32, bitcast=True), bound)
    ties = tl.full((), 0, tl.int32)
    taken = tl.full((), 0, tl.int32)
    for start in range(0, keep, TILE):
        block, column, z, key = _load_blocks(
            z_ptr, stride_column, candidates_ptr, start, keep, vocab, TILE, BLOCK
        )
        equal = (key == bound) & (key > LOWEST)
        rank, ties = _places(equal, ties)
        chosen = (key > bound) | (equal & (rank < needed))
        place, taken = _places(chosen, taken)
        tl.store(ids_ptr + place, column.to(tl.int64), mask=chosen)
        tl.store(values_ptr + place, z, mask=chosen)
        top, total = _sum_exp(tl.where(chosen, float("-inf"), z), inverse_tau)
        candidate = start + tl.arange(0, TILE) < keep
        tl.store(maxima_ptr + block, top, mask=candidate)
        tl.store(sums_ptr + block, total, mask=candidate)


@triton.jit
def _select_kernel(
    z_ptr,  # (rows, V) any float dtype
    candidates_ptr,  # (rows, keep) int32, ascending
    bounds_ptr,  # (rows,) int32, or unused
    list_ids_ptr,  # (rows, LIST) int32, ascending, or unused
    list_values_ptr,  # (rows, LIST) float32, or unused
    counts_ptr,  # (rows, 2) int32, or unused
    ids_ptr,  # (rows, K) int64, out, ascending
    values_ptr,  # (rows, K) float32, out: the logits at the ids
    maxima_ptr,  # (rows, blocks) float32, rewritten
    sums_ptr,  # (rows, blocks) float32, rewritten
    taus_ptr,  # (rows,) float32 or unused
    inner,
    stride_outer,
    stride_inner,
    stride_column,
    blocks,
    keep,
    k,
    vocab,
    inverse_tau,
    HAS_TAUS: tl.constexpr,
    LIST: tl.constexpr,  # power of two; 0: there is no list
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if HAS_TAUS:
        inverse_tau = 1.0 / tl.load(taus_ptr + row)
    wide = row.to(tl.int64)
    candidates_ptr += wide * keep
    ids_ptr += wide * k
    values_ptr += wide * k
    maxima_ptr += wide * blocks
    sums_ptr += wide * blocks
    bound = tl.full((), LOWEST, tl.int32)
    needed = k
    digits = 4
    if LIST > 0:
        count = tl.load(counts_ptr + wide * 2)
        above = tl.load(counts_ptr + wide * 2 + 1)
        bound = tl.load(bounds_ptr + row)
        needed = tl.where(above < k, k - above, k)
        digits = tl.where(above < k, 0, 4)
        if count <= LIST:
            _select_from_list(
                list_ids_ptr + wide * LIST, list_values_ptr + wide * LIST, count,
                ids_ptr, values_ptr, maxima_ptr, sums_ptr, blocks, k, inverse_tau, LIST,
            )  # fmt: skip
            return
    z_ptr += _row_start(row, inner, stride_outer, stride_inner)
    _select_from_blocks(
        z_ptr, stride_column, candidates_ptr, keep, vocab, ids_ptr, values_ptr, maxima_ptr,
        sums_ptr, bound, needed, digits, inverse_tau, TILE, BLOCK,
    )  # fmt: skip


def select(
    logits: Tensor, statistics: tuple[Tensor, Tensor], k: int, tau: float | Tensor
) -> tuple[Tensor, Tensor]:
    """(ids, logits at them), each (rows, k), ids ascending; k < V. `statistics` loses the ids."""
    rows, vocab, blocks = logits_shape(logits)
    keep = min(k, blocks - 1)
    device = logits.device
    candidates = torch.empty(rows, keep, dtype=torch.int32, device=device)
    bounds = torch.empty(rows, dtype=torch.int32, device=device)
    counts = torch.empty(rows, 2, dtype=torch.int32, device=device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=device)
    values = torch.empty(rows, k, device=device)
    taus, inverse, has_taus = temperature_arguments(tau, values)
    lanes = triton.next_power_of_2(blocks)
    _candidate_blocks_kernel[(rows,)](
        statistics[0], candidates, bounds, blocks, keep, BLOCKS=lanes,
        num_warps=4 if lanes <= 2048 else 8, **FUSION,
    )  # fmt: skip
    flat, layout = row_layout(logits)
    tile = min(TILE, triton.next_power_of_2(keep))
    sizes = {"HAS_TAUS": has_taus, "TILE": tile, "BLOCK": BLOCK, **FUSION}
    # With fewer than K blocks, the smallest maximum bounds nothing.
    length = triton.next_power_of_2(2 * k) if keep == k else 0
    list_ids = torch.empty(rows, length, dtype=torch.int32, device=device)
    list_values = torch.empty(rows, length, device=device)
    if length:
        _filter_kernel[(rows,)](
            flat, candidates, bounds, list_ids, list_values, counts, *statistics, taus, *layout,
            blocks, keep, vocab, inverse, LIST=length, num_warps=max(1, tile // 2), **sizes,
        )  # fmt: skip
    _select_kernel[(rows,)](
        flat, candidates, bounds, list_ids, list_values, counts, ids, values, *statistics, taus,
        *layout, blocks, keep, k, vocab, inverse, LIST=length, num_warps=tile, **sizes,
    )  # fmt: skip
    return ids, values
