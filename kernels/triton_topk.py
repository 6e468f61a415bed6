"""Triton kernels: block statistics of logits, exact top-K ids, the mass outside of given ids.

A row is seen as blocks of 128 columns; each has a maximum m_b and a sum s_b = Σ exp((z - m_b)/τ).

1. `_block_statistics_kernel` reads the row once.
2. `_candidate_blocks_kernel` keeps the K blocks with the largest maxima (equal maxima: the lower
   block). No other block can hold a top-K element: each kept block holds one that comes first.
3. `_select_kernel` reads these blocks again, finds the exact K-th largest logit bit by bit and
   takes equal logits from the lowest id up. It reads its blocks once when they fit into registers
   (K <= 256), and once per bit otherwise: there is no candidate buffer that a plateau could fill.
4. `_exclude_ids_kernel` does it for ids that are given: the teacher's side.

3 and 4 rewrite the statistics of the blocks they visit without the ids, so that afterwards the
statistics describe exactly what is outside of them, to any size of tail.

Bytes per row (b = bytes per logit, B = V/128 blocks): statistics b V + 8 B; candidates 4 B + 4 K;
select and exclude 128 b K + 8 K for the blocks, 12 K for ids and logits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import FUSION

BLOCK = 128  # columns that share one maximum
GROUP = 32  # blocks that one program of the statistics reads
HELD = 256  # candidate blocks that fit into one program's registers
TILE = 32  # blocks at a time where they don't
LOWEST = tl.constexpr(-2147483648)  # sorts below every float


@triton.jit
def _row_start(row, inner, stride_outer, stride_inner):
    """64-bit offset of a row whose index is (row // inner, row % inner)."""
    outer = row // inner
    return outer.to(tl.int64) * stride_outer + (row - outer * inner).to(tl.int64) * stride_inner


@triton.jit
def _order(z):
    """Integers that compare as the floats do; -0.0 equals 0.0."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _sum_exp(z, inverse_tau):
    """(maximum, Σ exp((z - maximum)/τ)) of each row of a tile; (-inf, 0) where all is -inf."""
    top = tl.max(z, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp((z - anchor[:, None]) * inverse_tau), 1)


@triton.jit
def _block_statistics_kernel(
    z_ptr,  # (rows, V) any float dtype
    maxima_ptr,  # (rows, blocks) float32, out
    sums_ptr,  # (rows, blocks) float32, out
    taus_ptr,  # (rows,) float32 or unused
    inner,
    stride_outer,
    stride_inner,
    stride_column,
    blocks,
    vocab,
    inverse_tau,
    HAS_TAUS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    if HAS_TAUS:
        inverse_tau = 1.0 / tl.load(taus_ptr + row)
    z_ptr += _row_start(row, inner, stride_outer, stride_inner)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = column.to(tl.int64) * stride_column
    z = tl.load(z_ptr + at, mask=column < vocab, other=float("-inf")).to(tl.float32)
    top, total = _sum_exp(z, inverse_tau)
    at = row.to(tl.int64) * blocks + block
    tl.store(maxima_ptr + at, top, mask=block < blocks)
    tl.store(sums_ptr + at, total, mask=block < blocks)


@triton.jit
def _candidate_blocks_kernel(
    maxima_ptr,  # (rows, blocks) float32
    candidates_ptr,  # (rows, keep) int32, out, ascending
    blocks,
    keep,  # min(K, blocks)
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
def _emit(
    block, column, z, key, bound, missing, ties, taken, candidate,
    ids_ptr, values_ptr, maxima_ptr, sums_ptr, inverse_tau,
):  # fmt: skip
    """Store the chosen of one tile in the order of their ids, and the statistics of the rest."""
    equal = ((key == bound) & (key > LOWEST)).to(tl.int32)
    per_block = tl.sum(equal, 1)
    rank = tl.cumsum(equal, 1) + (tl.cumsum(per_block, 0) - per_block)[:, None] + ties
    chosen = (key > bound) | ((equal > 0) & (rank <= missing))
    count = chosen.to(tl.int32)
    per_block = tl.sum(count, 1)
    place = tl.cumsum(count, 1) + (tl.cumsum(per_block, 0) - per_block)[:, None] + taken - 1
    tl.store(ids_ptr + place, column.to(tl.int64), mask=chosen)
    tl.store(values_ptr + place, z, mask=chosen)
    top, total = _sum_exp(tl.where(chosen, float("-inf"), z), inverse_tau)
    tl.store(maxima_ptr + block, top, mask=candidate)
    tl.store(sums_ptr + block, total, mask=candidate)
    return ties + tl.sum(equal), taken + tl.sum(count)


@triton.jit
def _select_kernel(
    z_ptr,  # (rows, V) any float dtype
    candidates_ptr,  # (rows, keep) int32, ascending
    ids_ptr,  # (rows, K) int64, out, ascending
    values_ptr,  # (rows, K) float32, out: the logits at the ids
    maxima_ptr,  # (rows, blocks) float32, rewritten at the candidates
    sums_ptr,  # (rows, blocks) float32, rewritten at the candidates
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
    TILE: tl.constexpr,  # power of two
    TILES: tl.constexpr,  # ceil(keep / TILE); 1 holds all candidates in registers
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if HAS_TAUS:
        inverse_tau = 1.0 / tl.load(taus_ptr + row)
    z_ptr += _row_start(row, inner, stride_outer, stride_inner)
    row = row.to(tl.int64)
    candidates_ptr += row * keep
    ids_ptr += row * k
    values_ptr += row * k
    maxima_ptr += row * blocks
    sums_ptr += row * blocks

    # the K-th largest key, from its sign down
    lanes = tl.arange(0, TILE)
    ties = tl.full((), 0, tl.int32)
    taken = tl.full((), 0, tl.int32)
    bound = tl.full((), LOWEST, tl.int32)
    if TILES == 1:
        block, column, z, key = _load_blocks(
            z_ptr, stride_column, candidates_ptr, 0, keep, vocab, TILE, BLOCK
        )
        bound = tl.where(tl.sum((key >= 0).to(tl.int32)) >= k, 0, bound)
        for i in range(31):
            higher = bound | (1 << (30 - i))
            bound = tl.where(tl.sum((key >= higher).to(tl.int32)) >= k, higher, bound)
        missing = k - tl.sum((key > bound).to(tl.int32))
        _emit(
            block, column, z, key, bound, missing, ties, taken, lanes < keep,
            ids_ptr, values_ptr, maxima_ptr, sums_ptr, inverse_tau,
        )  # fmt: skip
    else:
        for i in range(32):
            higher = tl.where(i == 0, 0, bound | (1 << tl.minimum(31 - i, 30)))
            count = tl.full((), 0, tl.int32)
            for tile in range(TILES):
                _, _, _, key = _load_blocks(
                    z_ptr, stride_column, candidates_ptr, tile * TILE, keep, vocab, TILE, BLOCK
                )
                count += tl.sum((key >= higher).to(tl.int32))
            bound = tl.where(count >= k, higher, bound)
        above = tl.full((), 0, tl.int32)
        for tile in range(TILES):
            _, _, _, key = _load_blocks(
                z_ptr, stride_column, candidates_ptr, tile * TILE, keep, vocab, TILE, BLOCK
            )
            above += tl.sum((key > bound).to(tl.int32))
        for tile in range(TILES):
            block, column, z, key = _load_blocks(
                z_ptr, stride_column, candidates_ptr, tile * TILE, keep, vocab, TILE, BLOCK
            )
            ties, taken = _emit(
                block, column, z, key, bound, k - above, ties, taken, tile * TILE + lanes < keep,
                ids_ptr, values_ptr, maxima_ptr, sums_ptr, inverse_tau,
            )  # fmt: skip


@triton.jit
def _exclude_ids_kernel(
    z_ptr,  # (rows, V) any float dtype
    ids_ptr,  # (rows, K) int64, ascending
    values_ptr,  # (rows, K) float32, out: the logits at the ids
    maxima_ptr,  # (rows, blocks) float32, rewritten where a block holds an id
    sums_ptr,  # (rows, blocks) float32, likewise
    taus_ptr,  # (rows,) float32 or unused
    inner,
    stride_outer,
    stride_inner,
    stride_column,
    blocks,
    k,
    vocab,
    inverse_tau,
    HAS_TAUS: tl.constexpr,
    HAS_REST: tl.constexpr,  # False: only gather
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if HAS_TAUS:
        inverse_tau = 1.0 / tl.load(taus_ptr + row)
    z_ptr += _row_start(row, inner, stride_outer, stride_inner)
    row = row.to(tl.int64)
    ids_ptr += row * k
    ids = tl.load(ids_ptr + j, mask=j < k, other=0)
    value = tl.load(z_ptr + ids * stride_column, mask=j < k, other=0.0).to(tl.float32)
    tl.store(values_ptr + row * k + j, value, mask=j < k)
    if HAS_REST:
        # One lane works on each block: that of its first id. The others load nothing.
        before = tl.load(ids_ptr + j - 1, mask=(j > 0) & (j < k), other=-BLOCK)
        block = ids // BLOCK
        first = (j < k) & ((j == 0) | (before // BLOCK != block))
        column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = first[:, None] & (column < vocab)
        z = tl.load(z_ptr + column * stride_column, mask=inside, other=float("-inf"))
        z = tl.where(column == ids[:, None], float("-inf"), z.to(tl.float32))
        step = 1
        more = tl.max(first.to(tl.int32), 0)
        while more > 0:  # the further ids of a block follow its first one
            later = tl.load(ids_ptr + j + step, mask=first & (j + step < k), other=-BLOCK)
            same = later // BLOCK == block
            z = tl.where(column == later[:, None], float("-inf"), z)
            more = tl.max(same.to(tl.int32), 0)
            step += 1
        top, total = _sum_exp(z, inverse_tau)
        tl.store(maxima_ptr + row * blocks + block, top, mask=first)
        tl.store(sums_ptr + row * blocks + block, total, mask=first)


def row_layout(logits: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """(tensor, (inner, stride_outer, stride_inner, stride_column)) of (..., V) logits.

    A row's index is split in two, which serves [S, B, V] seen as [B, S, V] without a copy; leading
    dimensions that need more are copied.
    """
    if logits.dim() == 3 and logits.shape[0] > 0:
        return logits, (max(1, logits.shape[1]), *logits.stride())
    flat = logits.reshape(-1, logits.shape[-1])
    return flat, (max(1, flat.shape[0]), 0, *flat.stride())


def _shape(logits: Tensor) -> tuple[int, int, int]:
    vocab = logits.shape[-1]
    return math.prod(logits.shape[:-1]), vocab, triton.cdiv(vocab, BLOCK)


def temperature_arguments(tau: float | Tensor, unused: Tensor) -> tuple[Tensor, float, bool]:
    """(pointer, inverse of the number, HAS_TAUS)."""
    if isinstance(tau, Tensor):
        return tau, 1.0, True
    return unused, 1.0 / tau, False


def block_statistics(logits: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """(maxima, sums), each (rows, blocks) float32; `tau` is a number or (rows,)."""
    rows, vocab, blocks = _shape(logits)
    maxima, sums = torch.empty(2, rows, blocks, device=logits.device)
    taus, inverse, has_taus = temperature_arguments(tau, maxima)
    flat, layout = row_layout(logits)
    group = min(GROUP, triton.next_power_of_2(blocks))
    _block_statistics_kernel[(rows, triton.cdiv(blocks, group))](
        flat, maxima, sums, taus, *layout, blocks, vocab, inverse,
        HAS_TAUS=has_taus, GROUP=group, BLOCK=BLOCK, num_warps=4, **FUSION,
    )  # fmt: skip
    return maxima, sums


def select(
    logits: Tensor, statistics: tuple[Tensor, Tensor], k: int, tau: float | Tensor
) -> tuple[Tensor, Tensor]:
    """(ids, logits at them), each (rows, k), ids ascending; k < V. `statistics` loses the ids."""
    rows, vocab, blocks = _shape(logits)
    keep = min(k, blocks)
    candidates = torch.empty(rows, keep, dtype=torch.int32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, k, device=logits.device)
    taus, inverse, has_taus = temperature_arguments(tau, values)
    lanes = triton.next_power_of_2(blocks)
    _candidate_blocks_kernel[(rows,)](
        statistics[0], candidates, blocks, keep, BLOCKS=lanes, num_warps=4 if lanes <= 2048 else 8,
        **FUSION,
    )  # fmt: skip
    flat, layout = row_layout(logits)
    tile = triton.next_power_of_2(keep) if keep <= HELD else TILE
    _select_kernel[(rows,)](
        flat, candidates, ids, values, *statistics, taus, *layout, blocks, keep, k, vocab, inverse,
        HAS_TAUS=has_taus, TILE=tile, TILES=triton.cdiv(keep, tile), BLOCK=BLOCK,
        num_warps=16 if tile > 128 else 8, **FUSION,
    )  # fmt: skip
    return ids, values


def exclude(
    logits: Tensor, statistics: tuple[Tensor, Tensor] | None, ids: Tensor, tau: float | Tensor
) -> Tensor:
    """The (rows, K) logits at ascending `ids`; `statistics`, where given, loses the ids."""
    rows, vocab, blocks = _shape(logits)
    k = ids.shape[1]
    values = torch.empty(rows, k, device=logits.device)
    maxima, sums = (values, values) if statistics is None else statistics
    taus, inverse, has_taus = temperature_arguments(tau, values)
    flat, layout = row_layout(logits)
    tile = min(TILE, triton.next_power_of_2(k))
    _exclude_ids_kernel[(rows, triton.cdiv(k, tile))](
        flat, ids, values, maxima, sums, taus, *layout, blocks, k, vocab, inverse,
        HAS_TAUS=has_taus, HAS_REST=statistics is not None, TILE=tile, BLOCK=BLOCK, num_warps=4,
        **FUSION,
    )  # fmt: skip
    return values
