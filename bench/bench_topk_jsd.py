"""Top-K Jensen-Shannon divergence from hidden states, forward and backward, beside its peers.

Floor: four bare GEMMs (student, teacher, ∂hidden, ∂weight).
"""

from collections.abc import Callable

import pytest
import torch
from harness import Bench, compare
from peers import skip_unless_possible
from torch import Tensor

from cotutor.kernels import linear_topk_jsd, linear_topk_jsd_reference, topk_jsd

ALPHA = 0.5
GEMMS = ("forward", "forward", "hidden", "weight")
Function = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def ours(hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, k: int) -> Tensor:
    return linear_topk_jsd(hidden, weight, t_hidden, t_weight, k=k, alpha=ALPHA).loss


def reference(hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, k: int) -> Tensor:
    return linear_topk_jsd_reference(hidden, weight, t_hidden, t_weight, k=k, alpha=ALPHA).loss


def _jsd(s: Tensor, t: Tensor) -> Tensor:
    m = ((1 - ALPHA) * s.exp() + ALPHA * t.exp()).log()
    return (1 - ALPHA) * (s.exp() * (s - m)).sum(-1) + ALPHA * (t.exp() * (t - m)).sum(-1)


def plain(hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, k: int) -> Tensor:
    """The code that one would write: full logits, topk, a tail bucket, autograd."""
    logits = (hidden @ weight.t()).float()
    with torch.no_grad():
        t_log_p = (t_hidden @ t_weight.t()).float().log_softmax(-1)
    log_p = logits.log_softmax(-1)
    ids = logits.topk(k).indices
    buckets = []
    for x in (log_p, t_log_p):
        top = x.gather(-1, ids)
        outside = x.scatter(-1, ids, -torch.inf)  # an exact tail, as ours
        buckets.append(torch.cat([top, outside.logsumexp(-1, keepdim=True)], -1))
    return _jsd(*buckets).sum()


def trl(hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, k: int) -> Tensor:
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    logits = (hidden @ weight.t()).float()
    with torch.no_grad():
        t_logits = (t_hidden @ t_weight.t()).float()
    return compute_topk_self_distillation_loss(
        logits,
        t_logits,
        distillation_topk=k,
        distillation_alpha=ALPHA,
        distillation_add_tail=True,
    ).sum()


def liger(hidden: Tensor, weight: Tensor, t_hidden: Tensor, t_weight: Tensor, k: int) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=ALPHA,
        compiled=hidden.device.type == "cuda",
    )
    labels = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return loss(hidden, weight, t_hidden, t_weight, labels) * len(hidden)


CHECKED_AT = (96, 1003, 64, 20)  # N, V, D, K
PEERS: dict[str, tuple[Function, str | None, int, str]] = {
    # name: function, package it needs, K at which it is checked, what it does otherwise
    "cotutor": (ours, None, 20, ""),
    "plain PyTorch": (plain, None, 20, ""),
    "torch.compile": (torch.compile(plain, dynamic=False), None, 20, "of the plain code"),
    "TRL": (trl, "trl", 20, "loses a tail below 1e-7"),
    "Liger": (liger, "liger_kernel", 1002, "all of the vocabulary, no top-K; checked at K = V - 1"),
}


def gradients(function: Function, bench: Bench, sizes: tuple[int, int, int, int], double: bool):
    """Loss and gradients, by name; the teacher's head is its own."""
    rows, vocab, width, k = sizes
    inputs = [
        bench.random(rows, width),
        bench.random(vocab, width, scale=2 * width**-0.5, seed=1),
        bench.random(rows, width, seed=2),
        bench.random(vocab, width, scale=2 * width**-0.5, seed=3),
    ]
    if double:
        inputs = [x.double() for x in inputs]
    inputs[0].requires_grad_()
    inputs[1].requires_grad_()
    loss = function(*inputs, k)
    loss.backward()
    return {"loss": loss, "hidden": inputs[0].grad, "weight": inputs[1].grad}


def check(name: str, function: Function, bench: Bench, k: int = CHECKED_AT[3]) -> str:
    """Loss and gradients on a small problem, the bound being plain PyTorch's own error."""
    sizes = (*CHECKED_AT[:3], k)
    truth = gradients(reference, bench, sizes, double=True)
    usual = gradients(plain, bench, sizes, double=False)
    return compare(name, gradients(function, bench, sizes, double=False), truth, usual)


@pytest.mark.parametrize("name", PEERS)
def bench_linear_topk_jsd(benchmark, bench, name):
    function, package, k, note = PEERS[name]
    skip_unless_possible(bench, "linear_topk_jsd", name, package, needs_gpu=False)
    checked = bench.checked(f"linear_topk_jsd {name}", lambda: check(name, function, bench, k))
    shape = bench.shape
    hidden = bench.random(shape.rows, shape.width).requires_grad_()
    weight = bench.random(shape.vocab, shape.width, scale=shape.width**-0.5, seed=1)
    weight.requires_grad_()
    t_hidden = bench.random(shape.rows, shape.width, seed=2)
    t_weight = bench.random(shape.vocab, shape.width, scale=shape.width**-0.5, seed=3)

    def step() -> None:
        hidden.grad = weight.grad = None
        function(hidden, weight, t_hidden, t_weight, shape.k).backward()

    bench.measure(
        benchmark,
        "linear_topk_jsd",
        name,
        step,
        checked=checked,
        gemms=GEMMS,
        traffic=bench.gemm_traffic(*GEMMS),
        note=note,
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
def bench_topk_jsd(benchmark, bench, direction):
    """Without the heads: how near the streaming itself comes to a copy."""
    checked = bench.checked("linear_topk_jsd cotutor", lambda: check("ours", ours, bench))
    rows, vocab = min(bench.shape.rows, 4096), bench.shape.vocab
    student = bench.random(rows, vocab).requires_grad_()
    teacher = bench.random(rows, vocab, seed=1)
    total = topk_jsd(student, teacher, k=bench.shape.k, alpha=ALPHA).sum()

    def forward() -> None:
        with torch.no_grad():
            topk_jsd(student, teacher, k=bench.shape.k, alpha=ALPHA)

    def backward() -> None:
        torch.autograd.grad(total, student, retain_graph=True)

    row = vocab * student.element_size()
    bench.measure(
        benchmark,
        "topk_jsd",
        f"cotutor, {direction}",
        forward if direction == "forward" else backward,
        checked=checked,
        flops=5 * 2 * student.numel(),  # scale, subtract, exp, one product summed; two rows
        moved=2 * rows * row,  # forward: student and teacher; backward: one read, one write
    )
