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


def trl_rows(logits: Tensor, targets: Tensor, entropy: bool):
    """The same from logits; their entropy alone takes a second pass."""
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    if entropy:
        return selective_log_softmax_and_entropy(logits.float(), targets)
    return selective_log_softmax(logits.float(), targets), None


def our_rows(logits: Tensor, targets: Tensor, entropy: bool):
    out = token_logprobs(logits, targets, entropy=entropy)
    return out.logprobs, out.entropy


def plain_rows(logits: Tensor, targets: Tensor, entropy: bool):
    log_p = logits.float().log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(1) if entropy else None
    return log_p.gather(1, targets[:, None])[:, 0], entropies


def cce(hidden: Tensor, weight: Tensor, targets: Tensor):
    from cut_cross_entropy import linear_cross_entropy

    kind = "cce" if hidden.device.type == "cuda" else "torch_compile"
    return -linear_cross_entropy(hidden, weight, targets, reduction="none", impl=kind), None


def liger(hidden: Tensor, weight: Tensor, targets: Tensor):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss = LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, targets, None, None, -100, 0.0, 0.0, "sum"
    )
    return -(loss[0] if isinstance(loss, tuple) else loss), None


def liger_grpo(hidden: Tensor, weight: Tensor, targets: Tensor):
    """With advantage 1, no KL term and ratio 1 (CISPO) the loss is the mean of -log p."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0,
        loss_type="cispo",
        epsilon_high=2.0,
        use_ref_model=False,
        compiled=hidden.device.type == "cuda",
    )
    # of equal length, because the library chunks over answers
    answers = len(targets) // 128 if len(targets) % 128 == 0 else 1
    ones = torch.ones(answers, len(targets) // answers, device=hidden.device)
    loss, _ = loss_of(
        hidden.view(*ones.shape, -1), weight, targets.view_as(ones).long(), ones, ones[:, 0]
    )
    return -loss * len(targets), None


PEERS: dict[str, tuple[Function, str | None, bool, str]] = {
    # name: function, package it needs, needs a GPU, what it does otherwise
    "cotutor": (ours, None, False, ""),
    "cotutor, nothing kept": (partial(ours, keep_bytes=0), None, False, "multiplies again"),
    "plain PyTorch": (plain, None, False, ""),
    "torch.compile": (torch.compile(plain, dynamic=False), None, False, "of the plain code"),
    "TRL": (trl, "trl", False, ""),
    "cut-cross-entropy": (
        cce, "cut_cross_entropy", False, "no entropy; on a CPU its torch.compile implementation"
    ),
    "Liger, cross-entropy": (liger, "liger_kernel", True, "no entropy; only the sum over rows"),
    "Liger, GRPO": (liger_grpo, "liger_kernel", False, "no entropy; only the sum over rows"),
}  # fmt: skip
ROWS: dict[str, tuple[Callable, str | None]] = {
    "cotutor": (our_rows, None),
    "plain PyTorch": (plain_rows, None),
    "TRL": (trl_rows, "trl"),
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
    skip_unless_possible(bench, "linear_token_logprobs", name, package, needs_gpu)
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


def check_rows(bench: Bench, name: str, entropy: bool) -> str:
    """As `check`, with a head of which the logits alone are compared."""
    function, _ = ROWS[name]

    def headed(hidden: Tensor, weight: Tensor, targets: Tensor):
        return function(hidden @ weight.t(), targets, entropy)

    return check(f"token_logprobs {name}", headed, bench)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ROWS)
def bench_token_logprobs(benchmark, bench, name, direction, entropy):
    """Without the head: how near the streaming itself comes to a copy."""
    function, package = ROWS[name]
    title = f"{name}, {direction}{', entropy' if entropy else ''}"
    skip_unless_possible(bench, "token_logprobs", title, package, needs_gpu=False)
    checked = bench.checked(
        f"token_logprobs {name} {entropy}", lambda: check_rows(bench, name, entropy)
    )
    rows, vocab = min(bench.shape.rows, 4096), bench.shape.vocab
    logits = bench.random(rows, vocab).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=bench.device)
    logprobs, entropies = function(logits, targets, entropy)
    total = logprobs.sum() + (entropies.sum() if entropy else 0)

    def forward() -> None:
        with torch.no_grad():
            function(logits, targets, entropy)

    def backward() -> None:
        torch.autograd.grad(total, logits, retain_graph=True)

    passes = 1 if direction == "forward" else 2
    bench.measure(
        benchmark,
        "token_logprobs",
        title,
        forward if direction == "forward" else backward,
        checked=checked,
        moved=passes * logits.numel() * logits.element_size(),
        flops=5 * logits.numel(),  # scale, subtract, exp, and one product summed
    )
