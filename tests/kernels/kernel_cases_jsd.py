"""The top-K divergence's kernels as the library launches them; see kernel_registry.py."""

import math

import torch
from kernel_registry import case

K = 100
BLOCK = 128


def blocks(vocab: int) -> int:
    return math.ceil(vocab / BLOCK) + 1


def made_statistics(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block maxima and sums without launching what is not to be measured."""
    short = blocks(z.shape[1]) * BLOCK - z.shape[1]
    padded = torch.nn.functional.pad(z.float(), (0, short), value=-math.inf)
    tiles = padded.unflatten(1, (-1, BLOCK))
    maxima = tiles.amax(2)
    return maxima, (tiles - maxima.clamp_min(-1e9)[..., None]).exp().sum(2)


def spread_ids(rows: int, vocab: int, device: str) -> torch.Tensor:
    """K ascending ids, each in a block of its own: the most that the exclusion can read."""
    return (torch.arange(K, device=device) * (vocab // K)).repeat(rows, 1)


def compared(rows: int, device: str):
    from cotutor.kernels.buckets import Compared

    at_ids = torch.rand(rows, K, device=device)
    return Compared(*(at_ids if i == 1 else torch.rand(rows, 1, device=device) for i in range(6)))


@case("topk statistics/float32", lambda n, v: n * (4 * v + 8 * blocks(v)))
def _(rows, vocab, device):
    from cotutor.kernels.triton_topk import block_statistics

    block_statistics(torch.randn(rows, vocab, device=device), 0.7)


@case("topk statistics/bfloat16, temperature per row", lambda n, v: n * (2 * v + 8 * blocks(v)))
def _(rows, vocab, device):
    from cotutor.kernels.triton_topk import block_statistics

    z = torch.randn(rows, vocab, device=device).bfloat16()
    block_statistics(z, torch.ones(rows, device=device))


def select_floor(size: int):
    """All maxima; each of K blocks once, and its statistics; block list, list, ids and logits."""
    return lambda n, v: n * (4 * blocks(v) + K * (BLOCK * size + 44))


@case("topk select/float32", select_floor(4))
def _(rows, vocab, device):
    from cotutor.kernels.triton_select import select

    z = torch.randn(rows, vocab, device=device)
    select(z, made_statistics(z), K, 1.0)


@case("topk select/bfloat16", select_floor(2))
def _(rows, vocab, device):
    from cotutor.kernels.triton_select import select

    z = torch.randn(rows, vocab, device=device).bfloat16()
    select(z, made_statistics(z), K, torch.ones(rows, device=device))


@case("topk select/float32, K above the number of blocks")
def _(rows, vocab, device):
    from cotutor.kernels.triton_select import select

    z = torch.randn(rows, vocab, device=device)
    select(z, made_statistics(z), 3000, 1.0)


@case("topk exclude/float32", lambda n, v: n * K * (BLOCK * 4 + 8 + 8 + 8 + 4 + 4))
def _(rows, vocab, device):
    from cotutor.kernels.triton_topk import exclude

    z = torch.randn(rows, vocab, device=device)
    exclude(z, made_statistics(z), spread_ids(rows, vocab, device), 1.0)


@case("topk exclude/bfloat16, gather alone", lambda n, v: n * K * (8 + 2 + 4))
def _(rows, vocab, device):
    from cotutor.kernels.triton_topk import exclude

    z = torch.randn(rows, vocab, device=device).bfloat16()
    exclude(z, None, spread_ids(rows, vocab, device), 1.0)


def divergence_case(name: str, alpha: float, tail: str, rest: bool, taus: bool) -> None:
    # the logits at the ids are read four times, from the cache after the first
    floor = (lambda n, v: n * (16 * blocks(v) + 36 * K)) if rest else None

    @case(f"topk divergence/{name}", floor)
    def _(rows, vocab, device):
        from cotutor.kernels.triton_jsd import Side, compare

        tau = torch.ones(rows, device=device) if taus else 0.7
        sides = [
            Side(
                torch.randn(rows, K, device=device),
                tuple(torch.rand(2, rows, blocks(vocab), device=device)) if rest else None,
                tau,
            )
            for _ in range(2)
        ]
        compare(*sides, alpha, tail)


divergence_case("alpha 0.5", 0.5, "exact", rest=True, taus=False)
divergence_case("alpha 0", 0.0, "exact", rest=True, taus=False)
divergence_case("alpha 1, clamped, temperature per row", 1.0, "clamped", rest=True, taus=True)
divergence_case("alpha 0.5, drop", 0.5, "drop", rest=False, taus=False)


def gradient_case(name: str, z_dtype: torch.dtype, out_dtype: torch.dtype, size: int) -> None:
    floor = lambda n, v: n * (size * v + K * (12 + out_dtype.itemsize))  # noqa: E731 (as above)

    @case(f"topk gradient/{name}", floor)
    def _(rows, vocab, device):
        from cotutor.kernels.triton_jsd import logit_gradient, place_ids

        z = torch.randn(rows, vocab, device=device).to(z_dtype)
        out = z if z_dtype == out_dtype else torch.empty_like(z, dtype=out_dtype)
        scale, result = torch.rand(rows, device=device), compared(rows, device)
        logit_gradient(z, out, scale, result.outside, result.anchor, 0.7)
        place_ids(out, spread_ids(rows, vocab, device), result.at_ids, scale, 0.7)


gradient_case("float32 in place", torch.float32, torch.float32, 8)
gradient_case("float32 to bfloat16", torch.float32, torch.bfloat16, 6)
gradient_case("bfloat16 in place", torch.bfloat16, torch.bfloat16, 4)
