"""linear_topk_jsd: dtypes and autocast, empty and masked input, autograd's corners, errors."""

import pytest
import torch
from jsd_checks import heads
from torch.utils._python_dispatch import TorchDispatchMode

from cotutor.kernels import buckets, common, linear_topk_jsd
from cotutor.kernels.linear_topk_jsd import _linear_topk_jsd_op


def leaves(states):
    return [x.detach().clone().requires_grad_() for x in states[:2]]


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_keep_the_parameters_dtype(backend, device, autocast):
    """float32 parameters under bfloat16 activations, inside and outside of autocast."""
    states = heads(4, 24, 16, 300, torch.float32, device)
    hidden = states[0].bfloat16().requires_grad_()
    weight = states[1].clone().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        out = linear_topk_jsd(hidden, weight, states[2], states[3], k=6, backend=backend)
    out.loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    rounded = weight.detach().bfloat16().float() if autocast else weight.detach()
    teacher = [x.bfloat16().float() if autocast else x for x in states[2:]]
    wide_h, wide_w = hidden.detach().float().requires_grad_(), rounded.requires_grad_()
    true = linear_topk_jsd(wide_h, wide_w, *teacher, k=6, backend="torch")
    g_h, g_w = torch.autograd.grad(true.loss, (wide_h, wide_w))
    torch.testing.assert_close(out.loss, true.loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad, g_w, rtol=2e-2 if autocast else 1e-4, atol=1e-4)
    torch.testing.assert_close(hidden.grad.float(), g_h, rtol=1e-2, atol=1e-3)


