"""The LM head's matrix products: operands in the working dtype, results and sums in float32.

A float32 result of bfloat16 operands costs nothing on CUDA's tensor cores and spares the logits
the rounding to 8 bits. A CPU has no such product, so there the operands are widened instead; the
values are the same.
"""

import torch
from torch import Tensor


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to `dtype`, and held in float32 where the device can't multiply it otherwise."""
    x = x.to(dtype)
    return x if x.device.type == "cuda" else x.float()


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a (m, k) @ b (k, n) as float32, into `out` when given."""
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def multiply_add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total (m, n) float32 += a (m, k) @ b (k, n), in place."""
    if a.dtype == torch.float32:
        return total.addmm_(a, b)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
