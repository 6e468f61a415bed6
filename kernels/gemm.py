"""The LM head's three matrix products on row chunks, with float32 results from any input dtype.

On an accelerator cuBLAS multiplies in the working dtype and writes float32: logits rounded to
bfloat16 would cost 4 to 23 % of the gradient. On a CPU, where 16-bit products are slower than
float32 ones, slabs of the weight are widened to float32 one at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

SLAB_ROWS = 8192  # weight rows that are widened to float32 at a time on a CPU


def prepare_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The (V, D) weight as the products below want it, made once a call; often `weight` itself."""
    if 1 not in weight.stride():  # BLAS would copy all of it for every chunk
        weight = weight.contiguous()
    return weight if weight.device.type == "cpu" else weight.to(dtype)


def logits_into(out: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """out (rows, V) float32 = hidden (rows, D) @ weight.T, factors rounded to `dtype`."""
    hidden = hidden.to(dtype)
    if dtype == torch.float32 and weight.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=out)
    elif out.device.type == "cpu":
        for slab, columns in _slabs(weight, out, dtype):
            torch.mm(hidden.float(), slab.t(), out=columns)
    else:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)


def hidden_gradient(grads: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, D) float32 = grads (rows, V) @ weight."""
    if dtype == torch.float32 and weight.dtype == torch.float32:
        return grads @ weight
    if grads.device.type == "cpu":
        total = torch.zeros(grads.shape[0], weight.shape[1])
        for slab, columns in _slabs(weight, grads, dtype):
            torch.addmm(total, columns, slab, out=total)
        return total
    return torch.mm(grads.to(dtype), weight, out_dtype=torch.float32)


def add_weight_gradient(
    total: Tensor, grads: Tensor, hidden: Tensor, dtype: torch.dtype, first: bool
) -> None:
    """total (V, D) float32 += grads.T @ hidden; `first` overwrites whatever total held."""
    hidden, beta = hidden.to(dtype), 0.0 if first else 1.0
    if dtype == torch.float32 or grads.device.type == "cpu":
        torch.addmm(total, grads.t(), hidden.float(), beta=beta, out=total)
    else:
        g = grads.to(dtype).t()
        torch.addmm(total, g, hidden, out_dtype=torch.float32, beta=beta, out=total)


def _slabs(weight: Tensor, columns: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of (float32 slab of weight rows, the matching columns of a (rows, V) tensor)."""
    for i in range(0, weight.shape[0], SLAB_ROWS):
        j = min(i + SLAB_ROWS, weight.shape[0])
        yield weight[i:j].to(dtype).float(), columns[:, i:j]
