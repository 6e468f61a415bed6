"""linear_token_logprobs against float64, and what only an LM head inside can get wrong."""

import math

import pytest
import torch
from properties import HealthCheck, given, settings
from properties import strategies as st

from cotutor.kernels.linear_token_logprobs import (
    linear_token_logprobs,
    linear_token_logprobs_reference,
)
from cotutor.kernels.token_logprobs import TokenLogprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEEP = [0, 1 << 20]  # multiply again in the backward pass, or keep the probabilities


@pytest.fixture(autouse=True)
def on_device(request, device):
    """Tensors are made on the GPU where there is one; a failed assertion there ends the process."""
    errors = request.node.name.startswith("test_errors")
    torch.set_default_device("cpu" if errors else device)
    yield
    torch.set_default_device("cpu")


def problem(rows=9, vocab=70, width=12, dtype=torch.float32, seed=0):
    """Hidden states, LM head, targets, turn ids with masked rows, upstream gradients."""
    torch.manual_seed(seed)
    hidden = torch.randn(rows, width).to(dtype)
    weight = torch.randn(vocab, width).to(dtype)
    targets = torch.randint(0, vocab, (rows,))
    turns = torch.randint(-1, 3, (rows,))
    return hidden, weight, targets, turns, torch.randn(3, max(rows, 3))


def scalar(out, upstream):
    """A different weight on every entry of every output."""
    upstream = upstream.to(out.logprobs.dtype)
    flat = out.logprobs.reshape(-1)
    total = (flat * upstream[0, : len(flat)]).sum()
    if out.entropy is not None:
        total = total + (out.entropy.reshape(-1) * upstream[1, : len(flat)]).sum()
    if out.turn_sums is not None:
        total = total + (out.turn_sums[:3] * upstream[2, :3]).sum()
    return total


def plain(hidden, weight, targets, *, turn_ids, temperature=1.0, entropy=True, num_turns=3):
    """What one would write without the library, in the working dtype."""
    tau = torch.as_tensor(temperature, dtype=torch.float32).expand(targets.shape)[:, None]
    log_p = ((hidden @ weight.t()).float() / tau).log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0] * (turn_ids >= 0)
    entropies = -(log_p.exp() * log_p).sum(1) * (turn_ids >= 0)
    sums = torch.zeros(num_turns).index_add(0, turn_ids.clamp_min(0), logprobs)
    return TokenLogprobs(logprobs, entropies if entropy else None, sums, None)


def values_and_gradients(function, hidden, weight, *others, upstream, **options):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(hidden, weight, *others, **options)
    grads = torch.autograd.grad(scalar(out, upstream), (hidden, weight))
    out = TokenLogprobs(*(None if values is None else values.detach() for values in out))
    return out, *grads


def compare(check, hidden, weight, targets, upstream, *, backend, keep_bytes, chunk, **options):
    # floor: GEMMs over chunks add in another order than one GEMM does
    got = values_and_gradients(
        linear_token_logprobs,
        hidden,
        weight,
        targets,
        upstream=upstream,
        backend=backend,
        keep_bytes=keep_bytes,
        chunk_rows=chunk,
        **options,
    )
    double = hidden.double(), weight.double(), targets
    truth = values_and_gradients(
        linear_token_logprobs_reference, *double, upstream=upstream, **options
    )
    usual = values_and_gradients(plain, hidden, weight, targets, upstream=upstream, **options)
    for name in ("logprobs", "entropy", "turn_sums"):
        values = getattr(got[0], name), getattr(truth[0], name), getattr(usual[0], name)
        if values[1] is not None:
            check(*values, name=name)
    for name, a, b, c in zip(("hidden", "weight"), got[1:], truth[1:], usual[1:], strict=True):
        assert a.dtype == hidden.dtype
        check(a, b, c, floor=8.0, name=f"gradient of {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keep_bytes", KEEP)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per row"])
