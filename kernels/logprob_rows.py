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


class Rows(NamedTuple):
    """What every row has besides its logits."""

    targets: Tensor  # (N,) integer; anything where the row isn't trained
    turn_ids: Tensor | None  # (N,) integer, negative where the row isn't trained; None: all are
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

    def take(self, here: slice | Tensor, vocab: int) -> "Rows":
        """Some of the rows, targets int64 and inside the vocabulary; indices are trained ones."""
        return Rows(
            self.targets[here].long().clamp(0, vocab - 1),
            None if self.turn_ids is None or isinstance(here, Tensor) else self.turn_ids[here],
            self.temperature,
            None if self.temperatures is None else self.temperatures[here],
        )

    @property
    def trained(self) -> Tensor | None:
        return None if self.turn_ids is None else self.turn_ids >= 0

    def over(self, values: Tensor) -> Tensor:
        """`values` (N,) / τ, zero where the row isn't trained."""
        values = values / (self.temperature if self.temperatures is None else self.temperatures)
        return values if self.turn_ids is None else torch.where(self.turn_ids >= 0, values, 0)


def _scaled(logits: Tensor, rows: Rows) -> Tensor:
    """A float32 copy of logits over τ, zero where the row isn't trained."""
    z = logits.to(torch.float32, copy=True)
    if rows.temperatures is not None:
        z.div_(rows.temperatures[:, None])
    elif rows.temperature != 1.0:
        z.div_(rows.temperature)
    return z if rows.turn_ids is None else z.masked_fill_(rows.turn_ids[:, None] < 0, 0)


def _parts(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, PART_ELEMENTS // vocab)
    return (slice(at, at + step) for at in range(0, rows, step))


def chunk_statistics(
    logits: Tensor, rows: Rows, *, entropy: bool, kept: Tensor | None = None
) -> Tensor:
    """Statistics of each row, and on request its probabilities.

    Args:
        logits: (rows, V), any float dtype and strides; unchanged.
        rows: as `Rows.take` gives them.
        entropy: whether to compute it.
        kept: (rows, V) in which to leave p for `chunk_gradient`.

    Returns:
        (4, rows) float32: log-prob, entropy (zeros unless asked for), maximum m of z and
        log Σ e^{z − m}; zeros where the row isn't trained. The last two stay apart, because their
        sum would round log p to the digits of m.
    """
    count, vocab = logits.shape
    out = logits.new_zeros((4, count), dtype=torch.float32)
    for part in _parts(count, vocab):
        x = _scaled(logits[part], rows.take(part, vocab))
        top = x.amax(1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)
        picked = x.sub_(top).gather(1, rows.targets[part, None])
        e = x.exp()
        total = e.sum(1, keepdim=True)
        log_total = total.log()
        out[0, part] = (picked - log_total)[:, 0]
        out[2, part], out[3, part] = top[:, 0], log_total[:, 0]
        if kept is not None:
            kept[part] = e / total
        if entropy:
            out[1, part] = log_total[:, 0] - e.mul_(x.clamp_(min=LOWEST)).sum(1) / total[:, 0]
    return out if rows.trained is None else torch.where(rows.trained, out, 0)


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
    """Write the gradient towards the logits into `out` (rows, V), any dtype; may be `source`.

    Args:
        source: (rows, V), the logits; or, when `kept`, what `chunk_statistics` left.
        rows: as `Rows.take` gives them.
        found: (4, rows), what `chunk_statistics` returned.
        grad_logprobs, grad_entropy: (rows,) upstream; None where the entropy isn't used.
    """
    count, vocab = source.shape
    logprobs, entropies, top, log_total = found
    g = rows.over(grad_logprobs)
    at_target = -g * logprobs.expm1()
    if grad_entropy is not None:
        h = rows.over(grad_entropy)
        at_target -= h * logprobs.exp() * (logprobs.clamp(min=LOWEST) + entropies)
    for part in _parts(count, vocab):
        if kept:
            log_p = _log_kept(source[part], log_total[part, None])
        else:
            log_p = _scaled(source[part], rows.take(part, vocab))
            log_p.sub_(top[part, None]).sub_(log_total[part, None])
        p = log_p.exp()
        if grad_entropy is None:
            dz = p.mul_(-g[part, None])
        else:
            slope = log_p.clamp_(min=LOWEST).add_(entropies[part, None])
            slope.mul_(h[part, None]).add_(g[part, None])
            dz = p.mul_(slope).neg_()
        dz.scatter_(1, rows.targets[part, None], at_target[part, None])
        out[part] = dz


def _log_kept(kept: Tensor, log_total: Tensor) -> Tensor:
    """log p (rows, V) float32 from kept p and log Σ e^{z − m} (rows, 1).

    Above ½ only the row's maximum can lie, whose log p is −log Σ e^{z − m} to full precision; the
    rounding of p to `kept`'s dtype takes all digits from 1 − p of a p close to 1.
    """
    p = kept.float()
    return torch.where(p > 0.5, -log_total, p.log())


def fake_statistics(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of the operators' results: logprobs (N,), entropies (N,), norms (2, N)."""
    rows = like.shape[0]
    logprobs, entropies = (like.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return logprobs, entropies, like.new_empty((2, rows), dtype=torch.float32)


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
