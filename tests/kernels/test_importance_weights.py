"""importance_weights against its definition, and the inputs that broke such weights elsewhere."""

import itertools
import math

import pytest
import torch
from properties import given, settings
from properties import strategies as st

from cotutor.kernels.importance_weights import (
    ACTIONS,
    LEVELS,
    STATS,
    importance_weights,
    importance_weights_reference,
)

BACKENDS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def on_device(request, device):
    """Tensors are made on the GPU where there is one; a failed assertion there ends the process."""
    errors = request.node.name.startswith("test_errors")
    torch.set_default_device("cpu" if errors else device)
    yield
    torch.set_default_device("cpu")


def batch(rows=4, length=9, spread=0.7, seed=0):
    """Trainer and sampler log-probs (rows, length), turn ids with masked tokens, sequence ids."""
    torch.manual_seed(seed)
    rollout = -torch.rand(rows, length) * 3
    logprobs = rollout + spread * torch.randn(rows, length)
    turns = torch.arange(rows)[:, None] * 3 + torch.arange(length)[None] * 3 // length
    turns = torch.where(torch.rand(rows, length) < 0.3, -1, turns)
    sequences = torch.arange(rows)[:, None].expand(rows, length)
    return logprobs, rollout, turns.int(), sequences.int()


def assert_same(got, want):
    torch.testing.assert_close(got.weights.double(), want.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(got.keep, want.keep)
    for name, a, b in zip(STATS, got.stats.sums.tolist(), want.stats.sums.tolist(), strict=True):
        assert a == pytest.approx(b, rel=3e-5, abs=3e-5), name
    assert torch.equal(got.stats.counts, want.stats.counts)
    torch.testing.assert_close(
        got.stats.weight_min.double(), want.stats.weight_min, rtol=2e-6, atol=0
    )
    torch.testing.assert_close(
        got.stats.weight_max.double(), want.stats.weight_max, rtol=2e-6, atol=0
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("level", "action"), list(itertools.product(LEVELS, ACTIONS)))
@pytest.mark.parametrize("veto", [None, 0.3])
def test_equals_definition(level, action, veto, backend):
    logprobs, rollout, turns, sequences = batch()
    options = {
        "level": level,
        "action": action,
        "veto": veto,
        "upper": 1.6,
        "lower": 0.0 if action == "truncate" else 0.7,
        "turn_ids": turns,
    }
    want = importance_weights_reference(logprobs, rollout, **options)
    got = importance_weights(logprobs, rollout, backend=backend, **options)
    assert_same(got, want)
    flat = {**options, "turn_ids": turns.reshape(-1)}
    got = importance_weights(
        logprobs.reshape(-1),
        rollout.reshape(-1),
        sequence_ids=sequences.reshape(-1),
        backend=backend,
        **flat,
    )
    assert torch.equal(
        got.weights,
        importance_weights(logprobs, rollout, backend=backend, **options).weights.reshape(-1),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    size=st.integers(0, 40),
    seed=st.integers(0, 1000),
    level=st.sampled_from(LEVELS),
    action=st.sampled_from(ACTIONS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    normalize=st.booleans(),
)
def test_any_order_of_ids(backend, size, seed, level, action, dtype, normalize):
    torch.manual_seed(seed)
    logprobs, rollout = -torch.rand(2, size).to(dtype) * 2
    turns = torch.randint(-1, 6, (size,))
    sequences = torch.randint(-1, 3, (size,))
    options = {
        "turn_ids": turns,
        "sequence_ids": sequences,
        "level": level,
        "action": action,
        "lower": 0.5,
        "normalize": normalize,
        "num_turns": 6,
        "num_sequences": 3,
    }
    got = importance_weights(logprobs, rollout, backend=backend, **options)
    assert_same(got, importance_weights_reference(logprobs, rollout, **options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["packed", "shuffled"])
@pytest.mark.parametrize("level", LEVELS)
def test_more_tokens_than_a_block(backend, order, level):
    torch.manual_seed(3)
    size = 1300
    rollout = -torch.rand(size) * 3
    logprobs = rollout + 0.4 * torch.randn(size)
    turns = torch.arange(size) * 40 // size
    sequences = turns // 5
    turns[::3] = -1
    if order == "shuffled":
        shuffle = torch.randperm(size)
        turns, sequences = turns[shuffle], sequences[shuffle]
    options = {
        "turn_ids": turns,
        "sequence_ids": sequences,
        "level": level,
        "action": "reject",
        "upper": 40.0 if level in ("turn", "sequence") else 2.5,
        "num_turns": 40,
        "num_sequences": 8,
    }
    got = importance_weights(logprobs, rollout, backend=backend, **options)
    want = importance_weights_reference(logprobs, rollout, **options)
    torch.testing.assert_close(got.weights.double(), want.weights, rtol=2e-5, atol=0)
    assert torch.equal(got.keep, want.keep)
    torch.testing.assert_close(got.stats.sums, want.stats.sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
class TestInputsThatBrokeOthers:
    def test_overflowing_ratio_is_the_bound(self, backend):
        logprobs = torch.tensor([-2.0, -2.0, -91.0])
        rollout = torch.tensor([-91.0, -102.0, -2.0])
        turns = torch.tensor([0, 0, -1])
        got = importance_weights(logprobs, rollout, turn_ids=turns, backend=backend)
        assert got.weights.tolist() == [2.0, 2.0, 0.0]
        assert torch.isfinite(got.stats.sums).all()

    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
    def test_masked_garbage_changes_nothing(self, backend, garbage):
        logprobs, rollout, turns, _ = batch()
        options = {"turn_ids": turns, "level": "sequence", "action": "reject", "backend": backend}
        want = importance_weights(logprobs, rollout, **options)
        poison = torch.where(turns < 0, garbage, logprobs)
        got = importance_weights(poison, torch.where(turns < 0, -garbage, rollout), **options)
        assert torch.equal(got.weights, want.weights)
        assert torch.equal(got.stats.sums, want.stats.sums)
        assert (got.weights[turns < 0] == 0).all()

    def test_nothing_trained_gives_zeros(self, backend):
        logprobs, rollout, turns, _ = batch()
        got = importance_weights(
            logprobs, rollout, turn_ids=torch.full_like(turns, -1), normalize=True, backend=backend
        )
        assert not got.weights.any()
        assert not got.keep.any()
        assert not got.stats.sums.any()
        assert not any(got.stats.summary().values())

    def test_same_policy_is_exactly_one(self, backend):
        logprobs, _, turns, _ = batch()
        for level in LEVELS:
            got = importance_weights(
                logprobs, logprobs, turn_ids=turns, level=level, backend=backend
            )
            assert (got.weights[turns >= 0] == 1).all()

    def test_empty(self, backend):
        got = importance_weights(torch.zeros(0), torch.zeros(0), backend=backend)
        assert got.weights.shape == (0,)
        assert not any(got.stats.summary().values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_of_a_worked_case(backend):
    logprobs, rollout = (
        torch.tensor([[-1.0, -1.0], [-2.0, -0.5]]),
        torch.tensor([[-1.0, -2.0], [-1.0, -0.5]]),
    )
    summary = importance_weights(logprobs, rollout, backend=backend).stats.summary()
    weights = [1.0, 2.0, math.exp(-1), 1.0]
    mean = sum(weights) / 4
    assert summary["mean"] == pytest.approx(mean)
    ess = 1 / (sum((w / mean) ** 2 for w in weights) / 4)
    assert summary["effective_sample_size"] == pytest.approx(ess)
    assert summary["above"] == 0.25
    assert summary["abs_log_ratio"] == 0.5
    assert summary["kl_k1"] == 0.0
    assert summary["kl_k3"] == pytest.approx((math.e - 2 + math.exp(-1)) / 4)
    assert summary["chi2_sequence"] == pytest.approx((math.exp(2) - 1 + math.exp(-2) - 1) / 2)
    assert summary["perplexity"] == pytest.approx(math.exp(4.5 / 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_add_up_to_the_whole(backend):
    logprobs, rollout, turns, _ = batch(rows=6)
    whole = importance_weights(logprobs, rollout, turn_ids=turns, backend=backend).stats
    parts = [
        importance_weights(
            logprobs[i : i + 2],
            rollout[i : i + 2],
            turn_ids=turns[i : i + 2],
            num_turns=18,
            backend=backend,
        ).stats
        for i in (0, 2, 4)
    ]
    torch.testing.assert_close(sum(p.sums for p in parts), whole.sums, rtol=1e-6, atol=1e-6)
    assert torch.equal(sum(p.counts for p in parts), whole.counts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_normalised_weights_average_one(backend):
    logprobs, rollout, turns, _ = batch()
    got = importance_weights(
        logprobs, rollout, turn_ids=turns, action="mask", lower=0.8, normalize=True, backend=backend
    )
    assert got.weights[got.keep].mean().item() == pytest.approx(1.0, rel=1e-6)


def test_no_gradient_and_inputs_untouched():
    logprobs, rollout, turns, _ = batch()
    before = logprobs.clone()
    got = importance_weights(logprobs.requires_grad_(), rollout, turn_ids=turns)
    assert not got.weights.requires_grad
    assert torch.equal(logprobs, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend):
    logprobs, rollout, turns, _ = batch(rows=5, length=10)
    options = {"level": "turn", "action": "clip", "lower": 0.9, "backend": backend, "num_turns": 50}
    sequences = torch.arange(5)[:, None].expand(5, 5)
    want = importance_weights(
        logprobs[:, ::2].contiguous(),
        rollout[:, ::2].contiguous(),
        turn_ids=turns[:, ::2].contiguous(),
        sequence_ids=sequences.contiguous(),
        **options,
    )
    got = importance_weights(
        logprobs[:, ::2].t(),
        rollout[:, ::2].t(),
        turn_ids=turns[:, ::2].t(),
        sequence_ids=sequences.t(),
        **options,
    )
    assert torch.equal(got.weights, want.weights.t())


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_graph_breaks(backend):
    logprobs, rollout, turns, _ = batch()

    def weigh(logprobs, rollout):
        return importance_weights(
            logprobs,
            rollout,
            turn_ids=turns,
            level="geometric",
            action="reject",
            normalize=True,
            backend=backend,
        )

    got = torch.compile(weigh, fullgraph=True, backend="aot_eager")(logprobs, rollout)
    assert torch.equal(got.weights, weigh(logprobs, rollout).weights)


ZEROS = torch.zeros(3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((ZEROS, torch.zeros(4)), {}, r"rollout_logprobs must be of shape \(3,\); got"),
        ((ZEROS.long(), ZEROS), {}, "logprobs must be float32, bfloat16 or float16"),
        ((ZEROS, ZEROS), {"level": "word"}, "level must be one of 'token', .*; got 'word'"),
        ((ZEROS, ZEROS), {"action": "drop"}, "action must be one of .*; got 'drop'"),
        ((ZEROS, ZEROS), {"upper": 0.0}, "upper must be greater than 0; got 0.0"),
        ((ZEROS, ZEROS), {"lower": 3.0}, "lower must be from 0 to upper = 2.0; got 3.0"),
        ((ZEROS, ZEROS), {"veto": 0.0}, "veto must be greater than 0 and finite, or None; got 0.0"),
        ((ZEROS, ZEROS), {"level": "turn"}, "turn_ids must be given for level 'turn'; got None"),
        ((ZEROS, ZEROS), {"action": "reject"}, "sequence_ids must be given"),
        ((ZEROS, ZEROS), {"turn_ids": torch.tensor([0, 7, 0])}, "turn_ids must be -1 .*; got 7"),
        ((ZEROS, ZEROS), {"turn_ids": ZEROS}, "turn_ids must be int32 or int64; got torch.float32"),
        ((ZEROS, ZEROS), {"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_errors(arguments, options, message):
    with pytest.raises(ValueError, match=f"^importance_weights: {message}"):
        importance_weights(*arguments, **options)