def test_equals_float64(dtype, keep_bytes, entropy, temperature, backend, assert_as_exact_as):
    hidden, weight, targets, turns, upstream = problem(dtype=dtype)
    if temperature == "per row":
        temperature = torch.linspace(0.5, 1.5, len(targets))
    compare(
        assert_as_exact_as,
        hidden,
        weight,
        targets,
        upstream,
        backend=backend,
        keep_bytes=keep_bytes,
        chunk=4,
        turn_ids=turns,
        temperature=temperature,
        entropy=entropy,
        num_turns=3,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it only carries a function
)
@given(
    rows=st.integers(0, 9),
    vocab=st.integers(1, 200),
    width=st.integers(1, 9),
    chunk=st.integers(1, 10),
    kept_rows=st.integers(0, 10),
    seed=st.integers(0, 999),
    layout=st.sampled_from(["plain", "sliced", "transposed"]),
)
def test_any_shape_and_stride(
    assert_as_exact_as, backend, rows, vocab, width, chunk, kept_rows, seed, layout
):
    hidden, weight, targets, turns, upstream = problem(rows, vocab, width, seed=seed)
    if layout == "sliced":
        hidden = torch.stack([hidden, hidden * math.nan], -1).flatten(1)[:, ::2]
        weight = torch.stack([weight, weight * math.nan], -1).flatten(1)[:, ::2]
    elif layout == "transposed":
        hidden, weight = hidden.t().contiguous().t(), weight.t().contiguous().t()
    compare(
        assert_as_exact_as,
        hidden,
        weight,
        targets,
        upstream,
        backend=backend,
        keep_bytes=kept_rows * vocab * 4,
        chunk=chunk,
        turn_ids=turns,
        num_turns=3,
        entropy=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_probabilities_hold_both_ends(dtype):
    """A token with p = 1 − 1e-6 keeps the relative accuracy of its small gradients."""
    hidden = torch.tensor([[1.0, 0.0]], dtype=dtype)
    weight = torch.tensor([[14.0, 0.0], [0.0, 1.0], [0.25, 3.0]], dtype=dtype)
    upstream = torch.tensor([[0.0, 0, 0], [1.3, 0, 0], [0, 0, 0]])  # the entropy's gradient alone
    grads = {}
    for keep_bytes in KEEP:
        _, *grads[keep_bytes] = values_and_gradients(
            linear_token_logprobs,
            hidden,
            weight,
            torch.tensor([2]),  # not the certain one
            upstream=upstream,
            entropy=True,
            keep_bytes=keep_bytes,
        )
    for again, kept in zip(*grads.values(), strict=True):
        assert again.any()
        torch.testing.assert_close(kept, again, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep_bytes", KEEP)
class TestInputsThatBrokeOthers:
    @pytest.mark.parametrize("garbage", [math.nan, math.inf])
    def test_masked_rows_are_not_read(self, backend, keep_bytes, garbage):
        hidden, weight, targets, turns, upstream = problem(rows=11)
        masked = turns < 0
        assert masked.any()
        options = {
            "turn_ids": turns,
            "entropy": True,
            "backend": backend,
            "keep_bytes": keep_bytes,
            "upstream": upstream,
            "chunk_rows": 4,
        }
        want = values_and_gradients(linear_token_logprobs, hidden, weight, targets, **options)
        poison = hidden.masked_fill(masked[:, None], garbage)
        targets = targets.masked_fill(masked, -100)
        options["trained_rows"] = int((~masked).sum())
        got = values_and_gradients(linear_token_logprobs, poison, weight, targets, **options)
        for a, b in zip((*got[0], *got[1:]), (*want[0], *want[1:]), strict=True):
            assert torch.equal(a, b)
        assert not got[0].logprobs[masked].any()
        assert not got[1][masked].any()

    def test_nothing_trained_is_zero_and_attached(self, backend, keep_bytes):
        hidden, weight, targets, turns, upstream = problem()
        out, grad_hidden, grad_weight = values_and_gradients(
            linear_token_logprobs,
            hidden * math.nan,
            weight,
            targets,
            turn_ids=torch.full_like(turns, -1),
            entropy=True,
            upstream=upstream,
            backend=backend,
            keep_bytes=keep_bytes,
        )
        assert not any(values.any() for values in (*out, grad_hidden, grad_weight))

    def test_two_backwards_and_untouched_inputs(self, backend, keep_bytes):
        hidden, weight, targets, turns, upstream = problem()
        before = hidden.clone(), weight.clone()
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        out = linear_token_logprobs(
            *inputs, targets, turn_ids=turns, entropy=True, backend=backend, keep_bytes=keep_bytes
        )
        total = scalar(out, upstream)
        first = torch.autograd.grad(total, inputs, retain_graph=True)
        second = torch.autograd.grad(total, inputs, retain_graph=True)
        for a, b in zip((*first, *inputs), (*second, *before), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("frozen", ["hidden", "weight"])
    def test_frozen_input_has_no_gradient(self, backend, keep_bytes, frozen):
        hidden, weight, targets, _, upstream = problem()
        options = {"entropy": True, "backend": backend, "keep_bytes": keep_bytes}
        _, *want = values_and_gradients(
            linear_token_logprobs, hidden, weight, targets, upstream=upstream, **options
        )
        hidden.requires_grad_(frozen != "hidden")
        weight.requires_grad_(frozen != "weight")
        scalar(linear_token_logprobs(hidden, weight, targets, **options), upstream).backward()
        if frozen == "hidden":
            assert hidden.grad is None
            assert torch.equal(weight.grad, want[1])
        else:
            assert weight.grad is None
            assert torch.equal(hidden.grad, want[0])

    def test_float32_head_and_bfloat16_states(self, backend, keep_bytes):
        hidden, weight, targets, _, upstream = problem()
        options = {
            "entropy": True,
            "backend": backend,
            "keep_bytes": keep_bytes,
            "upstream": upstream,
        }
        _, *want = values_and_gradients(
            linear_token_logprobs, hidden.bfloat16(), weight, targets, **options
        )
        assert [grad.dtype for grad in want] == [torch.bfloat16, torch.float32]
        with torch.autocast(DEVICE, torch.bfloat16):
            out, *cast = values_and_gradients(
                linear_token_logprobs, hidden, weight, targets, **options
            )
        assert out.logprobs.dtype == torch.float32
        assert [grad.dtype for grad in cast] == [torch.float32, torch.float32]
        for a, b in zip(cast, want, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=0.05, atol=0.02)

    def test_double_backward_raises(self, backend, keep_bytes):
        hidden, weight, targets, _, _ = problem()
        hidden.requires_grad_()
        out = linear_token_logprobs(hidden, weight, targets, backend=backend, keep_bytes=keep_bytes)
        (grad,) = torch.autograd.grad(out.logprobs.sum(), hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="backward"):
            grad.sum().backward()

    def test_no_grad_gives_the_same_number(self, backend, keep_bytes):
        hidden, weight, targets, _, _ = problem()
        options = {"entropy": True, "backend": backend, "keep_bytes": keep_bytes}
        want = linear_token_logprobs(hidden.requires_grad_(), weight, targets, **options)
        with torch.no_grad():
            got = linear_token_logprobs(hidden, weight, targets, **options)
        assert not got.logprobs.requires_grad
        assert torch.equal(got.logprobs, want.logprobs)
        assert torch.equal(got.entropy, want.entropy)

    def test_batch_first_equals_flat(self, backend, keep_bytes):
        hidden, weight, targets, turns, _ = problem(rows=8)
        options = {"entropy": True, "backend": backend, "keep_bytes": keep_bytes, "num_turns": 3}
        flat = linear_token_logprobs(hidden, weight, targets, turn_ids=turns, **options)
        shaped = linear_token_logprobs(
            hidden.reshape(2, 4, -1),
            weight,
            targets.reshape(2, 4),
            turn_ids=turns.reshape(2, 4),
            **options,
        )
        assert torch.equal(shaped.logprobs, flat.logprobs.reshape(2, 4))
        assert torch.equal(shaped.turn_sums, flat.turn_sums)

    def test_compiles_without_graph_breaks(self, backend, keep_bytes):
        hidden, weight, targets, turns, upstream = problem()

        def total(hidden, weight):
            out = linear_token_logprobs(
                hidden,
                weight,
                targets,
                turn_ids=turns,
                entropy=True,
                num_turns=3,
                backend=backend,
                keep_bytes=keep_bytes,
            )
            return scalar(out, upstream)

        compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
        inputs = hidden.requires_grad_(), weight.requires_grad_()
        want = torch.autograd.grad(total(*inputs), inputs)
        got = torch.autograd.grad(compiled(*inputs), inputs)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 4)}, r"hidden must be of shape \(2, 5\); got shape \(2, 4\)"),
        ({"weight": torch.zeros(3)}, r"weight must be 2-dimensional; got shape \(3,\)"),
        ({"weight": torch.zeros(0, 5)}, r"weight must be \(V, D\) with V >= 1"),
        ({"weight": torch.zeros(3, 5).int()}, "weight must be float32, bfloat16 or float16"),
        ({"targets": torch.tensor([0, 3])}, "targets must be 0 to 2; got 3"),
        ({"turn_ids": torch.tensor([0, -2])}, "turn_ids must be -1 .*; got -2"),
        (
            {"turn_ids": torch.tensor([0, -1]), "trained_rows": 2},
            "trained_rows must be the number of rows with turn_ids >= 0, not 2; got 1",
        ),
        ({"temperature": -1.0}, "temperature must be greater than 0 and finite; got -1.0"),
        ({"chunk_rows": 0}, "chunk_rows must be a whole number of at least 1; got 0"),
        ({"keep_bytes": -1}, "keep_bytes must be a whole number of at least 0; got -1"),
        ({"backend": "gpu"}, "backend must be one of"),
    ],
)
def test_errors(change, message):
    arguments = {
        "hidden": torch.zeros(2, 5),
        "weight": torch.zeros(3, 5),
        "targets": torch.zeros(2).long(),
        **change,
    }
    with pytest.raises(ValueError, match=f"^linear_token_logprobs: {message}"):
        linear_token_logprobs(**arguments)
