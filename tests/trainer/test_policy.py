"""Weights, teacher, optimizer step and the ways out, against closed forms."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, make_rollouts, tiny_qwen3
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cotutor.trainer.algos.sdpo import SDPO, SDPOConfig
from cotutor.trainer.config import Config
from cotutor.trainer.policy import Policy
from cotutor.trainer.step import accumulate_gradients
from cotutor.trainer.world import World


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in policy.full_tensors()}


def teacher_weights(policy: Policy) -> dict[str, torch.Tensor]:
    assert policy.teacher is not None
    return {n: p.full_tensor().clone() for n, p in policy.teacher.model.state_dict().items()}


def train_one_step(policy: Policy, world: World, seed: int = 0, lr: float = 1e-3) -> float:
    rollouts = make_rollouts(4, teacher=True, seed=seed)
    accumulate_gradients(policy, SDPO(SDPOConfig(k=5)), rollouts, Config(), world)
    norm, skipped = policy.step(lr)
    assert not skipped
    return norm


def test_the_ema_follows_its_closed_form(make_policy: Callable[..., Policy], world: World) -> None:
    policy = make_policy("ema")
    expected = {k: v.double() for k, v in weights(policy).items()}
    for step in range(30):
        train_one_step(policy, world, seed=step)
        now = weights(policy)
        expected = {k: 0.95 * expected[k] + 0.05 * now[k].double() for k in expected}
    for name, value in teacher_weights(policy).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-7)
        if value.ndim == 2:
            assert not torch.equal(value, now[name])


def test_a_restarted_teacher_equals_the_student(
    make_policy: Callable[..., Policy], world: World
) -> None:
    policy = make_policy("ema")
    train_one_step(policy, world)
    policy.restart_teacher()
    now = weights(policy)
    for name, value in teacher_weights(policy).items():
        assert torch.equal(value, now[name])


@pytest.mark.parametrize("kind", ["initial", "trust_region"])
def test_a_fixed_teacher_never_moves(
    kind: str, make_policy: Callable[..., Policy], world: World
) -> None:
    policy = make_policy(kind)
    before = teacher_weights(policy)
    train_one_step(policy, world)
    policy.restart_teacher()
    for name, value in teacher_weights(policy).items():
        assert torch.equal(value, before[name])


def test_the_trust_region_teacher_interpolates_logits(
    make_policy: Callable[..., Policy], world: World
) -> None:
    policy = make_policy("trust_region")
    train_one_step(policy, world, lr=0.1)
    ids, index = torch.tensor([[1, 2, 3, 4]]), torch.tensor([0, 2, 3])
    hidden, weight = policy.teach(ids, index)
    found = hidden @ weight.T

    def logits(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return h @ w.T

    with torch.no_grad():
        current = policy.student(ids, index, logits)
        initial = policy.teacher(ids, index, logits)  # type: ignore[misc]
    torch.testing.assert_close(found, 0.95 * initial + 0.05 * current)
    assert (initial - current).abs().max() > 1e-2


def test_a_non_finite_gradient_skips_weights_and_teacher(
    make_policy: Callable[..., Policy], world: World
) -> None:
    policy = make_policy("ema")
    student, teacher = weights(policy), teacher_weights(policy)
    accumulate_gradients(
        policy, SDPO(SDPOConfig(k=5)), make_rollouts(4, teacher=True), Config(), world
    )
    next(iter(policy.trainable)).grad.to_local()[0] = float("inf")  # type: ignore[union-attr]
    _, skipped = policy.step(1e-3)
    assert skipped
    assert all(torch.equal(v, student[k]) for k, v in weights(policy).items())
    assert all(torch.equal(v, teacher[k]) for k, v in teacher_weights(policy).items())
    assert all(p.grad is None for p in policy.trainable)


def test_the_optimizer_sees_clipped_gradients(
    make_policy: Callable[..., Policy], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy("ema")
    policy.max_grad_norm = 1e-4
    seen = []
    step = policy.optimizer.step

    def watched() -> None:
        grads = [p.grad.full_tensor() for p in policy.trainable]  # type: ignore[union-attr]
        seen.append(sum(float(g.double().pow(2).sum()) for g in grads) ** 0.5)
        step()

    monkeypatch.setattr(policy.optimizer, "step", watched)
    norm = train_one_step(policy, world)
    assert norm > 1e-4  # reported before clipping
    assert seen == pytest.approx([1e-4], rel=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_exports_load_again_tied_or_not(
    tied: bool, tmp_path: Path, make_policy: Callable[..., Policy], world: World
) -> None:
    policy = make_policy("ema", model=tiny_qwen3(tmp_path / "model", tied=tied))
    train_one_step(policy, world)
    policy.export(tmp_path / "export", NoTokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    found = loaded.state_dict()
    for name, value in weights(policy).items():
        assert torch.equal(found[name], value), name


def test_a_lora_export_is_merged_and_only_adapters_train(
    tmp_path: Path, make_policy: Callable[..., Policy], model_folder: Path, world: World
) -> None:
    policy = make_policy("ema", lora_rank=2)
    before = {n: p.full_tensor().clone() for n, p in policy.student.model.state_dict().items()}
    for seed in range(2):
        train_one_step(policy, world, seed=seed, lr=0.05)
    after = policy.student.model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name].full_tensor(), value) != (".lora_" in name), name
    policy.export(tmp_path / "merged", NoTokenizer())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    original = AutoModelForCausalLM.from_pretrained(model_folder)
    assert merged.state_dict().keys() == original.state_dict().keys()
    ids = torch.tensor([[5, 6, 7]])

    def logits(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return h @ w.T

    with torch.no_grad():
        expected = policy.student(ids, torch.arange(3), logits)
        torch.testing.assert_close(merged(ids).logits[0], expected, rtol=1e-4, atol=1e-5)
        assert (original(ids).logits[0] - expected).abs().max() > 1e-2


def test_a_loaded_checkpoint_goes_on_bit_for_bit(
    tmp_path: Path, make_policy: Callable[..., Policy], world: World
) -> None:
    straight = make_policy("ema")
    for step in range(2):
        train_one_step(straight, world, seed=step)
    straight.save(tmp_path / "state")
    for step in range(2, 4):
        train_one_step(straight, world, seed=step)
    resumed = make_policy("ema")
    resumed.load(tmp_path / "state")
    for step in range(2, 4):
        train_one_step(resumed, world, seed=step)
    assert all(torch.equal(v, weights(straight)[k]) for k, v in weights(resumed).items())
    found = teacher_weights(resumed)
    assert all(torch.equal(v, found[k]) for k, v in teacher_weights(straight).items())


def test_a_lora_export_keeps_biases(
    tmp_path: Path, make_policy: Callable[..., Policy], world: World
) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    original = Qwen2ForCausalLM(config)
    original.save_pretrained(tmp_path / "qwen2")
    policy = make_policy("ema", model=tmp_path / "qwen2", lora_rank=2)
    assert weights(policy).keys() == original.state_dict().keys()
    for name, value in weights(policy).items():
        assert torch.equal(value, original.state_dict()[name]), name  # B starts at 0


def test_lora_starts_from_the_seed_alone(make_policy: Callable[..., Policy]) -> None:
    found = []
    for noise in (1, 2):
        torch.rand(noise)  # however much of the global generator was used before
        state = make_policy(None, lora_rank=2).student.model.state_dict()
        found.append({n: p.full_tensor() for n, p in state.items() if ".lora_A" in n})
    assert found[0]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("teacher", ["ema", "current", "trust_region"])
def test_a_step_in_bfloat16(teacher: str, make_policy: Callable[..., Policy], world: World) -> None:
    policy = make_policy(teacher, compute_dtype="bfloat16")
    rollouts = make_rollouts(4, teacher=True)
    accumulate_gradients(policy, SDPO(SDPOConfig(k=5)), rollouts, Config(), world)
    exact = make_policy(teacher)
    accumulate_gradients(exact, SDPO(SDPOConfig(k=5)), rollouts, Config(), world)
    for p, q in zip(policy.trainable, exact.trainable, strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype == torch.float32
    pairs = zip(policy.trainable, exact.trainable, strict=True)
    inner = sum(float((p.grad.to_local() * q.grad.to_local()).sum()) for p, q in pairs)  # type: ignore[union-attr]
    norms = [
        sum(float(p.grad.to_local().pow(2).sum()) for p in x.trainable) ** 0.5  # type: ignore[union-attr]
        for x in (policy, exact)
    ]
    assert inner / (norms[0] * norms[1]) > 0.98
    _, skipped = policy.step(1e-3)
    assert not skipped
    assert all(t.dtype == torch.bfloat16 for _, t in policy.full_tensors())


def test_saving_does_not_step_a_fresh_optimizer(
    tmp_path: Path, make_policy: Callable[..., Policy], world: World
) -> None:
    saved, other = make_policy("ema"), make_policy("ema")
    saved.save(tmp_path / "early")
    for policy in (saved, other):
        train_one_step(policy, world)
    assert all(torch.equal(v, weights(other)[k]) for k, v in weights(saved).items())


def test_a_finished_policy_s_memory_is_given_back(
    make_policy: Callable[..., Policy], world: World
) -> None:
    policy = make_policy("ema")
    train_one_step(policy, world)
    reference = weakref.ref(policy.trainable[0])
    del policy
    gc.collect()  # as the loop does at the end of a phase
    assert reference() is None
