"""topk_jsd: strides, empty inputs, autograd's corners, torch.compile, errors."""

import math

import pytest
import torch
from jsd_checks import pair

from cotutor.kernels import topk_jsd
from cotutor.kernels.topk_jsd import _topk_jsd_op


def loss_and_gradient(z_s, z_t, upstream, **options):
    """`z_s` as it is strided; the gradient comes back through a leaf of its own."""
    loss = topk_jsd(z_s, z_t, **options)
    return loss, torch.autograd.grad(loss, z_s, upstream)[0]


def strided(kind: str, z: torch.Tensor) -> torch.Tensor:
    vocab = z.shape[1]
    if kind == "columns sliced":
        return torch.stack([z, z + 1], dim=2)[:, :, 0]
    if kind == "rows sliced":
        return torch.cat([z, z], dim=1)[:, :vocab]
    if kind == "transposed":
        return z.t().contiguous().t()
    if kind == "offset":
        return torch.cat([z[:1], z])[1:]
    return z


@pytest.mark.parametrize("kind", ["columns sliced", "rows sliced", "transposed", "offset"])
@pytest.mark.parametrize("tail", ["exact", "drop"])
def test_strides(backend, device, kind, tail):
    z_s, z_t = pair(4, 300, torch.float32, device)
    up = torch.tensor([1.0, 0.5, -1.0, 2.0], device=device)
    options = {"k": 9, "backend": backend, "tail": tail}
    wanted = loss_and_gradient(z_s.clone().requires_grad_(), z_t, up, **options)
    odd_up = torch.stack([up, up], dim=1)[:, 0]
    odd = strided(kind, z_s).requires_grad_()
    assert odd.stride() != z_s.stride() or odd.storage_offset()
    got = loss_and_gradient(odd, strided(kind, z_t), odd_up, **options)
    for mine, true in zip(got, wanted, strict=True):
        assert torch.equal(mine, true)


def test_expanded_logits_and_upstream(backend, device):
    z_s, z_t = pair(1, 200, torch.float32, device)
    options = {"k": 5, "backend": backend}
    leaf = z_s.clone().requires_grad_()
    loss = topk_jsd(leaf.expand(3, 200), z_t.expand(3, 200), **options)
    loss.sum().backward()  # its upstream gradient has stride 0
    single = z_s.clone().requires_grad_()
    one = topk_jsd(single, z_t, **options)
    (3 * one).sum().backward()
    assert torch.equal(loss, one.expand(3))
    torch.testing.assert_close(leaf.grad, single.grad)


def test_sequence_first_logits_seen_batch_first(backend, device):
    z_s, z_t = (z.view(3, 4, 150) for z in pair(12, 150, torch.float32, device))
    up = torch.randn(4, 3, device=device)
    odd = z_s.transpose(0, 1).requires_grad_()
    loss = topk_jsd(odd, z_t.transpose(0, 1), k=5, backend=backend)
    assert loss.shape == (4, 3)
    (g,) = torch.autograd.grad(loss, odd, up)
    flat = z_s.transpose(0, 1).contiguous().requires_grad_()
    wanted = topk_jsd(flat, z_t.transpose(0, 1).contiguous(), k=5, backend=backend)
    assert torch.equal(loss, wanted)
    assert torch.equal(g, torch.autograd.grad(wanted, flat, up)[0])


def test_one_row_and_many_dimensions(backend, device):
    z_s, z_t = pair(1, 90, torch.float32, device)
    assert topk_jsd(z_s[0], z_t[0], k=3, backend=backend).shape == ()
    four = topk_jsd(z_s.expand(2, 1, 3, 90), z_t.expand(2, 1, 3, 90), k=3, backend=backend)
    assert four.shape == (2, 1, 3)


@pytest.mark.parametrize("shape", [(0, 50), (2, 0, 50)])
def test_no_rows(backend, device, shape):
    z = torch.zeros(shape, device=device, requires_grad=True)
    loss = topk_jsd(z, z.detach(), k=5, backend=backend)
    assert loss.shape == shape[:-1]
    loss.sum().backward()
    assert z.grad is not None
    assert z.grad.shape == shape


def test_gradient_reaches_the_student_only(backend, device):
    z_s, z_t = pair(2, 100, torch.float32, device)
    z_s.requires_grad_()
    z_t.requires_grad_()
    topk_jsd(z_s, z_t, k=5, backend=backend).sum().backward()
    assert z_s.grad is not None
    assert z_t.grad is None


def test_upstream_gradient_scales_each_row(backend, device):
    z_s, z_t = pair(3, 100, torch.float32, device)
    z_s.requires_grad_()
    loss = topk_jsd(z_s, z_t, k=5, backend=backend)
    up = torch.tensor([2.0, 0.0, -0.5], device=device)
    (g,) = torch.autograd.grad(loss, z_s, up, retain_graph=True)
    (ones,) = torch.autograd.grad(loss, z_s, torch.ones_like(up))
    torch.testing.assert_close(g, ones * up[:, None])


