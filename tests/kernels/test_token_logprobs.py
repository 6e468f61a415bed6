"""token_logprobs against float64, and the inputs that broke such functions elsewhere."""

import math

import pytest
import torch
from properties import HealthCheck, given, settings
from properties import strategies as st

from cotutor.kernels.common import TRITON_INTERPRETED
from cotutor.kernels.token_logprobs import TokenLogprobs, token_logprobs, token_logprobs_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def on_device(request, device):
    """Tensors are made on the GPU where there is one; a failed assertion there ends the process."""
    errors = request.node.name.startswith("test_errors")
    torch.set_default_device("cpu" if errors else device)
    yield
    torch.set_default_device("cpu")


def problem(rows=6, vocab=67, dtype=torch.float32, seed=0, scale=3.0):
    """Logits, targets, turn ids with masked rows, and one upstream gradient for every output."""
    torch.manual_seed(seed)
    logits = (scale * torch.randn(rows, vocab)).to(dtype)
    targets = torch.randint(0, vocab, (rows,))
    turns = torch.randint(-1, 3, (rows,))
    return logits, targets, turns, torch.randn(3, max(rows, 3))


def scalar(out: TokenLogprobs, upstream: torch.Tensor) -> torch.Tensor:
    """A different weight on every entry of every output."""
    flat = out.logprobs.reshape(-1)
    total = (flat * upstream[0, : len(flat)]).sum()
    if out.entropy is not None:
        total = total + (out.entropy.reshape(-1) * upstream[1, : len(flat)]).sum()
    if out.turn_sums is not None:
        total = total + (out.turn_sums[:3] * upstream[2, :3]).sum()
    return total


def plain(logits, targets, *, turn_ids=None, temperature=1.0, entropy=False, num_turns=None):
    """What one would write without the library, in the working dtype."""
    tau = torch.as_tensor(temperature, dtype=torch.float32).expand(targets.shape)[:, None]
    log_p = (logits.float() / tau).log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(1)
    if turn_ids is None:
        return TokenLogprobs(logprobs, entropies if entropy else None, None, None)
    logprobs, entropies = logprobs * (turn_ids >= 0), entropies * (turn_ids >= 0)
    sums = torch.zeros(num_turns).index_add(0, turn_ids.clamp_min(0), logprobs)
    return TokenLogprobs(logprobs, entropies if entropy else None, sums, None)


def values_and_gradient(function, logits, targets, upstream, **options):
    logits = logits.detach().requires_grad_()
    out = function(logits, targets, **options)
    (grad,) = torch.autograd.grad(scalar(out, upstream.to(out.logprobs.dtype)), logits)
    return TokenLogprobs(*(None if values is None else values.detach() for values in out)), grad


