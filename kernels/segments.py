"""Sums over turns and sequences: rows that share an id add up, in any order and without atomics.

    sums[r] = Σ_n values[n] [ids[n] = r],   counts[r] = Σ_n [ids[n] = r],   ids[n] = −1: left out

The gradient of values[n] is the upstream gradient of sums[ids[n]].
"""

import torch
from torch import Tensor

from .common import check_device, check_shape, check_values, invalid

ID_DTYPES = (torch.int32, torch.int64)


def segment_sums_torch(values: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """(num_segments,) float64 sums of values (N,); rows with a negative id are never added.

    The order of the additions is fixed on every device: `index_add_` is serial on the CPU, and
    `index_put_` sorts on CUDA, where `index_add_` would use atomics.
    """
    left_in = ids >= 0
    slots = torch.where(left_in, ids, num_segments).long()
    terms = torch.where(left_in, values, 0).double()
    sums = terms.new_zeros(num_segments + 1)
    if values.device.type == "cpu":
        sums.index_add_(0, slots, terms)
    else:
        sums.index_put_((slots,), terms, accumulate=True)
    return sums[:num_segments]


def check_id_tensor(
    function: str, argument: str, ids: Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise unless `ids` is int32 or int64, of this shape and on this device."""
    if ids.dtype not in ID_DTYPES:
        raise invalid(function, argument, "int32 or int64", ids.dtype)
    check_shape(function, argument, ids, shape)
    check_device(function, argument, ids, device)


def check_ids(function: str, argument: str, ids: Tensor, num_segments: int) -> None:
    """Raise unless every id is −1 or below `num_segments` (see `check_values` for when)."""
    wanted = f"-1 (left out) or 0 to {num_segments - 1}"
    check_values(function, argument, wanted, (ids >= -1) & (ids < num_segments), ids)


@torch.library.custom_op("cotutor::segment_sums", mutates_args=())
def segment_sums(
    values: Tensor, ids: Tensor, num_segments: int, function: str, backend: str
) -> tuple[Tensor, Tensor]:
    """Differentiable float32 sums and int32 counts per segment; see the module's formula.

    Args:
        values: (N,) float32.
        ids: (N,) integer, −1 for rows that belong nowhere.
        num_segments: R, known on the host.
        function: the public function that an error should name.
        backend: "torch" or "triton", already resolved.

    Returns:
        (R,) float32 sums and (R,) int32 counts.

    Raises:
        ValueError: an id outside −1 … R − 1.
    """
    check_ids(function, "turn_ids", ids, num_segments)
    if backend == "triton":
        from . import triton_segments

        found = triton_segments.segment_sums(values.contiguous(), ids.contiguous(), num_segments)
        return found[0], found[1].clone()  # counts share their memory with what is unused here
    sums = segment_sums_torch(values, ids, num_segments)
    counts = segment_sums_torch(torch.ones_like(values), ids, num_segments)
    return sums.float(), counts.to(torch.int32)


@segment_sums.register_fake
def _(
    values: Tensor, ids: Tensor, num_segments: int, function: str, backend: str
) -> tuple[Tensor, Tensor]:
    return values.new_empty(num_segments), values.new_empty(num_segments, dtype=torch.int32)


@torch.library.custom_op("cotutor::segment_sums_backward", mutates_args=())
def _segment_sums_backward(grad: Tensor, ids: Tensor) -> Tensor:
    if grad.numel() == 0:
        return grad.new_zeros(ids.shape)
    return torch.where(ids >= 0, grad[ids.clamp_min(0).long()], 0)


@_segment_sums_backward.register_fake
def _(grad: Tensor, ids: Tensor) -> Tensor:
    return grad.new_empty(ids.shape)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_sums: Tensor, grad_counts: Tensor):
    (ids,) = ctx.saved_tensors
    return _segment_sums_backward(grad_sums, ids), None, None, None, None


segment_sums.register_autograd(_backward, setup_context=_setup_context)
