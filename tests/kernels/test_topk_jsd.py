"""topk_jsd: values and gradients against float64, and the inputs that broke such kernels before."""

import math

import pytest
import torch
from jsd_checks import check_against_float64, check_hand_worked, pair
from properties import given, settings
from properties import strategies as st

from cotutor.kernels import topk_jsd, topk_jsd_reference

ALPHAS = (0.0, 0.3, 0.5, 1.0)
TAILS = ("exact", "clamped", "drop")


def gradient(z_s, z_t, upstream=None, **options):
    z_s = z_s.detach().clone().requires_grad_()
    loss = topk_jsd(z_s, z_t, **options)
    (g,) = torch.autograd.grad(loss, z_s, torch.ones_like(loss) if upstream is None else upstream)
    return loss.detach(), g


def test_hand_worked_three_tokens(backend, device):
    check_hand_worked(topk_jsd, device=device, backend=backend)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_float64(backend, device, dtype, alpha, tail, assert_as_exact_as):
    check_against_float64(
        topk_jsd, assert_as_exact_as, device=device, backend=backend, dtype=dtype, alpha=alpha,
        tail=tail, tau=0.7,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "k"), [(1, 1), (5, 1), (5, 100), (129, 129), (257, 100), (1000, 1), (1300, 3)]
)
def test_odd_vocabularies_and_supports(backend, device, vocab, k, assert_as_exact_as):
    check_against_float64(
        topk_jsd, assert_as_exact_as, device=device, backend=backend, vocab=vocab, k=k, alpha=0.5
    )


def test_temperature_per_row(backend, device, assert_as_exact_as):
    tau = torch.tensor([0.5, 1.0, 2.0], device=device)
    check_against_float64(topk_jsd, assert_as_exact_as, device=device, backend=backend, tau=tau)


def test_temperature_of_one_side(backend, device):
    z, _ = pair(2, 200, torch.float32, device)
    assert topk_jsd(z, z, temperature=0.7, teacher_temperature=1.0, backend=backend).min() > 1e-3
    same = topk_jsd(z, 2 * z, temperature=1.0, teacher_temperature=2.0, k=5, backend=backend)
    assert same.abs().max() < 1e-7


def test_both_probabilities_underflow(backend, device):
    z = torch.tensor([[0.0, -120.0]], device=device)
    for alpha in ALPHAS:
        for k in (1, 2):
            loss, g = gradient(z, z, k=k, alpha=alpha, backend=backend)
            assert loss.item() == 0
            assert not g.any()


def test_a_tail_below_float32_keeps_value_and_gradient(backend, device):
    # the student's tail is exp(-120); the teacher's is almost everything
    z_s = torch.tensor([[0.0, -120.0, -120.0]], device=device)
    z_t = torch.tensor([[-130.0, 0.0, -1.0]], device=device)
    loss, g = gradient(z_s, z_t, k=1, alpha=0.0, backend=backend)
    assert loss.item() == pytest.approx(120 - math.log(2), rel=1e-6)
    torch.testing.assert_close(g.cpu(), torch.tensor([[1.0, -0.5, -0.5]]))


def test_top_mass_near_one(backend, device):
    z_s = torch.tensor([[0.0, -18.0, -18.0]], device=device)
    z_t = torch.tensor([[0.0, -1.0, -1.0]], device=device)
    truth = topk_jsd_reference(z_s, z_t, k=1, alpha=0.0)
    exact, g = gradient(z_s, z_t, k=1, alpha=0.0, backend=backend)
    torch.testing.assert_close(exact.double(), truth, rtol=1e-6, atol=0)
    assert g[0, 1].item() == pytest.approx(-1 / (2 + math.e), rel=1e-5)
    clamped, g = gradient(z_s, z_t, k=1, alpha=0.0, tail="clamped", backend=backend)
    tail = 2 / (2 + math.e)
    pinned = tail * (math.log(tail) + 16.11809565) + (1 - tail) * math.log(1 - tail)
    assert clamped.item() == pytest.approx(pinned, rel=1e-5)
    assert abs(g[0, 1].item()) < 1e-7, "the clamp's gradient is dead"


