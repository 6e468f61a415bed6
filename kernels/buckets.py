"""Top-K ids, bucket masses and their divergence, on one [rows, V] float32 chunk in plain PyTorch.

Both top-K Jensen-Shannon functions stand on these three steps. A row's buckets are its K ids and
one tail for everything else; all masses are kept as logarithms.

    log p_j = (z_j - m)/τ - log Z,    log tail = log Σ_{v not in I} exp((z_v - m)/τ) - log Z

Numerics: the complement of the ids is summed against its own maximum, so a tail of any size keeps
its value (1 - Σ p_j would lose it below 1e-7). Selection orders by (logit, lower id first) exactly.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .rows import part_of

TAILS = ("exact", "clamped", "drop")
CLAMP = -1e-7  # the published SDPO code's bound on the log of the top-K mass
BLOCK = 64  # columns that share one maximum in the search for the top K
KEYS_AT_ONCE = 1 << 21  # int64 sort keys held at a time: 16 MiB, a few such tensors are alive
LOW_BITS = 0xFFFFFFFF
CACHED = 5 << 17  # logits that several passes in a row can read from a CPU's caches: 2.5 MiB


def top_ids(logits: Tensor, k: int) -> Tensor:
    """The k ids with the largest logits of each row; equal logits: the lower id wins.

    Args:
        logits: (rows, V) float32, any strides; unchanged.
        k: 1 to V.

    Returns:
        (rows, k) int64, largest first.
    """
    rows, vocab = logits.shape
    if k == vocab:
        return torch.arange(vocab, device=logits.device).expand(rows, vocab)
    blocks = math.ceil(vocab / BLOCK)
    columns = torch.arange(vocab if 2 * k >= blocks else BLOCK, device=logits.device)
    width = vocab if 2 * k >= blocks else max(blocks, k * BLOCK)
    found = [logits.new_empty((0, k), dtype=torch.int64)]
    for part in logits.split(max(1, KEYS_AT_ONCE // width)):
        if 2 * k >= blocks:
            found.append(_largest(part, columns, k))
            continue
        # A block outside the k blocks with the largest maxima (ties: lower block) can't hold a
        # top-k element: each of those k blocks holds an element that comes before all of its own.
        best = _largest(_block_maxima(part), torch.arange(blocks, device=part.device), k)
        best = best.sort(dim=1).values
        ids = (best[:, :, None] * BLOCK + columns).flatten(1)
        if vocab % BLOCK == 0:
            found.append(_largest(part.gather(1, ids), ids, k))
        else:
            values = part.gather(1, ids.clamp_max(vocab - 1))
            found.append(_largest(values, ids, k, beyond=vocab))
    return torch.cat(found)


def _block_maxima(logits: Tensor) -> Tensor:
    whole = logits.shape[1] // BLOCK * BLOCK
    maxima = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(2)
    if whole == logits.shape[1]:
        return maxima
    return torch.cat([maxima, logits[:, whole:].amax(1, keepdim=True)], dim=1)


def _largest(values: Tensor, ids: Tensor, k: int, beyond: int | None = None) -> Tensor:
    """The ids of the k largest values, lower id first among equals; ids >= `beyond` never win.

    `values` (rows, n) with n > k; `ids` (n,) or (rows, n), rising.
    """
    if values.device.type != "cpu":
        return _largest_by_keys(values, ids, k, beyond)
    # `topk` takes any of equal values, so its choice stands where the next value is smaller.
    if beyond is not None:
        values = values.masked_fill(ids >= beyond, -math.inf)
    top = values.topk(k + 1, dim=1)
    places = top.indices[:, :k].sort(dim=1).values
    order = values.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    places = places.gather(1, order)
    found = ids[places] if ids.dim() == 1 else ids.gather(1, places)
    tied = (top.values[:, k - 1] == top.values[:, k]).nonzero()[:, 0]
    if tied.numel():
        of_tied = ids if ids.dim() == 1 else ids[tied]
        found[tied] = _largest_by_keys(values[tied], of_tied, k, beyond)
    return found


def _largest_by_keys(values: Tensor, ids: Tensor, k: int, beyond: int | None = None) -> Tensor:
    # + 0.0 makes -0.0 equal to 0.0. As integers, floats order rightly once the negative ones have
    # their magnitude bits flipped; the inverted id below them breaks ties.
    bits = (values + 0.0).view(torch.int32).to(torch.int64)
    keys = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32) | (LOW_BITS - ids)
    if beyond is not None:
        keys.masked_fill_(ids >= beyond, torch.iinfo(torch.int64).min)
    return LOW_BITS - (keys.topk(k, dim=1).values & LOW_BITS)


class Masses(NamedTuple):
    """Log masses of one side's rows, and what its dense gradient needs; all float32."""

    ids: Tensor  # (rows, K) log p of each id
    tail: Tensor  # (rows, 1) log of the complement's mass
    unit: Tensor  # (rows, 1) log p of a token whose logit is `anchor`
    anchor: Tensor  # (rows, 1) the complement's largest logit


