"""Triton kernels: the divergence of two rows' buckets, and the gradient to the student's logits.

`_divergence_kernel` turns the logits at the ids and the block statistics of everything else (see
triton_topk.py) into the row's loss and gradient, in logarithms as buckets.py does:

    gradient at an id = (h_v - p_v H)/τ            elsewhere = outside · exp((z - anchor)/τ)/τ

`_logit_gradient_kernel` writes the dense part, `_place_ids_kernel` the K corrections over it.

Bytes per row (b, c = bytes per logit and per gradient): divergence 16 V/128 + 24 K; dense gradient
b V + c V, one read and one write; corrections (12 + c) K.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .buckets import CLAMP, Compared
from .common import FUSION
from .triton_logprobs import _expm1
from .triton_select import select
from .triton_topk import _row_start, block_statistics, exclude, row_layout, temperature_arguments

BLOCK_K = 128
BLOCK_V = 4096
EXACT, CLAMPED, DROP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TAIL_CODES = {"exact": 0, "clamped": 1, "drop": 2}
FORWARD, BETWEEN, REVERSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CLAMPED_AT = tl.constexpr(CLAMP)


@triton.jit
def _log(x):
    """log x, with -inf at 0."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), float("-inf"))


@triton.jit
def _log1p(x):
    """log(1 + x) for -1 < x <= 0: the rounding of 1 + x is divided out again."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _to_mixture(r, alpha):
    """log S/M and log T/M from r = log T/S; both exactly 0 at r = 0, neither overflows."""
    up = _log1p((1.0 - alpha) * _expm1(-tl.maximum(r, 0.0)))
    down = _log1p(alpha * _expm1(tl.minimum(r, 0.0)))
    s_m = tl.where(r > 0, -tl.maximum(r, 0.0) - up, -down)
    t_m = tl.where(r > 0, -up, tl.minimum(r, 0.0) - down)
    return s_m, t_m


@triton.jit
def _bucket(s, t, alpha, ENDS: tl.constexpr, CLOSED: tl.constexpr):
    """(term of the loss, h, h/S) of buckets with log masses s and t, as buckets.divergence.

    For the forward end h/S lacks its exp(r), which overflows where S is tiny.
    """
    S, T = tl.exp(s), tl.exp(t)
    r = tl.where(s == t, 0.0, t - s)
    if ENDS == FORWARD:
        term = tl.where(T == 0, 0.0, T * r)
        h = -T
        slope = T * 0.0
        if CLOSED:
            term += S - T
            h += S
            slope += 1.0
    elif ENDS == REVERSE:
        term = tl.where(S == 0, 0.0, -S * r)
        h = term
        slope = -r
        if CLOSED:
            term += T - S
        else:
            h += S
            slope += 1.0
    else:
        s_m, t_m = _to_mixture(r, alpha)
        h = tl.where(S == 0, 0.0, (1.0 - alpha) * S * s_m)
        term = h + tl.where(T == 0, 0.0, alpha * T * t_m)
        slope = (1.0 - alpha) * s_m
    return term, h, slope


@triton.jit
def _log_masses(
    values_ptr, maxima_ptr, sums_ptr, blocks, k, inverse_tau,
    TAIL: tl.constexpr, HAS_REST: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of one row: (maximum, log Z over the buckets, log Z of softmax, log tail, log p(anchor),
    anchor). Logarithms of masses are relative to (z - maximum)/τ."""
    lanes = tl.arange(0, BLOCK_K)
    top = tl.full((), float("-inf"), tl.float32)
    for start in range(0, k, BLOCK_K):
        j = start + lanes
        top = tl.maximum(top, tl.max(tl.load(values_ptr + j, mask=j < k, other=float("-inf")), 0))
    largest = tl.full((), float("-inf"), tl.float32)
    rest = tl.full((), 0.0, tl.float32)
    if HAS_REST:
        block = tl.arange(0, BLOCKS)
        maxima = tl.load(maxima_ptr + block, mask=block < blocks, other=float("-inf"))
        sums = tl.load(sums_ptr + block, mask=block < blocks, other=0.0)
        largest = tl.max(maxima, 0)
        anchor = tl.where(largest == float("-inf"), 0.0, largest)
        rest = tl.sum(sums * tl.exp((maxima - anchor) * inverse_tau), 0)
        top = tl.maximum(top, largest)
    inside = tl.full((), 0.0, tl.float32)
    for start in range(0, k, BLOCK_K):
        j = start + lanes
        z = tl.load(values_ptr + j, mask=j < k, other=float("-inf"))
        inside += tl.sum(tl.exp((z - top) * inverse_tau), 0)
    unit = (largest - top) * inverse_tau
    log_rest = unit + _log(rest)
    log_total = tl.log(inside + tl.exp(log_rest))
    log_inside = tl.log(inside) - log_total
    tail = log_rest - log_total
    log_buckets = log_total
    if TAIL == CLAMPED:
        tail = _log(-_expm1(tl.minimum(log_inside, CLAMPED_AT)))
    if TAIL == DROP:
        log_buckets = tl.log(inside)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    return top, log_buckets, log_inside, tail, unit - log_total, anchor