@pytest.mark.parametrize("alpha", ALPHAS[:3])
def test_teacher_tail_of_exactly_zero(backend, device, alpha):
    z_s = torch.tensor([[1.0, 0.5, 0.0, -1.0]], device=device)
    z_t = torch.tensor([[1.0, 2.0, -math.inf, -math.inf]], device=device)
    loss, g = gradient(z_s, z_t, k=2, alpha=alpha, backend=backend)
    truth = topk_jsd_reference(z_s, z_t, k=2, alpha=alpha)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-7)
    assert torch.isfinite(g).all()
    assert g.sum().abs() < 1e-6


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("k", [2, 3, 5])
def test_infinite_logits_on_both_sides(backend, device, alpha, k):
    z_s = torch.tensor([[1.0, 0.5, 0.0, -math.inf, -math.inf]], device=device)
    z_t = torch.tensor([[1.0, 2.0, 0.1, -math.inf, -math.inf]], device=device)
    loss, g = gradient(z_s, z_t, k=k, alpha=alpha, backend=backend)
    wide = z_s.double().requires_grad_()
    truth = topk_jsd_reference(wide, z_t, k=k, alpha=alpha)
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-5, atol=1e-7)
    (g_truth,) = torch.autograd.grad(truth.sum(), wide)
    torch.testing.assert_close(g.double(), g_truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_sides_of_different_dtype_never_go_negative(backend, device, alpha):
    z, _ = pair(6, 400, torch.float32, device, seed=5)
    loss = topk_jsd(z, z.bfloat16(), k=20, alpha=alpha, backend=backend)
    assert loss.min() >= -1e-7
    assert loss.max() > 0


def test_truncated_support_without_and_with_tail(backend, device):
    z_s = torch.tensor([[0.9, 0.1]], device=device).log()
    z_t = torch.tensor([[0.6, 0.4]], device=device).log()
    with_tail = topk_jsd(z_s, z_t, k=1, alpha=0.0, backend=backend)
    full = topk_jsd(z_s, z_t, k=2, alpha=0.0, backend=backend)
    for loss in (with_tail, full):
        assert loss.item() == pytest.approx(0.3112, abs=5e-5)
    assert topk_jsd(z_s, z_t, k=1, alpha=0.0, tail="drop", backend=backend).item() == 0


def test_mixture_of_probabilities_is_symmetric_and_bounded(backend, device):
    z_s, z_t = pair(4, 50, torch.float32, device, scale=20.0)
    ids = torch.arange(9, device=device).expand(4, 9)
    one = topk_jsd(z_s, z_t, ids=ids, backend=backend)
    other = topk_jsd(z_t, z_s, ids=ids, backend=backend)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert one.max() <= math.log(2) + 1e-6
    far = torch.tensor([[100.0, 0.0], [0.0, 100.0]], device=device)
    assert topk_jsd(far[:1], far[1:], k=1, backend=backend).item() == pytest.approx(math.log(2))


def test_the_ends_are_full_divergences(backend, device):
    z_s, z_t = pair(3, 60, torch.float32, device)
    p, q = z_s.double().softmax(1), z_t.double().softmax(1)
    forward = topk_jsd(z_s, z_t, k=60, alpha=0.0, backend=backend).double()
    reverse = topk_jsd(z_s, z_t, k=60, alpha=1.0, backend=backend).double()
    torch.testing.assert_close(forward, (q * (q / p).log()).sum(1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(reverse, (p * (p / q).log()).sum(1), rtol=1e-5, atol=1e-7)
    # what lies between goes to 0, but its slope at each end is that end's divergence
    near_0 = topk_jsd(z_s, z_t, k=60, alpha=1e-4, backend=backend).double() / 1e-4
    near_1 = topk_jsd(z_s, z_t, k=60, alpha=1 - 1e-4, backend=backend).double() / 1e-4
    torch.testing.assert_close(near_0, forward, rtol=5e-3, atol=1e-3)
    torch.testing.assert_close(near_1, reverse, rtol=5e-3, atol=1e-3)


def test_support_of_the_caller(backend, device):
    z_s, z_t = pair(2, 300, torch.bfloat16, device)
    ids = torch.tensor([[0, 299, 7, 128], [5, 4, 3, 2]], device=device)
    for kind in (torch.int64, torch.int32):
        loss, g = gradient(z_s, z_t, ids=ids.to(kind), backend=backend)
        wide = z_s.double().requires_grad_()
        truth = topk_jsd_reference(wide, z_t, ids=ids)
        torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-5, atol=1e-7)
        (g_truth,) = torch.autograd.grad(truth.sum(), wide)
        torch.testing.assert_close(g.double(), g_truth, rtol=1e-2, atol=1e-6)


def test_changing_k_gives_the_same_bits(backend, device):
    z_s, z_t = pair(2, 500, torch.float32, device)
    first: dict[int, torch.Tensor] = {}
    for turn in range(100 if backend == "torch" else 8):
        k = (1, 50, 7, 500)[turn % 4]
        loss, g = gradient(z_s, z_t, k=k, backend=backend)
        both = torch.cat([loss[:, None], g], 1)
        assert torch.equal(first.setdefault(k, both), both)


SMALL = settings(max_examples=25, deadline=None, derandomize=True)


@SMALL
@given(
    vocab=st.integers(1, 400), k=st.integers(1, 450), alpha=st.sampled_from(ALPHAS),
    seed=st.integers(0, 1 << 20), scale=st.sampled_from([0.01, 1.0, 8.0]),
)  # fmt: skip
def test_properties(vocab, k, alpha, seed, scale):
    z_s, z_t = pair(3, vocab, torch.float32, "cpu", seed=seed, scale=scale)
    options = {"k": k, "alpha": alpha, "backend": "torch"}
    loss, g = gradient(z_s, z_t, **options)
    assert loss.min() >= -1e-7
    assert g.sum(1).abs().max() <= 1e-5, "a row's gradient sums to 0"
    if 0 < alpha < 1:
        entropy = -(alpha * math.log(alpha) + (1 - alpha) * math.log(1 - alpha))
        assert loss.max() <= entropy + 1e-6
    same, zero = gradient(z_s, z_s, **options)
    assert not same.any()
    assert not zero.any()
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    permuted, g_permuted = gradient(z_s[:, order], z_t[:, order], **options)
    torch.testing.assert_close(permuted, loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(g_permuted, g[:, order], rtol=1e-4, atol=1e-6)
    alone = torch.cat([topk_jsd(z_s[i : i + 1], z_t[i : i + 1], **options) for i in range(3)])
    assert torch.equal(alone, loss), "splitting the rows changes nothing"
    if loss.max() > 1e-3:
        stepped = topk_jsd(z_s - 0.01 * g / g.norm(), z_t, **options)
        assert stepped.sum() < loss.sum(), "a step along the gradient's opposite lowers the loss"


def test_a_fat_tail_gets_thinner(backend, device):
    z_s = torch.tensor([[2.0, 1.0] + [0.0] * 30], device=device)
    z_t = torch.tensor([[2.0, 1.0] + [-3.0] * 30], device=device)
    for alpha in ALPHAS:
        _, g = gradient(z_s, z_t, k=2, alpha=alpha, backend=backend)
        before = z_s.softmax(1)[:, 2:].sum()
        after = (z_s - g).softmax(1)[:, 2:].sum()
        assert after < before
