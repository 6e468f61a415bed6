"""One chunk of logits at a time, in plain PyTorch: statistics, gradient, and which rows to visit.

Both log-prob functions stand on this. With z = logits / τ and
log p = (z − m) − log Σ e^{z − m}, m the row's maximum:

    logprob = log p_target          H = −Σ_v p_v log p_v
    ∂/∂z_v = g ([v = target] − p_v) − h p_v (log p_v + H)

for upstream gradients g and h. p log p is 0 where p = 0. The target's own component is
−g expm1(logprob) − …, because 1 − p_target loses its digits when p_target is close to 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .common import TEMPERATURE_WANTED, check_values, temperature_fine

# Logits that are worked on at a time: a float32 part of 2 MiB stays in a core's cache.
PART_ELEMENTS = 1 << 19
# Stands for −inf in products with p = 0.
LOWEST = -1e30


def chunk_statistics(
    z: Tensor, targets: Tensor, *, entropy: bool, kept: Tensor | None = None
) -> Tensor:
    """Statistics of each row, and on request its probabilities; `z` is overwritten.

    Args:
        z: (rows, V) float32, logits divided by the temperature.
        targets: (rows,) int64, all within the vocabulary.
        entropy: whether to compute it.
        kept: (rows, V) in which to leave p for the backward pass, as `decode_kept` reads it.

    Returns:
        (4, rows) float32: log-prob, entropy (zeros unless asked for), maximum m of z and
        log Σ e^{z − m}. The last two stay apart, because their sum would round log p to the
        digits of m.
    """
    rows, vocab = z.shape
    out = z.new_zeros((4, rows))
    for at in range(0, rows, max(1, PART_ELEMENTS // vocab)):
        part = slice(at, at + max(1, PART_ELEMENTS // vocab))
        x = z[part]
        top = x.amax(1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)
        picked = x.sub_(top).gather(1, targets[part, None])
        e = x.exp()
        total = e.sum(1, keepdim=True)
        log_total = total.log()
        out[0, part] = (picked - log_total)[:, 0]
        out[2, part], out[3, part] = top[:, 0], log_total[:, 0]
        x.clamp_(min=LOWEST)
        if entropy:
            out[1, part] = log_total[:, 0] - e.mul_(x).sum(1) / total[:, 0]
        if kept is not None:
            kept[part] = x.sub_(log_total).exp_()
    return out


def fake_statistics(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of the operators' results: logprobs (N,), entropies (N,), norms (2, N)."""
    rows = like.shape[0]
    logprobs, entropies = (like.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return logprobs, entropies, like.new_empty((2, rows), dtype=torch.float32)


def decode_kept(kept: Tensor, log_total: Tensor, log_p: Tensor) -> None:
    """Write log p as float32 into `log_p` (rows, V) from kept p and log Σ e^{z − m} (rows,).

    Above ½ only the row's maximum can lie, whose log p is −log Σ e^{z − m} to full precision; the
    rounding of p to `kept`'s dtype would take all digits from a p close to 1.
    """
    log_p.copy_(kept)
    top = log_p > 0.5
    torch.where(top, -log_total[:, None], log_p.log_(), out=log_p)


def chunk_gradient(
    log_p: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    """Write the gradient towards z into `out` (rows, V), any dtype; `log_p` is overwritten.

    `log_p` is float32 (rows, V); everything else is (rows,). `out` may be `log_p`.
    """
    rows, vocab = log_p.shape
    step = max(1, PART_ELEMENTS // vocab)
    p_target = logprobs.exp()
    exact = -grad_logprobs * logprobs.expm1()
    if grad_entropy is not None:
        log_target = logprobs.clamp(min=LOWEST)
        exact = exact - grad_entropy * p_target * (log_target + entropies)
    for at in range(0, rows, step):
        part = slice(at, at + step)
        p = log_p[part].exp()
        if grad_entropy is None:
            dz = p.mul_(-grad_logprobs[part, None])
        else:
            slope = log_p[part].clamp_(min=LOWEST).add_(entropies[part, None])
            slope.mul_(grad_entropy[part, None]).add_(grad_logprobs[part, None])
            dz = p.mul_(slope).neg_()
        dz.scatter_(1, targets[part, None], exact[part, None])
        out[part] = dz


def trained_index(
    function: str, turn_ids: Tensor | None, trained_rows: int | None
) -> Tensor | None:
    """Indices (T,) of the rows with turn_ids >= 0; None when all rows have to be visited.

    The number of indices is a shape, so a CPU counts them and other devices have to be told:
    without `trained_rows` they visit every row and mask.
    """
    if turn_ids is None:
        return None
    trained = turn_ids >= 0
    if trained_rows is not None:
        count = trained.sum()[None]
        wanted = f"the number of rows with turn_ids >= 0, not {trained_rows}"
        check_values(function, "trained_rows", wanted, count == trained_rows, count)
    if turn_ids.device.type == "cpu":
        index = trained.nonzero()[:, 0]
        return None if len(index) == len(turn_ids) else index
    if trained_rows is None or trained_rows == len(turn_ids):
        return None
    place = torch.where(trained, trained.cumsum(0) - 1, trained_rows)
    index = place.new_zeros(trained_rows + 1)
    index[place] = torch.arange(len(turn_ids), device=turn_ids.device)
    return index[:trained_rows]


def row_chunks(
    index: Tensor | None, rows: int, chunk_rows: int
) -> Iterator[tuple[int, slice | Tensor]]:
    """Yield (how many came before, the next rows as a slice or as indices)."""
    total = rows if index is None else len(index)
    for start in range(0, total, chunk_rows):
        stop = min(start + chunk_rows, total)
        yield start, slice(start, stop) if index is None else index[start:stop]


class Rows(NamedTuple):
    """What every row has besides its logits: targets, mask and temperature, in the op's terms."""

    targets: Tensor  # (N,) integer; anything where the row isn't trained
    turn_ids: Tensor | None  # (N,) integer
    temperature: float
    temperatures: Tensor | None  # (N,) float32, overrides `temperature`

    def check(self, function: str, vocab: int) -> None:
        """Raise on a target outside the vocabulary or an illegal temperature of a trained row."""
        masked = None if self.turn_ids is None else self.turn_ids < 0
        fine = (self.targets >= 0) & (self.targets < vocab)
        fine = fine if masked is None else fine | masked
        check_values(function, "targets", f"0 to {vocab - 1}", fine, self.targets)
        if self.temperatures is not None:
            fine = temperature_fine(self.temperatures)
            fine = fine if masked is None else fine | masked
            check_values(function, "temperature", TEMPERATURE_WANTED, fine, self.temperatures)

    def at(self, rows: slice | Tensor, vocab: int) -> tuple[Tensor, Tensor | None, float | Tensor]:
        """Targets (c,) int64 within the vocabulary, mask or None, temperature or (c, 1) of them."""
        targets = self.targets[rows].long().clamp(0, vocab - 1)
        masked = self.turn_ids is not None and isinstance(rows, slice)
        trained = self.turn_ids[rows] >= 0 if masked and self.turn_ids is not None else None
        if self.temperatures is None:
            return targets, trained, self.temperature
        tau = self.temperatures[rows, None]
        return targets, trained, tau if trained is None else tau.where(trained[:, None], 1)


def scaled(logits: Tensor, trained: Tensor | None, tau: float | Tensor) -> Tensor:
    """A float32 copy of a chunk of logits over τ, zero where the row isn't trained."""
    z = logits.to(torch.float32, copy=True)
    if trained is not None:
        z.masked_fill_(~trained[:, None], 0)
    return over(z, tau)


def over(z: Tensor, tau: float | Tensor) -> Tensor:
    """z / τ in place."""
    return z if isinstance(tau, float) and tau == 1.0 else z.div_(tau)


def masked_zero(values: Tensor, trained: Tensor | None) -> Tensor:
    """`values` (..., c) with exact zeros where the row isn't trained."""
    return values if trained is None else torch.where(trained, values, 0)