def test_float16_gradient_survives_a_scaled_loss(backend, device):
    """Gradients below float16's range come back once the upstream gradient lifts them."""
    states = heads(2, 24, 16, 300, torch.float16, device)
    hidden, weight = leaves(states)
    tiny = torch.full((2,), 1e-7, device=device)
    out = linear_topk_jsd(hidden, weight, *states[2:], row_weights=tiny, k=6, backend=backend)
    grads = torch.autograd.grad(out.loss, (hidden, weight), torch.tensor(1e7, device=device))
    whole = linear_topk_jsd(hidden, weight, *states[2:], k=6, backend=backend)
    for mine, true in zip(grads, torch.autograd.grad(whole.loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_trained_row_is_an_attached_zero(backend, device, rows):
    states = heads(rows, 24, 16, 300, torch.float32, device)
    hidden, weight = leaves(states)
    out = linear_topk_jsd(
        hidden, weight, *states[2:], row_weights=torch.zeros(rows, device=device), trained_rows=0,
        k=6, backend=backend,
    )  # fmt: skip
    assert out.loss.item() == 0
    out.loss.backward()
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


def test_teacher_and_row_weights_get_no_gradient(backend, device):
    states = [x.requires_grad_() for x in heads(3, 24, 16, 300, torch.float32, device)]
    weights = torch.ones(3, device=device, requires_grad=True)
    out = linear_topk_jsd(*states, row_weights=weights, k=6, backend=backend)
    assert out.loss.requires_grad
    assert not any(x.requires_grad for x in out[1:])
    out.loss.backward()
    assert [x.grad is not None for x in (*states, weights)] == [True, True, False, False, False]


def test_two_backwards_and_unmodified_inputs(backend, device):
    states = heads(3, 24, 16, 300, torch.float32, device)
    before = [x.clone() for x in states]
    hidden, weight = (x.requires_grad_() for x in states[:2])
    out = linear_topk_jsd(*states, k=6, backend=backend)
    up = torch.tensor(0.3, device=device)
    first = torch.autograd.grad(out.loss, (hidden, weight), up, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()  # what the caller does to a gradient must not reach the graph
    second = torch.autograd.grad(out.loss, (hidden, weight), up)
    for mine, true in zip(second, kept, strict=True):
        assert torch.equal(mine, true)
    for now, then in zip(states, before, strict=True):
        assert torch.equal(now.detach(), then)
    plain = torch.autograd.grad(
        linear_topk_jsd(*states, k=6, backend=backend).loss, (hidden, weight)
    )
    for mine, true in zip(second, plain, strict=True):
        torch.testing.assert_close(mine, 0.3 * true)


def test_last_backward_copies_no_gradient(backend, device):
    """dW is as large as the head: only a graph that is kept needs a second one."""
    states = heads(3, 24, 16, 300, torch.float32, device)
    up = torch.tensor(0.3, device=device)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def backward(**options: bool):
        inputs = leaves(states)
        out = linear_topk_jsd(*inputs, *states[2:], k=6, backend=backend)
        seen.clear()
        with Watch():
            return torch.autograd.grad(out.loss, inputs, up, **options)

    kept = backward(retain_graph=True)
    assert "scale_gradient" in seen
    with_graph = backward(create_graph=True, retain_graph=False)
    assert "scale_gradient" in seen
    last = backward()
    assert "scale_gradient" not in seen
    assert "mul_" in seen
    for mine, other, true in zip(last, with_graph, kept, strict=True):
        assert torch.equal(mine, true)
        assert torch.equal(other, true)
        assert not mine.requires_grad


def test_gradient_accumulates_in_place(backend, device):
    states = heads(3, 24, 16, 300, torch.float32, device)
    hidden, weight = leaves(states)
    for _ in range(2):
        linear_topk_jsd(hidden, weight, *states[2:], k=6, backend=backend).loss.backward()
    once = torch.autograd.grad(
        linear_topk_jsd(hidden, weight, *states[2:], k=6, backend=backend).loss, (hidden, weight)
    )
    for leaf, g in zip((hidden, weight), once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * g)


def test_double_backward_raises(backend, device):
    states = heads(3, 24, 16, 300, torch.float32, device)
    hidden, weight = leaves(states)
    loss = linear_topk_jsd(hidden, weight, *states[2:], k=6, backend=backend).loss
    (g,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        (g * g + hidden).sum().backward()


def test_memory_and_tiles_of_a_large_problem(device, monkeypatch):
    """What only large logits do on a CPU: huge pages, and passes over a few rows at a time."""
    states = heads(7, 24, 16, 300, torch.float32, device)
    tau = torch.linspace(0.5, 2, 7, device=device)
    weights = torch.linspace(0, 1, 7, device=device)

    def results():
        inputs = leaves(states)
        out = linear_topk_jsd(
            *inputs, *states[2:], k=6, row_weights=weights, temperature=tau, chunk_rows=5,
            backend="torch",
        )  # fmt: skip
        return [*out, *torch.autograd.grad(out.loss, inputs)]

    usual = results()
    monkeypatch.setattr(common, "HUGE_FROM", 1)
    monkeypatch.setattr(buckets, "CACHED", 600)  # two rows at a time, then one
    seen = []
    log_masses = buckets.log_masses
    monkeypatch.setattr(
        buckets, "log_masses", lambda z, *rest: (seen.append(len(z)), log_masses(z, *rest))[1]
    )
    for mine, true in zip(results(), usual, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-6, atol=1e-7)
    assert seen == [5, 5, 1, 1]  # one row weighs 0
    z = common.scratch((3, 50), device)
    assert (z.shape, z.dtype, z.is_contiguous()) == ((3, 50), torch.float32, True)


def test_no_grad_gives_the_same_number(backend, device):
    states = heads(3, 24, 16, 300, torch.float32, device)
    hidden, weight = leaves(states)
    with_graph = linear_topk_jsd(hidden, weight, *states[2:], k=6, backend=backend)
    with torch.no_grad():
        without = linear_topk_jsd(hidden, weight, *states[2:], k=6, backend=backend)
    assert not without.loss.requires_grad
    for mine, true in zip(without, with_graph, strict=True):
        assert torch.equal(mine, true)


def test_same_input_same_bits(backend, device):
    states = heads(5, 24, 16, 300, torch.float32, device)
    runs = []
    for _ in range(3):
        hidden, weight = leaves(states)
        out = linear_topk_jsd(hidden, weight, *states[2:], k=6, chunk_rows=2, backend=backend)
        runs.append((*out, *torch.autograd.grad(out.loss, (hidden, weight))))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_compiles_without_graph_breaks(backend, device):
    states = heads(5, 24, 16, 300, torch.float32, device)
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0], device=device)

    def step(hidden, weight):
        out = linear_topk_jsd(
            hidden * 1.5, weight, *states[2:], row_weights=weights, k=6, chunk_rows=2,
            backend=backend,
        )  # fmt: skip
        return out.loss * 2.0 + out.per_row.sum() * 0.0

    eager, compiled = leaves(states), leaves(states)
    step(*eager).backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for mine, true in zip(compiled, eager, strict=True):
        torch.testing.assert_close(mine.grad, true.grad)


def test_operator_registration(backend, device):
    states = heads(5, 24, 16, 150, torch.float32, device)
    args = (
        states[0].requires_grad_(), states[1].requires_grad_(), *states[2:],
        torch.ones(5, device=device), None, None, None, 1.0, 1.0, 6, 0.5, "exact", 2, None,
        torch.float32, torch.float32, True, True, backend,
    )  # fmt: skip
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_linear_topk_jsd_op, args, test_utils=checks)


@pytest.mark.parametrize("tail", ["exact", "clamped", "drop"])
def test_nothing_waits_for_the_device(backend, device, tail, monkeypatch):
    """No operator whose result the host must read: a GPU would drain its queue for it."""
    # what other devices select with; a CPU looks for ties
    monkeypatch.setattr(buckets, "_largest", buckets._largest_by_keys)
    waiting = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    states = heads(5, 24, 16, 300, torch.float32, device)
    with Watch():
        _linear_topk_jsd_op._init_fn(
            *states, None, None, None, None, 0.7, 1.0, 6, 0.5, tail, 2, None,
            torch.float32, torch.float32, True, True, backend,
        )  # fmt: skip
    assert "mm" in seen
    assert not set(seen) & set(waiting)


def test_errors(device):
    states = dict(
        zip(
            ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight"),
            heads(4, 24, 16, 30, torch.float32, device),
            strict=True,
        )
    )
    padded = torch.zeros(32, 16, device=device)
    cases = [
        ({"teacher_weight": padded}, r"over the student's V = 30 tokens \(slice .* got 32 rows"),
        ({"student_weight": torch.zeros(30, 23)}, r"student_weight must be of shape \(30, 24\)"),
        ({"teacher_hidden": torch.zeros(3, 16)}, r"teacher_hidden must be of shape \(4, 16\)"),
        ({"student_hidden": torch.zeros(2, 2, 24)}, "student_hidden must be 2-dimensional"),
        ({"student_hidden": torch.zeros(4, 24).long()}, "must be float32, bfloat16 or float16"),
        ({"row_weights": torch.ones(4, 1)}, r"row_weights must be of shape \(4,\)"),
        ({"k": 0}, "linear_topk_jsd: k must be a whole number of at least 1; got 0"),
        ({"alpha": -0.1}, "linear_topk_jsd: alpha must be between 0 and 1; got -0.1"),
        ({"chunk_rows": 0}, "linear_topk_jsd: chunk_rows must be a whole number of at least 1"),
        ({"trained_rows": 5}, "linear_topk_jsd: trained_rows must be between 0 and N = 4; got 5"),
        ({"trained_rows": 2}, "trained_rows must be N = 4 where row_weights is None; got 2"),
        (
            {"trained_rows": 2, "row_weights": torch.ones(4)},
            "trained_rows must be the number of row weights that are not 0",
        ),
        ({"ids": torch.zeros(4, 2).long()}, "ids must be distinct in each row; got 0"),
        ({"temperature": float("nan")}, "temperature must be greater than 0 and finite; got nan"),
        ({"teacher_hidden": torch.zeros(4, 16, device="meta")}, "teacher_hidden must be on"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            linear_topk_jsd(**{**states, **change})
