"""Top-K Jensen-Shannon divergence with a tail bucket, from logits.

The buckets are the student's K largest logits (or the caller's ids) and one tail for all other
tokens. With bucket masses S (student), T (teacher) and M = (1 - α) S + α T:

    α = 0      KL(T‖S)                              (forward KL)
    0 < α < 1  (1 - α) KL(S‖M) + α KL(T‖M)
    α = 1      KL(S‖T)                              (reverse KL)

The ends are *not* the limits of the middle, which goes to 0 there: JSD/α → KL(T‖S) as α → 0 and
JSD/(1 - α) → KL(S‖T) as α → 1.

Gradient, to the student only (h = S ∂L/∂S, H = Σ h): (h_v - p_v H)/τ at an id, and
p_v (h_tail/S_tail - H)/τ elsewhere: one scalar per row times softmax plus K corrections.

Numerics: float32 inside whatever the inputs are; masses as logarithms; see buckets.py.
Memory: forward O(chunk V), backward the gradient itself; of size N V only the inputs are kept.
Source: SDPO, arXiv 2601.20802; OPCoD, arXiv 2606.14368, Table 4.
Not supported: double backward, gradients to the teacher, float64.
"""

import math

import torch
from torch import Tensor

from . import common
from .buckets import TAILS, compare, log_masses, masses_of_ids, top_ids
from .rows import part_of

NAME = "topk_jsd"


def topk_jsd_reference(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    k: int = 100,
    alpha: float = 0.5,
    tail: str = "exact",
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    ids: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The definition of `topk_jsd` in float64 and plain PyTorch, differentiable by autograd."""
    if teacher_temperature is None:
        teacher_temperature = temperature
    if ids is None:
        order = student_logits.detach().sort(dim=-1, descending=True, stable=True).indices
        ids = order[..., :k]
    s = _log_buckets(student_logits, temperature, ids.long(), tail)
    t = _log_buckets(teacher_logits.detach(), teacher_temperature, ids.long(), tail)
    if alpha == 0:
        return _kl(t, s)
    if alpha == 1:
        return _kl(s, t)
    s, t = s.clamp_min(-1e9), t.clamp_min(-1e9)  # exp is 0 there too, and no gradient is NaN
    m = torch.logaddexp(math.log1p(-alpha) + s, math.log(alpha) + t)
    return (1 - alpha) * _kl(s, m) + alpha * _kl(t, m)


def _log_buckets(logits: Tensor, temperature: float | Tensor, ids: Tensor, tail: str) -> Tensor:
    """(..., K + 1) log masses, tail last; (..., K) for tail="drop"."""
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[..., None]
    z = logits.double() / temperature
    log_p = z.log_softmax(-1).gather(-1, ids)
    if tail == "drop":
        return log_p.log_softmax(-1)
    if tail == "clamped":
        log_tail = torch.log(-torch.expm1(log_p.logsumexp(-1, keepdim=True).clamp(max=-1e-7)))
        return torch.cat([log_p, log_tail], -1)
    rest = z.scatter(-1, ids, -math.inf)
    empty = (rest == -math.inf).all(-1, keepdim=True)
    log_rest = rest.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    log_tail = log_rest - z.logsumexp(-1, keepdim=True)
    return torch.cat([log_p, log_tail.masked_fill(empty, -math.inf)], -1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Σ a (log a - log b), 0 where a = 0: `where` before the product keeps gradients finite."""
    some = log_a > -math.inf
    difference = torch.where(some, log_a, 0.0) - torch.where(some, log_b, 0.0)
    return (log_a.exp() * difference).sum(-1)


def topk_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    k: int = 100,
    alpha: float = 0.5,
    tail: str = "exact",
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    ids: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Divergence of student and teacher on the student's top K tokens and a tail, per row, in nats.

    Args:
        student_logits: (..., V) float32, bfloat16 or float16, any strides.
        teacher_logits: (..., V), the same shape; its dtype may differ. Treated as a constant.
        k: tokens in the support, at least 1; K >= V gives the divergence of the full softmaxes.
        alpha: the teacher's share of the mixture, in [0, 1]; 0 is KL(teacher‖student), 1 is
            KL(student‖teacher), and the two ends are not the limits of what lies between.
        tail: "exact" keeps the rest of the vocabulary as one bucket, computed from its logits;
            "clamped" takes it as 1 - Σp with the published code's clamp (for parity only: its
            gradient is dead above a top-K mass of 1 - 1e-7); "drop" renormalises over the K tokens.
        temperature: τ > 0, a number or one value per row, shape (...).
        teacher_temperature: the same for the teacher; None means the student's.
        ids: (..., K) whole numbers, distinct in a row: a support to use instead of the top K.
        backend: "auto", "triton" or "torch".

    Returns:
        (...,) float32.

    Raises:
        ValueError: for arguments outside of the above.

    Gradients: to `student_logits`, for any upstream gradient per row; once differentiable.
    Source: SDPO, arXiv 2601.20802; OPCoD, arXiv 2606.14368, Table 4.
    """
    lead, vocab = student_logits.shape[:-1], student_logits.shape[-1]
    device = student_logits.device
    common.check_float(NAME, "student_logits", student_logits)
    common.check_float(NAME, "teacher_logits", teacher_logits)
    common.check_shape(NAME, "teacher_logits", teacher_logits, tuple(student_logits.shape))
    common.check_device(NAME, "teacher_logits", teacher_logits, device)
    k = check_support(NAME, k, alpha, tail, ids, tuple(lead), vocab, device)
    chosen = common.resolve_backend(NAME, backend, device)
    if teacher_temperature is None:
        teacher_temperature = temperature
    tau, taus = common.split_temperature(NAME, "temperature", temperature, tuple(lead), device)
    teacher_tau, teacher_taus = common.split_temperature(
        NAME, "teacher_temperature", teacher_temperature, tuple(lead), device
    )
    flat_ids = None if ids is None else ids.reshape(-1, k).long()
    loss = torch.ops.cotutor.topk_jsd(
        student_logits, teacher_logits.detach(), flat_ids, taus, teacher_taus,
        tau, teacher_tau, k, float(alpha), tail, chosen,
    )[0]  # fmt: skip
    return loss.view(lead)


def check_support(
    function: str,
    k: int,
    alpha: float,
    tail: str,
    ids: Tensor | None,
    lead: tuple[int, ...],
    vocab: int,
    device: torch.device,
) -> int:
    """Check what both top-K functions share; return the support size that will be used."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise common.invalid(function, "k", "a whole number of at least 1", repr(k))
    if not 0.0 <= alpha <= 1.0:
        raise common.invalid(function, "alpha", "between 0 and 1", alpha)
    if tail not in TAILS:
        raise common.invalid(function, "tail", "one of " + ", ".join(map(repr, TAILS)), repr(tail))
    if vocab < 1:
        raise common.invalid(function, "the vocabulary", "at least 1 token", vocab)
    if ids is None:
        return min(k, vocab)
    if ids.dtype not in (torch.int64, torch.int32):
        raise common.invalid(function, "ids", "int64 or int32", ids.dtype)
    common.check_device(function, "ids", ids, device)
    if ids.dim() != len(lead) + 1 or tuple(ids.shape[:-1]) != lead or ids.shape[-1] < 1:
        shape = f"of shape {(*lead, 'K')} with K >= 1"
        raise common.invalid(function, "ids", shape, f"shape {tuple(ids.shape)}")
    if ids.shape[-1] > vocab:
        raise common.invalid(function, "ids", f"at most V = {vocab} per row", ids.shape[-1])
    return ids.shape[-1]


