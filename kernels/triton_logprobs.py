"""Triton kernels of both log-prob functions: one program a row reads, one a piece of a row writes.

With z = logits / τ and m the row's maximum so far, a block of columns updates

    s ← s e^{m − m'} + Σ e^{z − m'}
    t ← (t + s (m − m')) e^{m − m'} + Σ e^{z − m'} (z − m')

so that logprob = (z_target − m) − log s and H = log s − t/s; t is relative to m and does not cancel
when all logits are large. The gradient follows token_logprobs.py, column by column.

Bytes per trained row, b and c the item sizes of logits and output:
    statistics       b·V, and b·V + c·V more where p is kept
    gradient         b·V + c·V (read and write); c·V of zeros where the row isn't trained
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import FUSION
from .logprob_rows import Rows

BLOCK_V = 4096  # columns at a time: 16 elements a thread, four 16-byte loads in float32
NUM_WARPS = 8
TINY = tl.constexpr(1e-38)  # keeps log away from 0, where p is 0 and its log is not used


@triton.jit
def _expm1(y):
    """e^y − 1 for y <= 0, to float32's digits also near 0 (Taylor to y⁹ above −½)."""
    small = tl.maximum(y, -0.5)
    series = 1.0 + small / 9.0
    series = 1.0 + small / 8.0 * series
    series = 1.0 + small / 7.0 * series
    series = 1.0 + small / 6.0 * series
    series = 1.0 + small / 5.0 * series
    series = 1.0 + small / 4.0 * series
    series = 1.0 + small / 3.0 * series
    series = 1.0 + small / 2.0 * series
    return tl.where(y > -0.5, small * series, tl.exp(y) - 1.0)


