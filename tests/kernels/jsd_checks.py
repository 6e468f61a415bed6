"""Checks of the top-K divergences that take the functions as arguments.

The tests run them on the library, and the tests of the tests run them on deliberately broken
copies, on which each must fail.
"""

import math

import torch
from torch import Tensor

from cotutor.kernels import topk_jsd_reference


def logits(rows: int, vocab: int, *, seed: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def pair(rows, vocab, dtype, device, *, seed=0, scale=3.0) -> tuple[Tensor, Tensor]:
    """Student and teacher logits that agree roughly, as two checkpoints of one model do."""
    student = logits(rows, vocab, seed=seed, scale=scale)
    teacher = student + logits(rows, vocab, seed=seed + 1, scale=scale / 3)
    return student.to(device, dtype), teacher.to(device, dtype)


def plain_topk_jsd(z_s, z_t, ids, alpha, tail, tau=1.0) -> Tensor:
    """What one would write with autograd, in float32; an implementation of its own."""

    def buckets(z: Tensor) -> Tensor:
        logp = (z.float() / tau).log_softmax(-1)
        inside = logp.gather(-1, ids)
        if tail == "drop":
            return inside - inside.logsumexp(-1, keepdim=True)
        if ids.shape[-1] == z.shape[-1]:
            return inside
        if tail == "exact":
            rest = logp.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
        else:
            rest = torch.log(-torch.expm1(inside.logsumexp(-1, keepdim=True).clamp(max=-1e-7)))
        return torch.cat([inside, rest], -1)

    s, t = buckets(z_s), buckets(z_t.detach())
    if alpha == 0:
        return (t.exp() * (t - s)).sum(-1)
    if alpha == 1:
        return (s.exp() * (s - t)).sum(-1)
    m = torch.log((1 - alpha) * s.exp() + alpha * t.exp())
    return (1 - alpha) * (s.exp() * (s - m)).sum(-1) + alpha * (t.exp() * (t - m)).sum(-1)


def check_against_float64(
    topk_jsd, bound, *, device, backend, rows=3, vocab=300, k=7, alpha=0.5, tail="exact", tau=1.0,
    dtype=torch.float32, seed=0, scale=3.0,
) -> None:  # fmt: skip
    """Value and gradient, at the ids and outside of them, against the float64 reference."""
    z_s, z_t = pair(rows, vocab, dtype, device, seed=seed, scale=scale)
    z_s.requires_grad_()
    upstream = torch.linspace(-1.0, 2.0, rows, device=device)
    options = {"k": k, "alpha": alpha, "tail": tail, "temperature": tau}
    got = topk_jsd(z_s, z_t, backend=backend, **options)
    truth = topk_jsd_reference(z_s, z_t, **options)
    order = z_s.detach().float().sort(dim=1, descending=True, stable=True).indices
    ids = order[:, : min(k, vocab)]
    column = tau[:, None] if isinstance(tau, Tensor) else tau
    plain = plain_topk_jsd(z_s, z_t, ids, alpha, tail, column)
    assert got.dtype == torch.float32
    bound(got, truth, plain, name="loss")
    (g,) = torch.autograd.grad(got, z_s, upstream)
    (g_plain,) = torch.autograd.grad(plain, z_s, upstream)
    assert g.dtype == dtype
    wide = z_s.detach().double().requires_grad_()  # the true gradient, before it is rounded
    (g_truth,) = torch.autograd.grad(
        topk_jsd_reference(wide, z_t, ids=ids, **options), wide, upstream.double()
    )
    for name, at in (("at the ids", ids), ("outside", order[:, k:])):
        if at.numel() and (tail != "drop" or name == "at the ids"):
            bound(
                g.gather(1, at), g_truth.gather(1, at), g_plain.gather(1, at), name=f"grad {name}"
            )
    if tail == "drop":
        assert not g.gather(1, order[:, k:]).any()


def check_hand_worked(topk_jsd, *, device, backend) -> None:
    """Three tokens, K = 1: masses (0.5 | 0.5) and (0.2 | 0.8), mixture (0.35 | 0.65).

    loss = ½ [½ ln(.5/.35) + ½ ln(.5/.65)] + ½ [.2 ln(.2/.35) + .8 ln(.8/.65)] = 0.0506718
    h = ½ · ½ (ln(.5/.35), ln(.5/.65)) = (0.0891687, -0.0655911),  H = 0.0235776
    gradient = (h_0 - .5 H, .3 (h_t/.5 - H), .2 (h_t/.5 - H))
    """
    z_s = torch.tensor([[0.5, 0.3, 0.2]], device=device).log().requires_grad_()
    z_t = torch.tensor([[0.2, 0.5, 0.3]], device=device).log()
    loss = topk_jsd(z_s, z_t, k=1, alpha=0.5, backend=backend)
    (g,) = torch.autograd.grad(loss.sum(), z_s)
    torch.testing.assert_close(loss.cpu(), torch.tensor([0.0506718]), rtol=2e-6, atol=0)
    expected = torch.tensor([[0.0773799, -0.0464279, -0.0309520]])
    torch.testing.assert_close(g.cpu(), expected, rtol=3e-6, atol=0)
    # the same logits, doubled, at temperature 2: the same loss, half the gradient
    z2 = (2 * z_s.detach()).requires_grad_()
    loss = topk_jsd(z2, 2 * z_t, k=1, alpha=0.5, temperature=2.0, backend=backend)
    (g,) = torch.autograd.grad(loss.sum(), z2)
    torch.testing.assert_close(loss.detach().cpu(), torch.tensor([0.0506718]), rtol=2e-6, atol=0)
    torch.testing.assert_close(g.cpu(), expected / 2, rtol=3e-6, atol=0)


def heads(rows, width, teacher_width, vocab, dtype, device, *, seed=0):
    """Hidden states and LM heads of a student and of a teacher that differs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    return (
        normal(rows, width), normal(vocab, width, scale=2 / width**0.5),
        normal(rows, teacher_width), normal(vocab, teacher_width, scale=2 / teacher_width**0.5),
    )  # fmt: skip


def plain_linear(hidden, weight, teacher_hidden, teacher_weight, ids, row_weights, alpha, tau):
    """The plain path in the tensors' own dtype: GEMMs, then `plain_topk_jsd`; returns (N,), ()."""
    per_row = plain_topk_jsd(
        hidden @ weight.T, teacher_hidden @ teacher_weight.T, ids, alpha, "exact", tau
    )
    return per_row, (per_row * row_weights).sum()


def check_linear_against_float64(
    linear_topk_jsd, bound, *, device, backend, rows=7, vocab=300, k=6, alpha=0.5, tau=0.7,
    dtype=torch.float32, chunk_rows=3,
) -> None:  # fmt: skip
    """Loss, per-row values, masses and both gradients against float64, with row weights."""
    states = heads(rows, 24, 16, vocab, dtype, device)
    weights = torch.linspace(-0.5, 1.5, rows, device=device)
    weights[1] = 0.0
    hidden, weight = (x.requires_grad_() for x in states[:2])
    z_s, z_t = (a.double() @ b.double().T for a, b in (states[:2], states[2:]))
    ids = z_s.detach().topk(min(k, vocab)).indices
    got = linear_topk_jsd(
        *states, row_weights=weights, ids=ids, alpha=alpha, temperature=tau,
        chunk_rows=chunk_rows, backend=backend,
    )  # fmt: skip
    per_row = topk_jsd_reference(z_s, z_t, ids=ids, alpha=alpha, temperature=tau)
    truth = (per_row * weights.double()).sum()
    live = weights != 0
    plain_rows, plain = plain_linear(*states, ids, weights, alpha, tau)
    bound(got.per_row[live], per_row[live], plain_rows[live], dtype, name="per row")
    bound(got.loss, truth, plain, dtype, name="loss")
    assert not got.per_row[~live].any()
    for mine, z in ((got.student_topk_mass, z_s), (got.teacher_topk_mass, z_t)):
        mass = (z / tau).softmax(1).gather(1, ids).sum(1)
        bound(mine[live], mass[live], mass[live], dtype, floor=8, name="mass")
    wide = [x.detach().double().requires_grad_() for x in states[:2]]
    exact = topk_jsd_reference(
        wide[0] @ wide[1].T, z_t.detach(), ids=ids, alpha=alpha, temperature=tau
    )
    true = torch.autograd.grad((exact * weights.double()).sum(), wide)
    mine = torch.autograd.grad(got.loss, (hidden, weight))
    plains = torch.autograd.grad(plain, (hidden, weight))
    for name, g, g_true, g_plain in zip(("dH", "dW"), mine, true, plains, strict=True):
        assert g.dtype == dtype
        bound(g, g_true, g_plain, name=name)