def log_masses(logits: Tensor, ids: Tensor, temperature: Tensor | float) -> Masses:
    """Bucket masses of softmax(logits / temperature).

    `logits` (rows, V) float32 is **overwritten** with exp((z - anchor)/temperature) outside the
    ids and 0 at the ids. `temperature` is a number or (rows, 1).
    """
    inside = logits.gather(1, ids)
    logits.scatter_(1, ids, -math.inf)
    largest, anchor, rest = (logits.new_empty(logits.shape[0], 1) for _ in range(3))
    step = max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else logits.shape[0]
    for i in range(0, logits.shape[0], step):
        j = i + step
        z, tau = logits[i:j], part_of(temperature, i, j)
        torch.amax(z, 1, keepdim=True, out=largest[i:j])
        # an empty complement: any finite value
        anchor[i:j] = largest[i:j].masked_fill(largest[i:j] == -math.inf, 0.0)
        z.sub_(anchor[i:j])
        if isinstance(tau, Tensor) or tau != 1.0:
            z.div_(tau)
        torch.sum(z.exp_(), 1, keepdim=True, out=rest[i:j])
    top = torch.maximum(inside.amax(1, keepdim=True), largest)
    unit = (largest - top) / temperature
    inside = (inside - top) / temperature
    log_rest = unit + rest.log()
    log_total = (inside.exp().sum(1, keepdim=True) + log_rest.exp()).log()
    return Masses(inside - log_total, log_rest - log_total, unit - log_total, anchor)


def masses_of_ids(logits: Tensor, ids: Tensor, temperature: Tensor | float) -> Masses:
    """`log_masses` for tail="drop", which reads nothing outside the ids; `logits` is unchanged."""
    none = logits.new_zeros((logits.shape[0], 1))
    return Masses((logits.gather(1, ids) / temperature).log_softmax(1), none, none, none)


def with_tail(masses: Masses, tail: str) -> Tensor:
    """(rows, K + 1) log bucket masses; (rows, K), renormalised, for tail="drop"."""
    if tail == "exact":
        return torch.cat([masses.ids, masses.tail], dim=1)
    if tail == "clamped":
        total = masses.ids.logsumexp(1, keepdim=True).clamp_max(CLAMP)
        return torch.cat([masses.ids, (-total.expm1()).log()], dim=1)
    return masses.ids.log_softmax(1)


class Compared(NamedTuple):
    """Loss and gradient of rows; all float32."""

    loss: Tensor  # (rows, 1)
    at_ids: Tensor  # (rows, K) gradient to z/τ at the ids
    outside: Tensor  # (rows, 1) gradient to z/τ where z = anchor; elsewhere × exp((z - anchor)/τ)
    anchor: Tensor  # (rows, 1) the student's
    student_mass: Tensor  # (rows, 1) probability of the ids
    teacher_mass: Tensor  # (rows, 1)


def student_side(
    logits: Tensor, k: int, ids: Tensor | None, tau: float | Tensor
) -> tuple[Tensor, Masses]:
    """The ids (rows, K), chosen unless given, and the student's masses; `logits` is scratch."""
    ids = top_ids(logits, k) if ids is None else ids
    return ids, log_masses(logits, ids, tau)


