"""What only a GPU can show: real sizes, no waiting, the same bits again, compiled by inductor."""

import pytest
import torch

from cotutor.kernels import (
    importance_weights,
    linear_token_logprobs,
    linear_token_logprobs_reference,
    linear_topk_jsd,
    linear_topk_jsd_reference,
    token_logprobs,
    topk_jsd,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 151_936


def heads(rows=512, vocab=VOCAB, width=256, dtype=torch.bfloat16):
    """Hidden states and LM heads of a student and a teacher, on the GPU."""
    torch.manual_seed(0)
    hidden, t_hidden = torch.randn(2, rows, width, device="cuda").to(dtype)
    weight, t_weight = (torch.randn(2, vocab, width, device="cuda") * 2 * width**-0.5).to(dtype)
    return hidden, weight, t_hidden, t_weight


def gradients(loss_of, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    loss = loss_of(*inputs)
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def assert_bounded(check, got, truth, plain):
    for name, a, b, c in zip(("loss", "hidden", "weight"), got, truth, plain, strict=True):
        check(a, b, c, floor=16.0, name=name)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_token_logprobs(keep_bytes, dtype, assert_as_exact_as):
    hidden, weight, _, _ = heads(dtype=dtype)
    targets = torch.randint(0, VOCAB, (512,), device="cuda")

    def total(function, **options):
        def loss_of(hidden, weight):
            out = function(hidden, weight, targets, entropy=True, **options)
            return out.logprobs.sum() + 0.1 * out.entropy.sum()

        return loss_of

    def plain(hidden, weight):
        log_p = (hidden @ weight.t()).float().log_softmax(-1)
        return log_p.gather(1, targets[:, None]).sum() - 0.1 * (log_p.exp() * log_p).sum()

    got = gradients(
        total(linear_token_logprobs, keep_bytes=keep_bytes, chunk_rows=200), hidden, weight
    )
    truth = gradients(total(linear_token_logprobs_reference), hidden.double(), weight.double())
    assert_bounded(assert_as_exact_as, got, truth, gradients(plain, hidden, weight))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_linear_topk_jsd(alpha, assert_as_exact_as):
    hidden, weight, t_hidden, t_weight = heads(dtype=torch.float32)
    ids = (hidden @ weight.t()).topk(100).indices

    def total(function, double=False):
        teacher = (t_hidden.double(), t_weight.double()) if double else (t_hidden, t_weight)

        def loss_of(hidden, weight):
            return function(hidden, weight, *teacher, ids=ids, alpha=alpha).loss

        return loss_of

    got = gradients(total(linear_topk_jsd), hidden, weight)
    usual = gradients(
        lambda h, w: (
            linear_topk_jsd(h, w, t_hidden, t_weight, ids=ids, alpha=alpha, backend="torch").loss
        ),
        hidden,
        weight,
    )
    truth = gradients(
        total(linear_topk_jsd_reference, double=True), hidden.double(), weight.double()
    )
    assert_bounded(assert_as_exact_as, got, truth, usual)


def test_selection_equals_a_stable_sort():
    torch.manual_seed(0)
    logits = torch.randn(64, VOCAB, device="cuda").bfloat16()  # many ties
    teacher = torch.randn(64, VOCAB, device="cuda").bfloat16()
    ids = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :100]
    assert torch.equal(topk_jsd(logits, teacher), topk_jsd(logits, teacher, ids=ids))


def test_more_than_two_to_the_31_logits():
    rows = (1 << 31) // VOCAB + 70
    logits = torch.randn(rows, VOCAB, dtype=torch.bfloat16, device="cuda").requires_grad_()
    targets = torch.randint(0, VOCAB, (rows,), device="cuda")
    out = token_logprobs(logits, targets, entropy=True)
    (grad,) = torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), logits)
    last = logits[-1:].detach().requires_grad_()
    alone = token_logprobs(last, targets[-1:], entropy=True)
    (alone_grad,) = torch.autograd.grad(alone.logprobs.sum() + alone.entropy.sum(), last)
    assert torch.equal(out.logprobs[-1:], alone.logprobs)
    assert torch.equal(grad[-1:], alone_grad)


def every_function():
    """One forward and backward of each public function, and all results."""
    hidden, weight, t_hidden, t_weight = heads(rows=256, vocab=5003, width=64)
    hidden.requires_grad_()
    weight.requires_grad_()
    turns = (torch.arange(256, device="cuda") // 16).int()
    turns[::4] = -1
    targets = torch.randint(0, 5003, (256,), device="cuda")
    options = {"turn_ids": turns, "num_turns": 16, "entropy": True}
    scored = linear_token_logprobs(hidden, weight, targets, trained_rows=192, **options)
    logits = (hidden @ weight.t()).detach().requires_grad_()
    direct = token_logprobs(logits, targets, **options)
    weighed = importance_weights(
        scored.logprobs.detach(), direct.logprobs.detach(), turn_ids=turns, sequence_ids=turns // 4,
        level="turn", action="reject", veto=1e-4, normalize=True, num_turns=16, num_sequences=4,
    )  # fmt: skip
    jsd = linear_topk_jsd(
        hidden, weight, t_hidden, t_weight, row_weights=weighed.weights, trained_rows=None
    )
    rowwise = topk_jsd(logits, logits.detach().roll(1, 0))
    total = scored.turn_sums.sum() + direct.entropy.sum() + jsd.loss + rowwise.sum()
    grads = torch.autograd.grad(total, (hidden, weight, logits))
    return [*scored, *direct, weighed.weights, weighed.stats.sums, jsd.per_row, rowwise, *grads]


def test_nothing_waits_for_the_device():
    every_function()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        every_function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_same_bits_every_time():
    first = every_function()
    for _ in range(5):
        for a, b in zip(every_function(), first, strict=True):
            assert torch.equal(a, b)


def test_inductor_compiles_in_one_graph():
    hidden, weight, _, _ = heads(rows=64, vocab=3001, width=32)
    targets = torch.randint(0, 3001, (64,), device="cuda")

    def total(hidden, weight):
        out = linear_token_logprobs(hidden, weight, targets, entropy=True)
        return out.logprobs.sum() + out.entropy.sum()

    got = gradients(torch.compile(total, fullgraph=True), hidden, weight)
    for a, b in zip(got, gradients(total, hidden, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
