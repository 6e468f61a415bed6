"""Token log-probs and entropies with an LM head, forward and backward, beside its peers.

Floor: three bare GEMMs. Every implementation gets the same weighted sum of log-probs and
entropies; those without an entropy say so.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from harness import Bench, compare
from peers import skip_unless_possible
from torch import Tensor

from cotutor.kernels import linear_token_logprobs, linear_token_logprobs_reference, token_logprobs

GEMMS = ("forward", "hidden", "weight")
Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, **options):
    out = linear_token_logprobs(hidden, weight, targets, entropy=True, **options)
    return out.logprobs, out.entropy


def reference(hidden: Tensor, weight: Tensor, targets: Tensor):
    out = linear_token_logprobs_reference(hidden, weight, targets, entropy=True)
    return out.logprobs, out.entropy


def plain(hidden: Tensor, weight: Tensor, targets: Tensor):
    """The code that one would write: full logits, log-softmax, gather."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def trl(hidden: Tensor, weight: Tensor, targets: Tensor):
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = (hidden @ weight.t()).float()
    return selective_log_softmax(logits, targets), entropy_from_logits(logits)


def cce(hidden: Tensor, weight: Tensor, targets: Tensor):
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none"), None


def liger(hidden: Tensor, weight: Tensor, targets: Tensor):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss = LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, targets, None, None, -100, 0.0, 0.0, "sum"
    )
    return -(loss[0] if isinstance(loss, tuple) else loss), None


PEERS: dict[str, tuple[Function, str | None, bool, str]] = {
    # name: function, package it needs, needs a GPU, what it does otherwise
    "cotutor": (ours, None, False, ""),
    "cotutor, nothing kept": (partial(ours, keep_bytes=0), None, False, "multiplies again"),
    "plain PyTorch": (plain, None, False, ""),
    "torch.compile": (torch.compile(plain, dynamic=False), None, False, "of the plain code"),
    "TRL": (trl, "trl", False, ""),
    "cut-cross-entropy": (cce, "cut_cross_entropy", True, "no entropy"),
    "Liger": (liger, "liger_kernel", True, "no entropy; only the sum over rows"),
}


def gradients(function: Function, bench: Bench, rows: int, vocab: int, width: int, double: bool):
    """Values and gradients of one weighted sum, by name."""
    hidden = bench.random(rows, width)
    weight = bench.random(vocab, width, scale=width**-0.5, seed=1)
    targets = torch.arange(rows, device=bench.device) * 7 % vocab
    if double:
        hidden, weight = hidden.double(), weight.double()
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, entropy = function(hidden, weight, targets)
    total = logprobs.sum() if entropy is None else logprobs.sum() + 0.1 * entropy.sum()
    total.backward()
    found = {"logprobs": logprobs, "hidden": hidden.grad, "weight": weight.grad}
    return found if entropy is None else found | {"entropy": entropy}


def check(name: str, function: Function, bench: Bench) -> str:
    """Values and gradients on a small problem, the bound being plain PyTorch's own error."""
    sizes = (96, 1003, 64)
    got = gradients(function, bench, *sizes, double=False)

    def alike(other: Function) -> Function:
        """`other` cut to what `function` computes: without entropy, or summed."""

        def cut(*inputs: Tensor):
            logprobs, entropy = other(*inputs)
            logprobs = logprobs.sum() if got["logprobs"].dim() == 0 else logprobs
            return logprobs, entropy if "entropy" in got else None

        return cut

    truth = gradients(alike(reference), bench, *sizes, double=True)
    usual = gradients(alike(plain), bench, *sizes, double=False)
    return compare(name, got, truth, usual)


@pytest.mark.parametrize("name", PEERS)
def bench_linear_token_logprobs(benchmark, bench, name):
    function, package, needs_gpu, note = PEERS[name]
    skip_unless_possible(bench, package, needs_gpu)
    checked = bench.checked(f"linear_token_logprobs {name}", lambda: check(name, function, bench))
    shape = bench.shape
    hidden = bench.random(shape.rows, shape.width).requires_grad_()
    weight = bench.random(shape.vocab, shape.width, scale=shape.width**-0.5, seed=1)
    weight.requires_grad_()
    targets = torch.randint(0, shape.vocab, (shape.rows,), device=bench.device)

    def step() -> None:
        hidden.grad = weight.grad = None
        logprobs, entropy = function(hidden, weight, targets)
        (logprobs.sum() if entropy is None else logprobs.sum() + 0.1 * entropy.sum()).backward()

    bench.measure(
        benchmark,
        "linear_token_logprobs",
        name,
        step,
        checked=checked,
        gemms=GEMMS,
        traffic=bench.gemm_traffic(*GEMMS),
        note=note,
    )


@pytest.mark.parametrize("share", [0.1, 1.0])
def bench_trained_share(benchmark, bench, share):
    """The same rows with a share of them trained: cost follows the share."""
    checked = bench.checked("linear_token_logprobs cotutor", lambda: check("ours", ours, bench))
    shape = bench.shape
    hidden = bench.random(shape.rows, shape.width).requires_grad_()
    weight = bench.random(shape.vocab, shape.width, scale=shape.width**-0.5, seed=1)
    weight.requires_grad_()
    targets = torch.randint(0, shape.vocab, (shape.rows,), device=bench.device)
    count = round(share * shape.rows)
    turns = torch.full((shape.rows,), -1, device=bench.device)
    turns[torch.randperm(shape.rows, device=bench.device)[:count]] = 0
    options = {"turn_ids": turns, "num_turns": 1, "trained_rows": count}

    def step() -> None:
        hidden.grad = weight.grad = None
        logprobs, entropy = ours(hidden, weight, targets, **options)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()

    name = f"cotutor, {share:.0%} of the rows trained"
    bench.measure(benchmark, "trained_share", name, step, checked=checked)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def bench_token_logprobs(benchmark, bench, direction, entropy):
    """Without the head: how near the streaming itself comes to a copy."""
    checked = bench.checked("linear_token_logprobs cotutor", lambda: check("ours", ours, bench))
    rows, vocab = min(bench.shape.rows, 4096), bench.shape.vocab
    logits = bench.random(rows, vocab).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=bench.device)
    out = token_logprobs(logits, targets, entropy=entropy)
    total = out.logprobs.sum() + (out.entropy.sum() if entropy else 0)

    def forward() -> None:
        with torch.no_grad():
            token_logprobs(logits, targets, entropy=entropy)

    def backward() -> None:
        torch.autograd.grad(total, logits, retain_graph=True)

    passes = 1 if direction == "forward" else 2
    name = f"cotutor, {direction}{', entropy' if entropy else ''}"
    bench.measure(
        benchmark,
        "token_logprobs",
        name,
        forward if direction == "forward" else backward,
        checked=checked,
        moved=passes * logits.numel() * logits.element_size(),
        flops=5 * logits.numel(),  # scale, subtract, exp, and one product summed
    )