def teacher_side(logits: Tensor, ids: Tensor, tau: float | Tensor) -> Masses:
    """The teacher's masses; `logits` is scratch."""
    return log_masses(logits, ids, tau)


def gradient(
    logits: Tensor,
    spare: Tensor,
    ids: Tensor,
    compared: Compared,
    scale: Tensor,
    tau: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The (rows, V) gradient to the student's logits, times `scale` (rows,), over the buffers.

    `logits` is what `student_side` left: exp((z - anchor)/τ), and 0 at the ids. `spare` is a
    second buffer and `dtype` what the products multiply in; neither is needed here.
    """
    factor = scale[:, None] / tau
    return logits.mul_(compared.outside * factor).scatter_(1, ids, compared.at_ids * factor)


def compare(student: Masses, teacher: Masses, alpha: float, tail: str) -> Compared:
    """The divergence of the buckets and its gradient in closed form (no autograd).

    With r = log T - log S per bucket and h = S ∂L/∂S:

        gradient at an id    = h_v - p_v H              H = Σ h
        gradient elsewhere   = p_v (h_tail/S_tail - H)

    Where both sides sum to 1, the ends are written as Σ T r - T + S and Σ -S r - S + T: the same
    value, but no rounding of a log-sum-exp enters to first order, and no bucket is negative.
    """
    s, t = with_tail(student, tail), with_tail(teacher, tail)
    S, T = s.exp(), t.exp()
    r = torch.where(s == t, 0.0, t - s)  # also where both are -inf
    closed = tail != "clamped"  # do the masses of both sides sum to 1?
    if alpha == 0:
        terms = torch.where(T == 0, 0.0, T * r) + (S - T if closed else 0.0)
        h = S - T if closed else -T
        slope = torch.full_like(student.tail, float(closed))  # of h_tail/S_tail, less exp(r_tail)
    elif alpha == 1:
        terms = torch.where(S == 0, 0.0, -S * r)
        h = terms if closed else terms + S
        terms = terms + (T - S if closed else 0.0)
        slope = (0.0 if closed else 1.0) - r[:, -1:]
    else:
        s_m, t_m = _to_mixture(r, alpha)
        h = torch.where(S == 0, 0.0, (1 - alpha) * S * s_m)
        terms = h + torch.where(T == 0, 0.0, alpha * T * t_m)
        slope = (1 - alpha) * s_m[:, -1:]
    loss = terms.sum(1, keepdim=True)
    rest = (student.anchor, *(side.ids.exp().sum(1, keepdim=True) for side in (student, teacher)))
    if tail == "drop":
        at_ids = h - S * h.sum(1, keepdim=True)
        return Compared(loss, at_ids, torch.zeros_like(student.tail), *rest)
    live = s[:, -1:] > -math.inf
    if tail == "clamped":  # at the clamp the tail's gradient is dead
        live = live & (student.ids.logsumexp(1, keepdim=True) <= CLAMP)
        h = torch.cat([h[:, :-1], torch.where(live, h[:, -1:], 0.0)], dim=1)
    total = h.sum(1, keepdim=True)
    outside = student.unit.exp() * (torch.where(live, slope, 0.0) - total)
    if alpha == 0:  # p_v T_tail/S_tail, in logarithms: S_tail may be 1e-40
        outside = outside - torch.where(live, (student.unit + r[:, -1:]).exp(), 0.0)
    return Compared(loss, h[:, :-1] - S[:, :-1] * total, outside, *rest)


def _to_mixture(r: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """log S/M and log T/M from r = log T/S; both are exactly 0 at r = 0 and never overflow."""
    up, down = r.clamp_min(0.0), r.clamp_max(0.0)
    s_m = torch.where(
        r > 0,
        -up - torch.log1p((1 - alpha) * torch.expm1(-up)),
        -torch.log1p(alpha * torch.expm1(down)),
    )
    t_m = torch.where(
        r > 0,
        -torch.log1p((1 - alpha) * torch.expm1(-up)),
        down - torch.log1p(alpha * torch.expm1(down)),
    )
    return s_m, t_m