@triton.jit
def _divergence_kernel(
    s_values_ptr,  # (rows, K) float32 student logits at the ids
    s_maxima_ptr,  # (rows, blocks) float32 statistics of the other tokens; unused without HAS_REST
    s_sums_ptr,
    t_values_ptr,  # the same of the teacher
    t_maxima_ptr,
    t_sums_ptr,
    loss_ptr,  # (rows,) float32, out
    at_ids_ptr,  # (rows, K) float32, out: gradient to z/τ at the ids
    outside_ptr,  # (rows,) float32, out: gradient to z/τ at the anchor
    anchor_ptr,  # (rows,) float32, out
    s_mass_ptr,  # (rows,) float32, out: probability of the ids
    t_mass_ptr,
    s_taus_ptr,  # (rows,) float32 or unused
    t_taus_ptr,
    blocks,
    k,
    s_inverse_tau,
    t_inverse_tau,
    alpha,
    S_HAS_TAUS: tl.constexpr,
    T_HAS_TAUS: tl.constexpr,
    HAS_REST: tl.constexpr,
    TAIL: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    CLOSED: tl.constexpr = TAIL != CLAMPED
    row = tl.program_id(0)
    if S_HAS_TAUS:
        s_inverse_tau = 1.0 / tl.load(s_taus_ptr + row)
    if T_HAS_TAUS:
        t_inverse_tau = 1.0 / tl.load(t_taus_ptr + row)
    wide = row.to(tl.int64)
    s_values_ptr += wide * k
    t_values_ptr += wide * k
    at_ids_ptr += wide * k
    s_top, s_log, s_inside, s_tail, s_unit, anchor = _log_masses(
        s_values_ptr, s_maxima_ptr + wide * blocks, s_sums_ptr + wide * blocks, blocks, k,
        s_inverse_tau, TAIL, HAS_REST, BLOCKS, BLOCK_K,
    )  # fmt: skip
    t_top, t_log, t_inside, t_tail, _t_unit, _t_anchor = _log_masses(
        t_values_ptr, t_maxima_ptr + wide * blocks, t_sums_ptr + wide * blocks, blocks, k,
        t_inverse_tau, TAIL, HAS_REST, BLOCKS, BLOCK_K,
    )  # fmt: skip

    # the tail's bucket, then the ids'
    loss = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    outside = tl.full((), 0.0, tl.float32)
    if TAIL != DROP:
        loss, h_tail, slope = _bucket(s_tail, t_tail, alpha, ENDS, CLOSED)
        live = s_tail > float("-inf")
        if TAIL == CLAMPED:  # at the clamp the tail's gradient is dead
            live = live & (s_inside <= CLAMPED_AT)
            h_tail = tl.where(live, h_tail, 0.0)
        total = h_tail
        outside = tl.where(live, slope, 0.0)
    lanes = tl.arange(0, BLOCK_K)
    for start in range(0, k, BLOCK_K):
        j = start + lanes
        z_s = tl.load(s_values_ptr + j, mask=j < k, other=float("-inf"))
        z_t = tl.load(t_values_ptr + j, mask=j < k, other=float("-inf"))
        s, t = (z_s - s_top) * s_inverse_tau - s_log, (z_t - t_top) * t_inverse_tau - t_log
        term, h, _slopes = _bucket(s, t, alpha, ENDS, CLOSED)
        loss += tl.sum(tl.where(j < k, term, 0.0), 0)
        total += tl.sum(tl.where(j < k, h, 0.0), 0)
    for start in range(0, k, BLOCK_K):
        j = start + lanes
        z_s = tl.load(s_values_ptr + j, mask=j < k, other=float("-inf"))
        z_t = tl.load(t_values_ptr + j, mask=j < k, other=float("-inf"))
        s, t = (z_s - s_top) * s_inverse_tau - s_log, (z_t - t_top) * t_inverse_tau - t_log
        term, h, _slopes = _bucket(s, t, alpha, ENDS, CLOSED)
        tl.store(at_ids_ptr + j, h - tl.exp(s) * total, mask=j < k)
    if TAIL != DROP:
        outside = tl.exp(s_unit) * (outside - total)
        if ENDS == FORWARD:  # p T_tail/S_tail in logarithms: S_tail may be 1e-40
            r = tl.where(s_tail == t_tail, 0.0, t_tail - s_tail)
            outside -= tl.where(live, tl.exp(s_unit + r), 0.0)
    tl.store(loss_ptr + row, loss)
    tl.store(outside_ptr + row, outside)
    tl.store(anchor_ptr + row, anchor)
    tl.store(s_mass_ptr + row, tl.exp(s_inside))
    tl.store(t_mass_ptr + row, tl.exp(t_inside))


@triton.jit
def _logit_gradient_kernel(
    z_ptr,  # (rows, V) any float dtype
    out_ptr,  # (rows, V) contiguous, any float dtype; may be z_ptr
    scale_ptr,  # (rows,) float32 upstream gradient or row weight, stride stride_scale
    outside_ptr,  # (rows,) float32
    anchor_ptr,  # (rows,) float32
    taus_ptr,  # (rows,) float32 or unused
    inner,
    stride_outer,
    stride_inner,
    stride_column,
    stride_scale,
    vocab,
    inverse_tau,
    HAS_TAUS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V).to(tl.int64)
    if HAS_TAUS:
        inverse_tau = 1.0 / tl.load(taus_ptr + row)
    z_ptr += _row_start(row, inner, stride_outer, stride_inner)
    out_ptr += row.to(tl.int64) * vocab
    factor = tl.load(outside_ptr + row) * inverse_tau
    factor *= tl.load(scale_ptr + row.to(tl.int64) * stride_scale)
    z = tl.load(z_ptr + column * stride_column, mask=column < vocab, other=0.0).to(tl.float32)
    # only an id can lie above the anchor, and its place is written again
    power = tl.minimum((z - tl.load(anchor_ptr + row)) * inverse_tau, 0.0)
    grad = (tl.exp(power) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, grad, mask=column < vocab)


@triton.jit
def _place_ids_kernel(
    out_ptr,  # (rows, V) contiguous
    ids_ptr,  # (rows, K) int64
    at_ids_ptr,  # (rows, K) float32
    scale_ptr,  # (rows,) float32, stride stride_scale
    taus_ptr,  # (rows,) float32 or unused
    stride_scale,
    k,
    vocab,
    inverse_tau,
    HAS_TAUS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    if HAS_TAUS:
        inverse_tau = 1.0 / tl.load(taus_ptr + row)
    factor = tl.load(scale_ptr + row * stride_scale) * inverse_tau
    ids = tl.load(ids_ptr + row * k + j, mask=j < k, other=0)
    grad = tl.load(at_ids_ptr + row * k + j, mask=j < k, other=0.0) * factor
    tl.store(out_ptr + row * vocab + ids, grad.to(out_ptr.dtype.element_ty), mask=j < k)


class Side(NamedTuple):
    """One side's logits at the ids and, but for a gather alone, what lies outside of them."""

    values: Tensor  # (rows, K) float32
    statistics: tuple[Tensor, Tensor] | None
    tau: float | Tensor


def student_side(
    logits: Tensor, k: int, ids: Tensor | None, tau: float | Tensor, rest: bool = True
) -> tuple[Tensor, Side]:
    """As `buckets.student_side`; the ids are ascending and `logits` stays as it is."""
    if ids is None and k < logits.shape[-1]:
        statistics = block_statistics(logits, tau)
        ids, values = select(logits, statistics, k, tau)
        return ids, Side(values, statistics if rest else None, tau)
    if ids is None:
        ids = torch.arange(k, device=logits.device).repeat(math.prod(logits.shape[:-1]), 1)
    else:
        ids = ids.sort(dim=1).values
    return ids, teacher_side(logits, ids, tau, rest)


def teacher_side(logits: Tensor, ids: Tensor, tau: float | Tensor, rest: bool = True) -> Side:
    """As `buckets.teacher_side`; `ids` are ascending and `logits` stays as it is."""
    whole = ids.shape[1] == logits.shape[-1]
    statistics = block_statistics(logits, tau) if rest and not whole else None
    values = exclude(logits, statistics, ids, tau)
    if rest and whole:
        nothing = values.new_zeros((ids.shape[0], 1))
        statistics = (nothing - math.inf, nothing)
    return Side(values, statistics, tau)


def compare(student: Side, teacher: Side, alpha: float, tail: str) -> Compared:
    """As `buckets.compare`."""
    rows, k = student.values.shape
    at_ids = student.values.new_empty((rows, k))
    loss, outside, anchor, s_mass, t_mass = (at_ids.new_empty((rows, 1)) for _ in range(5))
    unused = (student.values, student.values)
    s_taus, s_inverse, s_has = temperature_arguments(student.tau, loss)
    t_taus, t_inverse, t_has = temperature_arguments(teacher.tau, loss)
    blocks = 1 if student.statistics is None else student.statistics[0].shape[1]
    _divergence_kernel[(rows,)](
        student.values, *(student.statistics or unused),
        teacher.values, *(teacher.statistics or unused),
        loss, at_ids, outside, anchor, s_mass, t_mass, s_taus, t_taus,
        blocks, k, s_inverse, t_inverse, alpha,
        S_HAS_TAUS=s_has, T_HAS_TAUS=t_has, HAS_REST=student.statistics is not None,
        TAIL=TAIL_CODES[tail], ENDS=0 if alpha == 0 else 2 if alpha == 1 else 1,
        BLOCKS=triton.next_power_of_2(blocks), BLOCK_K=min(BLOCK_K, triton.next_power_of_2(k)),
        num_warps=8, **FUSION,
    )  # fmt: skip
    return Compared(loss, at_ids, outside, anchor, s_mass, t_mass)


def gradient(
    logits: Tensor,
    spare: Tensor,
    ids: Tensor,
    compared: Compared,
    scale: Tensor,
    tau: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """As `buckets.gradient`: in float32 over the logits, in 16 bits over `spare`."""
    rows, vocab = logits.shape
    out = logits
    if dtype != torch.float32 and logits.device.type != "cpu":  # CPU products want float32
        out = spare.view(-1).view(dtype)[: rows * vocab].view(rows, vocab)
    logit_gradient(logits, out, scale, compared.outside, compared.anchor, tau)
    place_ids(out, ids, compared.at_ids, scale, tau)
    return out


def logit_gradient(
    logits: Tensor, out: Tensor, scale: Tensor, outside: Tensor, anchor: Tensor, tau: float | Tensor
) -> None:
    """Write the dense part of the gradient, times `scale` (rows,), into contiguous `out`."""
    rows, vocab = out.shape
    taus, inverse, has_taus = temperature_arguments(tau, anchor)
    flat, layout = row_layout(logits)
    block = min(BLOCK_V, max(32, triton.next_power_of_2(vocab)))
    _logit_gradient_kernel[(rows, triton.cdiv(vocab, block))](
        flat, out, scale, outside, anchor, taus, *layout, scale.stride(0), vocab, inverse,
        HAS_TAUS=has_taus, BLOCK_V=block, num_warps=8, **FUSION,
    )  # fmt: skip


def place_ids(out: Tensor, ids: Tensor, at_ids: Tensor, scale: Tensor, tau: float | Tensor) -> None:
    """Overwrite contiguous `out` (rows, V) at the ids."""
    rows, k = ids.shape
    taus, inverse, has_taus = temperature_arguments(tau, at_ids)
    block = min(BLOCK_K, triton.next_power_of_2(k))
    _place_ids_kernel[(rows, triton.cdiv(k, block))](
        out, ids, at_ids, scale, taus, scale.stride(0), k, out.shape[1], inverse,
        HAS_TAUS=has_taus, BLOCK_K=block, num_warps=4, **FUSION,
    )  # fmt: skip
