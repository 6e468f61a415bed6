"""Triton kernels: block statistics of logits, and what is left of them outside of given ids.

A row is seen as blocks of 128 columns; each has a maximum m_b and a sum s_b = Σ exp((z - m_b)/τ).
`_block_statistics_kernel` reads the row once. `_exclude_ids_kernel` visits the blocks that hold the
given ids and rewrites their statistics without them, so that afterwards the statistics describe
exactly what is outside of the ids, to any size of tail. One block more than hold tokens is kept for
triton_select.py.

Bytes per row (b = bytes per logit, B = V/128 blocks): statistics b V + 8 B; exclusion 128 b K +
36 K, or (12 + b) K for a gather alone.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import FUSION

BLOCK = 128  # columns that share one maximum
GROUP = 32  # blocks that one program of the statistics reads
TILE = 32  # ids, each with its block, that one program works on


@triton.jit
def _row_start(row, inner, stride_outer, stride_inner):
    """64-bit offset of a row whose index is (row // inner, row % inner)."""
    outer = row // inner
    return outer.to(tl.int64) * stride_outer + (row - outer * inner).to(tl.int64) * stride_inner


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


def row_layout(logits: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(tensor, (inner, stride_outer, stride_inner, stride_column)) of (..., V) logits.

    A row's index is split in two, which serves [S, B, V] seen as [B, S, V] without a copy; leading
    dimensions that need more are copied.
    """
    if logits.dim() == 3 and logits.shape[0] > 0:
        return logits, (max(1, logits.shape[1]), *logits.stride())
    flat = logits.reshape(-1, logits.shape[-1])
    return flat, (max(1, flat.shape[0]), 0, *flat.stride())


def logits_shape(logits: Tensor) -> tuple[int, int, int]:
    """(rows, V, blocks), one block more than hold tokens."""
    vocab = logits.shape[-1]
    return math.prod(logits.shape[:-1]), vocab, triton.cdiv(vocab, BLOCK) + 1


def temperature_arguments(tau: float | Tensor, unused: Tensor) -> tuple[Tensor, float, bool]:
    """(pointer, inverse of the number, HAS_TAUS)."""
    if isinstance(tau, Tensor):
        return tau, 1.0, True
    return unused, 1.0 / tau, False


def block_statistics(logits: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """(maxima, sums), each (rows, blocks) float32; `tau` is a number or (rows,)."""
    rows, vocab, blocks = logits_shape(logits)
    maxima, sums = torch.empty(2, rows, blocks, device=logits.device)
    taus, inverse, has_taus = temperature_arguments(tau, maxima)
    flat, layout = row_layout(logits)
    group = min(GROUP, triton.next_power_of_2(blocks))
    _block_statistics_kernel[(rows, triton.cdiv(blocks, group))](
        flat, maxima, sums, taus, *layout, blocks, vocab, inverse,
        HAS_TAUS=has_taus, GROUP=group, BLOCK=BLOCK, num_warps=4, **FUSION,
    )  # fmt: skip
    return maxima, sums


def exclude(
    logits: Tensor, statistics: tuple[Tensor, Tensor] | None, ids: Tensor, tau: float | Tensor
) -> Tensor:
    """The (rows, K) logits at ascending `ids`; `statistics`, where given, loses the ids."""
    rows, vocab, blocks = logits_shape(logits)
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