@triton.jit
def _logprob_statistics_kernel(
    logits_ptr,  # (N, V) any float dtype, strides (stride_row, stride_column)
    targets_ptr,  # (N,) int64, clamped to the vocabulary
    turn_ids_ptr,  # (N,) or unused
    temperatures_ptr,  # (N,) float32 or unused
    found_ptr,  # (4, N) float32: logprob, entropy, maximum, log Σ e^{z − m}
    kept_ptr,  # (N, V) p in its own dtype, or unused
    stride_row,
    stride_column,
    stride_kept,
    rows,
    vocab,
    inverse_temperature,
    HAS_MASK: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    found_ptr += row
    if HAS_MASK:  # noqa: SIM102 (one is known when compiling)
        if tl.load(turn_ids_ptr + row) < 0:
            for i in tl.static_range(4):
                tl.store(found_ptr + i * rows, 0.0)
            return
    if HAS_TEMPERATURES:
        inverse_temperature = 1.0 / tl.load(temperatures_ptr + row)
    row = row.to(tl.int64)  # rows · V passes 2³¹
    logits_ptr += row * stride_row

    # One read: maximum, Σ e^{z − m}, Σ e^{z − m} (z − m).
    columns = tl.arange(0, BLOCK_V).to(tl.int64)
    m = tl.full((), 0.0, tl.float32)
    s = tl.full((), 0.0, tl.float32)
    t = tl.full((), 0.0, tl.float32)
    seen = tl.full((), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK_V):
        here = start + columns
        z = tl.load(logits_ptr + here * stride_column, mask=here < vocab, other=float("-inf"))
        z = z.to(tl.float32) * inverse_temperature
        seen = tl.maximum(seen, tl.max(z, 0))
        top = tl.where(seen == float("-inf"), 0.0, seen)  # nothing but −inf so far
        z -= top
        e = tl.exp(z)
        fade = tl.exp(m - top)
        if ENTROPY:
            # where: e = 0 wherever z = −inf, and 0 · −inf would be NaN
            t = tl.where(s > 0, fade * (t + s * (m - top)), t)
            t += tl.sum(tl.where(e > 0, e * z, e), 0)
        s = tl.where(s > 0, s * fade, s) + tl.sum(e, 0)  # fade may be inf while s is 0
        m = top

    log_s = tl.log(s)
    target = tl.load(targets_ptr + row)
    z_target = tl.load(logits_ptr + target * stride_column).to(tl.float32) * inverse_temperature
    tl.store(found_ptr, (z_target - m) - log_s)
    tl.store(found_ptr + rows, log_s - t / s if ENTROPY else 0.0)
    tl.store(found_ptr + 2 * rows, m)
    tl.store(found_ptr + 3 * rows, log_s)

    # One more read, backwards, because the last blocks are still in the cache.
    if KEEP:
        kept_ptr += row * stride_kept
        blocks = tl.cdiv(vocab, BLOCK_V)
        for i in range(blocks):
            here = (blocks - 1 - i) * BLOCK_V + columns
            inside = here < vocab
            z = tl.load(logits_ptr + here * stride_column, mask=inside, other=float("-inf"))
            p = tl.exp((z.to(tl.float32) * inverse_temperature - m) - log_s)
            tl.store(kept_ptr + here, p.to(kept_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _logprob_gradient_kernel(
    source_ptr,  # (N, V) logits, strides (stride_row, stride_column); kept p when KEPT
    out_ptr,  # (N, V) gradient towards the logits, row stride stride_out; may be source_ptr
    targets_ptr,  # (N,) int64, clamped to the vocabulary
    turn_ids_ptr,  # (N,) or unused
    temperatures_ptr,  # (N,) float32 or unused
    found_ptr,  # (4, N) float32, as the statistics kernel wrote it
    grad_logprob_ptr,  # (N,) float32, stride stride_grad_logprob
    grad_entropy_ptr,  # (N,) float32, stride stride_grad_entropy, or unused
    stride_row,
    stride_column,
    stride_out,
    stride_grad_logprob,
    stride_grad_entropy,
    rows,
    vocab,
    inverse_temperature,
    HAS_MASK: tl.constexpr,
    HAS_TEMPERATURES: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    here = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V).to(tl.int64)
    inside = here < vocab
    out_ptr += row.to(tl.int64) * stride_out
    if HAS_MASK:  # noqa: SIM102 (one is known when compiling)
        if tl.load(turn_ids_ptr + row) < 0:
            zeros = tl.zeros((BLOCK_V,), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + here, zeros, mask=inside)
            return
    if HAS_TEMPERATURES:
        inverse_temperature = 1.0 / tl.load(temperatures_ptr + row)

    logprob = tl.load(found_ptr + row)
    log_s = tl.load(found_ptr + 3 * rows + row)
    g = tl.load(grad_logprob_ptr + row.to(tl.int64) * stride_grad_logprob) * inverse_temperature
    at_target = -g * _expm1(logprob)
    if ENTROPY:
        entropy = tl.load(found_ptr + rows + row)
        h = tl.load(grad_entropy_ptr + row.to(tl.int64) * stride_grad_entropy)
        h *= inverse_temperature
        p_log_p = tl.where(logprob == float("-inf"), 0.0, tl.exp(logprob) * (logprob + entropy))
        at_target -= h * p_log_p

    source_ptr += row.to(tl.int64) * stride_row
    x = tl.load(source_ptr + here * stride_column, mask=inside, other=0.0).to(tl.float32)
    if KEPT:
        # Only the maximum passes ½; its log p is −log s, to more digits than bfloat16 has left.
        log_p = tl.where(x > 0.5, -log_s, tl.log(tl.maximum(x, TINY)))
        p = tl.where(x > 0.5, tl.exp(-log_s), x)
    else:
        log_p = (x * inverse_temperature - tl.load(found_ptr + 2 * rows + row)) - log_s
        p = tl.exp(log_p)
    dz = -g * p
    if ENTROPY:
        dz = tl.where(p > 0, -p * (g + h * (log_p + entropy)), p)
    dz = tl.where(here == tl.load(targets_ptr + row), at_target, dz)
    tl.store(out_ptr + here, dz.to(out_ptr.dtype.element_ty), mask=inside)


def _block(vocab: int) -> dict[str, int | bool]:
    """Launch size: a short vocabulary gets one small block."""
    block = min(BLOCK_V, max(32, triton.next_power_of_2(vocab)))
    return {"BLOCK_V": block, "num_warps": NUM_WARPS if block == BLOCK_V else 4, **FUSION}


def chunk_statistics(
    logits: Tensor, rows: Rows, *, entropy: bool, kept: Tensor | None = None
) -> Tensor:
    """As `logprob_rows.chunk_statistics`."""
    count, vocab = logits.shape
    found = logits.new_empty((4, count), dtype=torch.float32)
    if count == 0:
        return found
    _logprob_statistics_kernel[(count,)](
        logits,
        rows.targets,
        rows.targets if rows.turn_ids is None else rows.turn_ids,
        found if rows.temperatures is None else rows.temperatures,
        found,
        found if kept is None else kept,
        logits.stride(0),
        logits.stride(1),
        0 if kept is None else kept.stride(0),
        count,
        vocab,
        1.0 / rows.temperature,
        HAS_MASK=rows.turn_ids is not None,
        HAS_TEMPERATURES=rows.temperatures is not None,
        ENTROPY=entropy,
        KEEP=kept is not None,
        **_block(vocab),
    )
    return found


def chunk_gradient(
    source: Tensor,
    rows: Rows,
    found: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
    *,
    kept: bool = False,
) -> None:
    """As `logprob_rows.chunk_gradient`."""
    count, vocab = source.shape
    if count == 0:
        return
    found = found.contiguous()
    sizes = _block(vocab)
    _logprob_gradient_kernel[(count, triton.cdiv(vocab, sizes["BLOCK_V"]))](
        source,
        out,
        rows.targets,
        rows.targets if rows.turn_ids is None else rows.turn_ids,
        found if rows.temperatures is None else rows.temperatures,
        found,
        grad_logprobs,
        found if grad_entropy is None else grad_entropy,
        source.stride(0),
        source.stride(1),
        out.stride(0),
        grad_logprobs.stride(0),
        0 if grad_entropy is None else grad_entropy.stride(0),
        count,
        vocab,
        1.0 / rows.temperature,
        HAS_MASK=rows.turn_ids is not None,
        HAS_TEMPERATURES=rows.temperatures is not None,
        ENTROPY=grad_entropy is not None,
        KEPT=kept,
        **sizes,
    )