def compare(check, logits, targets, upstream, backend, **options):
    got, grad = values_and_gradient(
        token_logprobs, logits, targets, upstream, backend=backend, **options
    )
    truth, true_grad = values_and_gradient(
        token_logprobs_reference, logits.double(), targets, upstream, **options
    )
    usual, usual_grad = values_and_gradient(plain, logits, targets, upstream, **options)
    for name in ("logprobs", "entropy", "turn_sums"):
        if getattr(truth, name) is not None:
            check(getattr(got, name), getattr(truth, name), getattr(usual, name), name=name)
    assert grad.dtype == logits.dtype
    check(grad, true_grad, usual_grad, name="gradient")
    if truth.turn_counts is not None:
        assert torch.equal(got.turn_counts, truth.turn_counts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per row"])
def test_equals_float64(dtype, entropy, temperature, backend, assert_as_exact_as):
    logits, targets, turns, upstream = problem(dtype=dtype)
    if temperature == "per row":
        temperature = torch.linspace(0.5, 1.5, len(targets))
    options = {"entropy": entropy, "temperature": temperature}
    compare(assert_as_exact_as, logits, targets, upstream, backend, **options)
    options |= {"turn_ids": turns, "num_turns": 3}
    compare(assert_as_exact_as, logits, targets, upstream, backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it only carries a function
)
@given(
    rows=st.integers(0, 9),
    vocab=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
    layout=st.sampled_from(["plain", "sliced", "transposed", "expanded"]),
)
def test_any_shape_and_stride(assert_as_exact_as, backend, rows, vocab, dtype, seed, layout):
    logits, targets, turns, upstream = problem(rows, vocab, dtype, seed)
    if layout == "sliced":
        logits = torch.stack([logits, logits + math.nan], -1).flatten(1)[:, ::2]
    elif layout == "transposed":
        logits = logits.t().contiguous().t()
    elif layout == "expanded":
        logits = logits[:1].expand(rows, vocab) if rows else logits
    options = {"entropy": True, "turn_ids": turns, "num_turns": 3}
    compare(assert_as_exact_as, logits, targets, upstream, backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
class TestInputsThatBrokeOthers:
    @pytest.mark.parametrize("low", [-math.inf, -200.0])
    def test_certain_row_has_finite_gradients(self, backend, low):
        logits = torch.tensor([[0.0, low]], requires_grad=True)
        out = token_logprobs(logits, torch.tensor([0]), entropy=True, backend=backend)
        (out.logprobs + 3 * out.entropy).sum().backward()
        assert out.logprobs.item() == 0
        assert out.entropy.item() == 0
        assert logits.grad.tolist() == [[0, 0]]

    def test_impossible_target(self, backend):
        logits = torch.tensor([[0.0, -math.inf, 0.0]], requires_grad=True)
        out = token_logprobs(logits, torch.tensor([1]), entropy=True, backend=backend)
        assert out.logprobs.item() == -math.inf
        out.entropy.sum().backward()
        torch.testing.assert_close(logits.grad, torch.zeros(1, 3), atol=1e-7, rtol=0)

    @pytest.mark.parametrize("offset", [1e4, -1e4])
    def test_large_offset_keeps_the_entropy(self, backend, offset):
        row = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
        want = token_logprobs(row, torch.tensor([1]), entropy=True, backend=backend)
        got = token_logprobs(row + offset, torch.tensor([1]), entropy=True, backend=backend)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
    def test_masked_rows_are_not_read(self, backend, garbage):
        logits, targets, turns, upstream = problem(rows=9)
        options = {"turn_ids": turns, "entropy": True, "backend": backend}
        masked = turns < 0
        assert masked.any()
        want, grad = values_and_gradient(token_logprobs, logits, targets, upstream, **options)
        poison = logits.masked_fill(masked[:, None], garbage)
        targets = targets.masked_fill(masked, -100)
        tau = torch.ones(9).masked_fill(masked, math.nan)
        got, poison_grad = values_and_gradient(
            token_logprobs, poison, targets, upstream, temperature=tau, **options
        )
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(grad, poison_grad)
        assert not got.logprobs[masked].any()
        assert not grad[masked].any()

    def test_nothing_trained_is_zero_and_attached(self, backend):
        logits, targets, turns, upstream = problem()
        options = {"turn_ids": torch.full_like(turns, -1), "entropy": True, "backend": backend}
        out, grad = values_and_gradient(
            token_logprobs, logits * math.nan, targets, upstream, **options
        )
        assert not any(values.any() for values in out)
        assert not grad.any()

    def test_no_rows(self, backend):
        logits, targets, turns, upstream = problem(rows=0)
        out, grad = values_and_gradient(
            token_logprobs, logits, targets, upstream[:, :0], turn_ids=turns, backend=backend
        )
        assert out.logprobs.shape == (0,)
        assert grad.shape == (0, 67)

    def test_targets_are_not_shifted(self, backend):
        logits = torch.full((3, 5), -20.0)
        logits[torch.arange(3), torch.tensor([4, 0, 2])] = 20.0
        out = token_logprobs(logits, torch.tensor([4, 0, 2]), backend=backend)
        assert (out.logprobs > -1e-6).all()

    def test_sequence_first_seen_as_batch_first(self, backend):
        torch.manual_seed(1)
        logits = torch.randn(5, 2, 33).transpose(0, 1)
        targets = torch.randint(0, 33, (2, 5))
        got = token_logprobs(logits, targets, entropy=True, backend=backend)
        want = token_logprobs(logits.contiguous(), targets, entropy=True, backend=backend)
        assert got.logprobs.shape == (2, 5)
        assert torch.equal(got.logprobs, want.logprobs)
        assert torch.equal(got.entropy, want.entropy)

    def test_splitting_the_rows_changes_nothing(self, backend):
        logits, targets, turns, _ = problem(rows=10)
        options = {"entropy": True, "backend": backend, "num_turns": 3}
        whole = token_logprobs(logits, targets, turn_ids=turns, **options)
        parts = [
            token_logprobs(logits[rows], targets[rows], turn_ids=turns[rows], **options)
            for rows in (slice(0, 1), slice(1, 10))
        ]
        assert torch.equal(whole.logprobs, torch.cat([part.logprobs for part in parts]))
        torch.testing.assert_close(whole.turn_sums, sum(part.turn_sums for part in parts))

    def test_two_backwards_and_untouched_inputs(self, backend):
        logits, targets, turns, upstream = problem()
        before = logits.clone()
        logits.requires_grad_()
        out = token_logprobs(logits, targets, turn_ids=turns, entropy=True, backend=backend)
        total = scalar(out, upstream)
        (first,) = torch.autograd.grad(total, logits, retain_graph=True)
        (second,) = torch.autograd.grad(total, logits, retain_graph=True)
        assert torch.equal(first, second)
        assert torch.equal(logits, before)

    def test_double_backward_raises(self, backend):
        logits, targets, _, _ = problem()
        logits.requires_grad_()
        out = token_logprobs(logits, targets, backend=backend)
        (grad,) = torch.autograd.grad(out.logprobs.sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="backward"):
            grad.sum().backward()

    def test_expanded_upstream_gradient(self, backend):
        logits, targets, _, _ = problem()
        logits.requires_grad_()
        out = token_logprobs(logits, targets, entropy=True, backend=backend)
        one = torch.ones(1).expand(6)
        grads = [
            torch.autograd.grad(out[:2], logits, [g, g], retain_graph=True)[0]
            for g in (one, one.contiguous())
        ]
        assert torch.equal(*grads)

    def test_no_grad_and_autocast_give_the_same_number(self, backend):
        logits, targets, _, _ = problem()
        want = token_logprobs(logits.requires_grad_(), targets, backend=backend).logprobs
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            got = token_logprobs(logits, targets, backend=backend).logprobs
        assert not got.requires_grad
        assert torch.equal(got, want)

    def test_compiles_without_graph_breaks(self, backend):
        logits, targets, turns, upstream = problem()

        def total(logits):
            out = token_logprobs(
                logits, targets, turn_ids=turns, entropy=True, num_turns=3, backend=backend
            )
            return scalar(out, upstream)

        compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
        a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        total(a).backward()
        compiled(b).backward()
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [4096, 9000, 12415])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_longer_than_a_block(vocab, dtype, backend, assert_as_exact_as):
    logits, targets, turns, upstream = problem(3, vocab, dtype)
    logits[0, :5000] = -math.inf  # a whole block without a finite logit
    targets[0] = vocab - 1
    logits[0, -1] = 3.0
    turns[0] = 1
    compare(
        assert_as_exact_as,
        logits,
        targets,
        upstream,
        backend,
        entropy=vocab != 4096,
        turn_ids=turns,
        num_turns=3,
    )


@pytest.mark.skipif(not torch.cuda.is_available() and not TRITON_INTERPRETED, reason="no Triton")
@pytest.mark.parametrize("what", ["statistics", "gradient"])
def test_offsets_pass_two_to_the_31(what):
    """Rows 2³⁰ elements apart: the third one's offset does not fit 32 bits."""
    from cotutor.kernels.logprob_rows import Rows
    from cotutor.kernels.triton_logprobs import chunk_gradient, chunk_statistics

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.utils.deterministic.fill_uninitialized_memory = False  # touches only what is written
    try:
        memory = torch.empty((2 << 30) + 64, dtype=torch.float16, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    far = memory.as_strided((3, 50), (1 << 30, 1))
    far.copy_(problem(3, 50)[0])
    near = far.clone()
    rows = Rows(torch.tensor([3, 0, 49], device=device), None, 1.0, None)
    want = chunk_statistics(near, rows, entropy=True)
    if what == "statistics":
        assert torch.equal(chunk_statistics(far, rows, entropy=True), want)
        return
    upstream = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.1, 0.2]], device=device)
    chunk_gradient(near, rows, want, *upstream, near)
    chunk_gradient(far, rows, want, *upstream, far)
    assert torch.equal(far, near)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_rows_sum_to_zero_and_lead_uphill(seed, backend):
    logits, targets, _, _ = problem(seed=seed)
    logits.requires_grad_()
    total = token_logprobs(logits, targets, backend=backend).logprobs.sum()
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(grad.sum(1), torch.zeros(6), atol=1e-6, rtol=0)
    moved = token_logprobs(logits + 0.01 * grad, targets, backend=backend).logprobs.sum()
    assert moved > total


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3).long()}, "logits must be float32, bfloat16 or float16; got"),
        ({"logits": torch.zeros(2, 0)}, r"logits must be \(..., V\) with V >= 1; got"),
        ({"targets": torch.zeros(3).long()}, r"targets must be of shape \(2,\); got shape \(3,\)"),
        ({"targets": torch.zeros(2)}, "targets must be int32 or int64; got torch.float32"),
        ({"targets": torch.tensor([0, 3])}, "targets must be 0 to 2; got 3"),
        ({"targets": torch.tensor([0, -1])}, "targets must be 0 to 2; got -1"),
        ({"turn_ids": torch.zeros(3).long()}, r"turn_ids must be of shape \(2,\)"),
        ({"turn_ids": torch.tensor([0, -2])}, "turn_ids must be -1 .*; got -2"),
        ({"turn_ids": torch.tensor([0, 1]), "num_turns": 1}, "turn_ids must be -1 .*; got 1"),
        ({"temperature": 0.0}, "temperature must be greater than 0 and finite; got 0.0"),
        ({"temperature": torch.tensor([1.0, -1.0])}, "temperature must be .*; got -1.0"),
        ({"temperature": torch.ones(3)}, "temperature must be a number or one value per row"),
        ({"backend": "gpu"}, "backend must be one of"),
    ],
)
def test_errors(change, message):
    arguments = {"logits": torch.zeros(2, 3), "targets": torch.zeros(2).long(), **change}
    with pytest.raises(ValueError, match=f"^token_logprobs: {message}"):
        token_logprobs(**arguments)
