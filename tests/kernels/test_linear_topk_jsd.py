"""linear_topk_jsd: values and gradients against float64, row weights, chunks, dtypes."""

import pytest
import torch
from jsd_checks import check_linear_against_float64, heads
from properties import given, settings
from properties import strategies as st

from cotutor.kernels import linear_topk_jsd, linear_topk_jsd_reference, topk_jsd


def run(states, **options):
    """(outputs, dH, dW) with both needing gradients."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in states[:2])
    out = linear_topk_jsd(hidden, weight, *states[2:], **options)
    return out, *torch.autograd.grad(out.loss, (hidden, weight))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_float64(backend, device, dtype, alpha, assert_as_exact_as):
    check_linear_against_float64(
        linear_topk_jsd,
        assert_as_exact_as,
        device=device,
        backend=backend,
        dtype=dtype,
        alpha=alpha,
    )


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (5, 9), (257, 257), (130, 100)])
def test_odd_vocabularies_and_supports(backend, device, vocab, k, assert_as_exact_as):
    check_linear_against_float64(
        linear_topk_jsd, assert_as_exact_as, device=device, backend=backend, vocab=vocab, k=k
    )


@pytest.mark.parametrize("tail", ["exact", "clamped", "drop"])
def test_is_the_composition_of_its_parts(backend, device, tail):
    states = heads(6, 24, 16, 400, torch.float32, device)
    hidden, weight = (x.requires_grad_() for x in states[:2])
    row_weights = torch.tensor([1.0, 0.5, 0.0, 2.0, -1.0, 0.25], device=device)
    tau = torch.linspace(0.5, 2.0, 6, device=device)
    options = {"k": 8, "tail": tail, "temperature": tau, "alpha": 0.4}
    per_row = topk_jsd(hidden @ weight.T, states[2] @ states[3].T, backend="torch", **options)
    wanted = torch.autograd.grad((per_row * row_weights).sum(), (hidden, weight))
    out, *got = run(states, row_weights=row_weights, chunk_rows=4, backend=backend, **options)
    live = row_weights != 0
    torch.testing.assert_close(out.per_row, per_row.detach() * live, rtol=1e-4, atol=1e-6)
    for mine, true in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def test_defaults_equal_the_reference(backend, device):
    states = heads(5, 24, 24, 300, torch.float32, device)
    got = linear_topk_jsd(*states, backend=backend)
    for mine, true in zip(got, linear_topk_jsd_reference(*states), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-6)


def test_same_student_and_teacher_give_exactly_zero(backend, device):
    hidden, weight, *_ = heads(4, 24, 24, 300, torch.float32, device)
    for alpha in (0.0, 0.5, 1.0):
        out, dh, dw = run((hidden, weight, hidden, weight), k=7, alpha=alpha, backend=backend)
        assert not out.per_row.any()
        assert not dh.any()
        assert not dw.any()


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 100])
def test_chunks_change_only_rounding(backend, device, chunk_rows):
    states = heads(7, 24, 16, 300, torch.float32, device)
    whole, split = (run(states, k=6, chunk_rows=c, backend=backend) for c in (None, chunk_rows))
    torch.testing.assert_close(split[0].per_row, whole[0].per_row, rtol=1e-4, atol=1e-6)
    for mine, true in zip(split[1:], whole[1:], strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-6)


def test_micro_batches_equal_the_full_batch(backend, device):
    """The denominator comes in through the weights, so sums over unequal parts add up."""
    states = heads(10, 24, 16, 300, torch.float32, device)
    weights = torch.full((10,), 1 / 10, device=device)
    full = run(states, row_weights=weights, k=6, backend=backend)
    parts = [
        run((states[0][at], states[1], states[2][at], states[3]), row_weights=weights[at], k=6,
            backend=backend)
        for at in (slice(0, 1), slice(1, 10))
    ]  # fmt: skip
    torch.testing.assert_close(parts[0][0].loss + parts[1][0].loss, full[0].loss)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), full[1], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(parts[0][2] + parts[1][2], full[2], rtol=1e-4, atol=1e-6)


def test_poisoned_rows_of_weight_zero(backend, device):
    states = list(heads(6, 24, 16, 300, torch.float32, device))
    weights = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0, 2.0], device=device)
    live = weights != 0
    options = {"k": 6, "temperature": torch.ones(6, device=device), "backend": backend}
    options["ids"] = torch.arange(6, device=device).expand(6, 6).clone()
    clean = run([x[live] if len(x) == 6 else x for x in states], row_weights=weights[live],
                k=6, ids=options["ids"][live], backend=backend)  # fmt: skip
    states[0], states[2] = states[0].clone(), states[2].clone()
    states[0][~live], states[2][~live] = float("nan"), float("inf")
    options["temperature"][~live], options["ids"][~live] = -1.0, -7
    poisoned = run(states, row_weights=weights, trained_rows=3, **options)
    assert torch.equal(poisoned[0].loss, clean[0].loss)
    assert torch.equal(poisoned[1][live], clean[1])
    assert torch.equal(poisoned[2], clean[2])
    for dead in (*poisoned[0][1:], poisoned[1]):
        assert not dead[~live].any()


def test_only_trained_rows_are_multiplied(device):
    """10 % of the rows cost 10 % of the products: what is multiplied is counted."""
    from torch.utils.flop_counter import FlopCounterMode

    from cotutor.kernels.linear_topk_jsd import _linear_topk_jsd_op

    states = heads(40, 24, 16, 300, torch.float32, device)

    def flops(weights, trained):
        with FlopCounterMode(display=False) as counter:
            _linear_topk_jsd_op._init_fn(
                *states, weights, None, None, None, 1.0, 1.0, 6, 0.5, "exact", 8, trained,
                torch.float32, torch.float32, True, True, "torch",
            )  # fmt: skip
        return counter.get_total_flops()

    some = torch.zeros(40, device=device)
    some[[3, 11, 12, 39]] = 1.0
    full = flops(torch.ones(40, device=device), 40)
    assert full == 2 * 40 * 300 * (24 + 16 + 24 + 24)
    assert flops(some, 4) == full // 10


def test_unused_gradients_cost_no_product(device):
    from torch.utils.flop_counter import FlopCounterMode

    from cotutor.kernels.linear_topk_jsd import _linear_topk_jsd_op

    states = heads(4, 24, 16, 300, torch.float32, device)
    for need_dh, need_dw in ((True, False), (False, True), (False, False)):
        with FlopCounterMode(display=False) as counter:
            out = _linear_topk_jsd_op._init_fn(
                *states, None, None, None, None, 1.0, 1.0, 6, 0.5, "exact", 8, None,
                torch.float32, torch.float32, need_dh, need_dw, "torch",
            )  # fmt: skip
        assert counter.get_total_flops() == 2 * 4 * 300 * (24 + 16 + 24 * (need_dh + need_dw))
        assert (out[4].numel() > 0, out[5].numel() > 0) == (need_dh, need_dw)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient(backend, device, frozen):
    states = heads(4, 24, 16, 300, torch.float32, device)
    wanted = run(states, k=6, backend=backend)
    hidden, weight = states[:2]
    (weight if frozen == "hidden" else hidden).requires_grad_()
    linear_topk_jsd(*states, k=6, backend=backend).loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    if frozen == "weight":
        assert torch.equal(hidden.grad, wanted[1])
    else:
        assert torch.equal(weight.grad, wanted[2])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 9), vocab=st.integers(1, 300), k=st.integers(1, 320),
    chunk=st.integers(1, 10), seed=st.integers(0, 1 << 20), data=st.data(),
)  # fmt: skip
def test_random_shapes_weights_and_strides(rows, vocab, k, chunk, seed, data):
    hidden, weight, teacher_hidden, teacher_weight = heads(
        rows, 8, 6, vocab, torch.float32, "cpu", seed=seed
    )
    picked = st.lists(st.sampled_from([0.0, 0.5, -1.0, 2.0]), min_size=rows, max_size=rows)
    weights = torch.tensor(data.draw(picked))
    if data.draw(st.booleans()):
        hidden = hidden.t().contiguous().t()
        weight = torch.stack([weight, weight], dim=2)[:, :, 1]
        teacher_weight = teacher_weight.t().contiguous().t()
    states = (hidden, weight, teacher_hidden, teacher_weight)
    z = hidden.double() @ weight.double().T
    ids = z.topk(min(k, vocab)).indices
    out, dh, dw = run(states, row_weights=weights, ids=ids, chunk_rows=chunk, backend="torch")
    wide = [x.double().requires_grad_() for x in states[:2]]
    truth = linear_topk_jsd_reference(*wide, *states[2:], row_weights=weights, ids=ids)
    torch.testing.assert_close(out.per_row.double(), truth.per_row, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(out.loss.double(), truth.loss.detach(), rtol=1e-4, atol=2e-5)
    for mine, true in zip((dh, dw), torch.autograd.grad(truth.loss, wide), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-3, atol=1e-5)