def check_row_values(
    function: str,
    ids: Tensor | None,
    vocab: int,
    temperature: float | Tensor,
    teacher_temperature: float | Tensor,
) -> None:
    """The checks that need values: ids in range and distinct, temperatures legal."""
    if ids is not None and ids.numel():
        inside = (ids >= 0) & (ids < vocab)
        common.check_values(function, "ids", f"in 0 ... {vocab - 1}", inside, ids)
        ordered = ids.sort(dim=1).values
        distinct = ordered.diff(dim=1) > 0
        common.check_values(function, "ids", "distinct in each row", distinct, ordered[:, 1:])
    for name, values in (
        ("temperature", temperature),
        ("teacher_temperature", teacher_temperature),
    ):
        if isinstance(values, Tensor):
            fine = common.temperature_fine(values)
            common.check_values(function, name, common.TEMPERATURE_WANTED, fine, values)


@torch.library.custom_op("cotutor::topk_jsd", mutates_args=())
def _topk_jsd_op(
    student: Tensor, teacher: Tensor, ids: Tensor | None, taus: Tensor | None,
    teacher_taus: Tensor | None, tau: float, teacher_tau: float, k: int, alpha: float,
    tail: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss (N,), ids (N, K), gradient at ids (N, K), gradient outside (N, 1), anchor (N, 1))."""
    taus_s = tau if taus is None else taus[:, None]
    taus_t = teacher_tau if teacher_taus is None else teacher_taus[:, None]
    check_row_values(NAME, ids, student.shape[-1], taus_s, taus_t)
    out = _outputs(student, k)
    loss, used, at_ids, outside, anchor = out
    rows = loss.shape[0]
    if backend == "triton" and rows > 0:
        return _forward_triton(student, teacher, ids, taus_s, taus_t, k, alpha, tail)
    if ids is not None:
        used.copy_(ids)
    step = common.choose_chunk_rows(NAME, None, rows, student.shape[-1], student.device)
    for i in range(0, rows, step):
        j = min(i + step, rows)
        z = _scratch(student, i, j)
        if ids is None:
            used[i:j] = top_ids(z, k)
        masses = masses_of_ids if tail == "drop" else log_masses
        s = masses(z, used[i:j], part_of(taus_s, i, j))
        z.copy_(_rows(teacher, i, j))
        t = masses(z, used[i:j], part_of(taus_t, i, j))
        result = compare(s, t, alpha, tail)
        loss[i:j] = result.loss[:, 0]
        at_ids[i:j], outside[i:j], anchor[i:j] = result.at_ids, result.outside, s.anchor
    return out


def _forward_triton(
    student: Tensor, teacher: Tensor, ids: Tensor | None, tau: float | Tensor,
    teacher_tau: float | Tensor, k: int, alpha: float, tail: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from . import triton_jsd  # here: a machine without Triton does without it

    rest = tail != "drop"
    used, s = triton_jsd.student_side(student, k, ids, tau, rest)
    t = triton_jsd.teacher_side(teacher, used, teacher_tau, rest)
    result = triton_jsd.compare(s, t, alpha, tail)
    return result.loss[:, 0], used, result.at_ids, result.outside, result.anchor


def _scratch(logits: Tensor, start: int, stop: int) -> Tensor:
    """A contiguous float32 copy of rows start ... stop, to be overwritten."""
    part = _rows(logits, start, stop)
    return part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _rows(logits: Tensor, start: int, stop: int) -> Tensor:
    """Rows start ... stop of (..., V) logits as (rows, V), without copying the whole tensor."""
    try:
        return logits.view(-1, logits.shape[-1])[start:stop]
    except RuntimeError:  # leading dimensions that don't merge, such as [S, B, V] seen as [B, S, V]
        rows = torch.arange(start, stop, device=logits.device)
        return logits[torch.unravel_index(rows, logits.shape[:-1])]


def _outputs(student: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, device = math.prod(student.shape[:-1]), student.device
    loss = torch.empty(rows, device=device)
    ids = torch.empty(rows, k, device=device, dtype=torch.int64)
    at_ids, outside, anchor = (torch.empty(rows, n, device=device) for n in (k, 1, 1))
    return loss, ids, at_ids, outside, anchor


@_topk_jsd_op.register_fake
def _fake_outputs(
    student, teacher, ids, taus, teacher_taus, tau, teacher_tau, k, alpha, tail, backend
):
    return _outputs(student, k)


@torch.library.custom_op("cotutor::topk_jsd_backward", mutates_args=())
def _topk_jsd_backward_op(
    upstream: Tensor, student: Tensor, ids: Tensor, at_ids: Tensor, outside: Tensor,
    anchor: Tensor, taus: Tensor | None, tau: float, tail: str, backend: str,
) -> Tensor:  # fmt: skip
    """The gradient to the student's logits, contiguous, in their dtype and shape."""
    grad = torch.empty(student.shape, dtype=student.dtype, device=student.device)
    rows, vocab = ids.shape[0], student.shape[-1]
    flat = grad.view(-1, vocab)
    temperature = tau if taus is None else taus[:, None]
    if backend == "triton" and rows > 0:
        from . import triton_jsd

        if tail == "drop":
            flat.zero_()
        else:
            triton_jsd.logit_gradient(student, flat, upstream, outside, anchor, temperature)
        triton_jsd.place_ids(flat, ids, at_ids, upstream, temperature)
        return grad
    scale = upstream[:, None] / temperature
    at_ids, outside = at_ids * scale, outside * scale
    if tail == "drop":
        flat.zero_().scatter_(1, ids, at_ids.to(grad.dtype))
        return grad
    step = common.choose_chunk_rows(NAME, None, rows, vocab, student.device)
    for i in range(0, rows, step):
        j = min(i + step, rows)
        z = _scratch(student, i, j)
        z.sub_(anchor[i:j]).div_(part_of(temperature, i, j))
        flat[i:j] = z.exp_().mul_(outside[i:j]).scatter_(1, ids[i:j], at_ids[i:j])
    return grad


@_topk_jsd_backward_op.register_fake
def _gradient_like(upstream: Tensor, student: Tensor, *others: object) -> Tensor:
    return torch.empty(student.shape, dtype=student.dtype, device=student.device)


def _save_for_backward(ctx, inputs, output) -> None:
    student, _, _, taus, _, tau, _, _, _, tail, backend = inputs
    _, ids, at_ids, outside, anchor = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(student, ids, at_ids, outside, anchor, taus)
    ctx.settings = (tau, tail, backend)


def _backward(ctx, upstream: Tensor | None, *unused: Tensor):
    """The saved tensors take 12 bytes per row and id; the logits are the caller's own."""
    student, ids, at_ids, outside, anchor, taus = ctx.saved_tensors
    tau, tail, backend = ctx.settings
    if upstream is None:
        return (None,) * 11
    grad = torch.ops.cotutor.topk_jsd_backward(
        upstream, student, ids, at_ids, outside, anchor, taus, tau, tail, backend
    )
    return grad, None, None, None, None, None, None, None, None, None, None


_topk_jsd_op.register_autograd(_backward, setup_context=_save_for_backward)