def test_two_backwards_and_two_heads(backend, device):
    z_s, z_t = pair(3, 100, torch.float32, device)
    before = z_s.clone(), z_t.clone()
    z_s.requires_grad_()
    up = torch.ones(3, device=device)
    loss = topk_jsd(z_s, z_t, k=5, backend=backend)
    (first,) = torch.autograd.grad(loss, z_s, up, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, z_s, up)
    assert torch.equal(first, kept)
    assert torch.equal(second, kept)
    both = topk_jsd(z_s, z_t, k=5, backend=backend) + topk_jsd(z_s, z_t, k=5, backend=backend)
    torch.testing.assert_close(torch.autograd.grad(both, z_s, up)[0], 2 * kept)
    assert torch.equal(z_s.detach(), before[0])
    assert torch.equal(z_t, before[1])


def test_double_backward_raises(backend, device):
    z_s, z_t = pair(2, 100, torch.float32, device)
    z_s.requires_grad_()
    loss = topk_jsd(z_s, z_t, k=5, backend=backend).sum()
    (g,) = torch.autograd.grad(loss, z_s, create_graph=True)
    with pytest.raises(RuntimeError):
        (g * g + z_s).sum().backward()


def test_no_grad_and_inference_give_the_same_number(backend, device):
    z_s, z_t = pair(2, 100, torch.float32, device)
    with_graph = topk_jsd(z_s.clone().requires_grad_(), z_t, k=5, backend=backend)
    with torch.no_grad():
        assert torch.equal(topk_jsd(z_s, z_t, k=5, backend=backend), with_graph)
    with torch.inference_mode():
        assert torch.equal(topk_jsd(z_s, z_t, k=5, backend=backend), with_graph)


def test_autocast_changes_nothing(backend, device):
    z_s, z_t = pair(2, 100, torch.float32, device)
    z_s.requires_grad_()
    plain = loss_and_gradient(z_s, z_t, torch.ones(2, device=device), k=5, backend=backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        cast = loss_and_gradient(z_s, z_t, torch.ones(2, device=device), k=5, backend=backend)
    for mine, true in zip(cast, plain, strict=True):
        assert torch.equal(mine, true)


def test_compiles_without_graph_breaks(backend, device):
    z_s, z_t = pair(3, 200, torch.float32, device)
    tau = torch.tensor([0.5, 1.0, 2.0], device=device)

    def step(z):
        return (topk_jsd(z * 2.0, z_t, k=5, temperature=tau, backend=backend) * 3.0).sum()

    eager, compiled = z_s.clone().requires_grad_(), z_s.clone().requires_grad_()
    step(eager).backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(compiled).backward()
    torch.testing.assert_close(compiled.grad, eager.grad)


def test_operator_registration(backend, device):
    z_s, z_t = pair(2, 150, torch.float32, device)
    args = (z_s.requires_grad_(), z_t, None, None, None, 1.0, 1.0, 5, 0.5, "exact", backend)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_topk_jsd_op, args, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "topk_jsd: k must be a whole number of at least 1; got 0"),
        ({"k": 2.5}, "topk_jsd: k must be a whole number"),
        ({"alpha": 1.5}, "topk_jsd: alpha must be between 0 and 1; got 1.5"),
        ({"alpha": math.nan}, "topk_jsd: alpha must be between 0 and 1; got nan"),
        ({"tail": "none"}, "topk_jsd: tail must be one of 'exact', 'clamped', 'drop'; got 'none'"),
        ({"temperature": 0.0}, "topk_jsd: temperature must be greater than 0 and finite; got 0.0"),
        ({"teacher_temperature": -1}, "topk_jsd: teacher_temperature must be greater than 0"),
        ({"temperature": torch.tensor([1.0, -2.0])}, "temperature must be greater than 0 .*got -2"),
        ({"temperature": torch.ones(3)}, r"temperature must be a number or one value per row"),
        ({"ids": torch.tensor([[0, 9], [1, 2]])}, r"ids must be in 0 \.\.\. 8; got 9"),
        ({"ids": torch.tensor([[0, 1], [2, 2]])}, "ids must be distinct in each row; got 2"),
        ({"ids": torch.zeros(2, 2)}, "ids must be int64 or int32; got torch.float32"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, r"ids must be of shape \(2, 'K'\)"),
        ({"backend": "cuda"}, "backend must be one of 'auto', 'triton', 'torch'; got 'cuda'"),
        (
            {"student_logits": torch.zeros(2, 9, dtype=torch.int64)},
            "student_logits must be float32",
        ),
        ({"teacher_logits": torch.zeros(2, 8)}, r"teacher_logits must be of shape \(2, 9\)"),
        ({"teacher_logits": torch.zeros(2, 9, device="meta")}, "teacher_logits must be on cpu"),
    ],
)
def test_errors(change, message):
    arguments = {"student_logits": torch.zeros(2, 9), "teacher_logits": torch.zeros(2, 9), **change}
    with pytest.raises(ValueError, match=message):
        topk_jsd(**arguments)
