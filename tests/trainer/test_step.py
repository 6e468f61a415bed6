"""One optimizer step: the same gradient however the batch is cut and on however many ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, make_dialogues, make_rollouts, tiny_qwen3
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from cotutor.rollout.models import ModelError
from cotutor.rollout.trajectory import Trajectory
from cotutor.trainer.algos.grpo import GRPO, GRPOConfig
from cotutor.trainer.algos.rl2f import RL2F, RL2FConfig
from cotutor.trainer.algos.sdpo import SDPO, SDPOConfig
from cotutor.trainer.algos.sft import SFT, SFTConfig
from cotutor.trainer.batch import make_micro_batch, plan_micro_batches
from cotutor.trainer.config import Config, PolicyConfig
from cotutor.trainer.layers import attends_only, uses_liger
from cotutor.trainer.policy import Policy
from cotutor.trainer.step import accumulate_gradients, check_canary
from cotutor.trainer.world import World

ALGORITHMS = {
    "sdpo": lambda: SDPO(SDPOConfig(k=7)),
    "grpo": lambda: GRPO(GRPOConfig()),
    "sft": lambda: SFT(SFTConfig()),
    "rl2f": lambda: RL2F(RL2FConfig()),
    "rl2f with a world model": lambda: RL2F(RL2FConfig(world_model_coef=0.3)),
}


def rollouts_for(name: str) -> list[Trajectory]:
    return make_dialogues(9) if "rl2f" in name else make_rollouts(9, teacher=name == "sdpo")


def config_with(micro_batch_tokens: int) -> Config:
    return Config(policy=PolicyConfig(micro_batch_tokens=micro_batch_tokens))


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.full_tensor().clone()  # type: ignore[union-attr]
        for name, p in policy.student.named_parameters()
        if p.grad is not None
    }


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    assert a
    difference = sum(float((a[k] - b[k]).double().pow(2).sum()) for k in a) ** 0.5
    return difference / sum(float(b[k].double().pow(2).sum()) for k in b) ** 0.5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_many_micro_batches_give_the_full_batch_s_gradient(
    name: str, make_policy: Callable[..., Policy], world: World
) -> None:
    algorithm = ALGORITHMS[name]()
    rollouts = rollouts_for(name)
    results = []
    for tokens in (1_000_000, 1, 60):
        policy = make_policy(teacher=algorithm.teacher)
        sums, signal = accumulate_gradients(policy, algorithm, rollouts, config_with(tokens), world)
        assert signal
        results.append((gradients(policy), sums["loss"], sums.get("max_abs_logprob_diff", 0.0)))
    full, full_loss, full_max = results[0]
    assert (full_max > 0) == (name != "sft")
    for other, loss, greatest in results[1:]:
        assert relative(other, full) < 1e-5
        assert loss == pytest.approx(full_loss, rel=1e-5)
        assert greatest == pytest.approx(full_max, rel=1e-5)


def test_the_canary_stops_at_a_mean_and_at_a_single_token(
    make_policy: Callable[..., Policy],
) -> None:
    policy = make_policy()
    good = {"canary_mean_abs_diff": 9e-4, "canary_max_abs_diff": 9e-2}
    check_canary(good, policy, 0)
    for name, value in (("mean", 1.1e-3), ("max", 0.11), ("mean", float("nan"))):
        metrics = {**good, f"canary_{name}_abs_diff": value}
        with pytest.raises(RuntimeError, match=f"step 7's rollouts: {name} .* is above"):
            check_canary(metrics, policy, 7)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("window", [None, 5])
def test_packed_sequences_do_not_see_each_other(
    name: str,
    window: int | None,
    make_policy: Callable[..., Policy],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = ALGORITHMS[name]()
    rollouts = rollouts_for(name)
    model = tiny_qwen3(tmp_path / "model", window=window)

    def result(packing: str, tokens: int) -> tuple[dict[str, torch.Tensor], float]:
        policy = make_policy(algorithm.teacher, model=model, packing=packing)
        assert policy.packs == (packing == "on")
        sums, _ = accumulate_gradients(policy, algorithm, rollouts, config_with(tokens), world)
        return gradients(policy), sums["loss"]

    padded, padded_loss = result("off", 60)
    for tokens in (1_000_000, 60, 1):
        packed, loss = result("on", tokens)
        assert relative(packed, padded) < 1e-5
        assert loss == pytest.approx(padded_loss, rel=1e-5)
    # One long causal row, which an attention mask of ones would make of it, is something else.
    monkeypatch.setattr(
        Policy, "score", lambda self, ids, index, function, _: self.student(ids, index, function)
    )
    assert relative(result("on", 1_000_000)[0], padded) > 1e-2


def test_both_sides_of_a_packed_batch_are_the_padded_one_s(
    make_policy: Callable[..., Policy], world: World
) -> None:
    """Hidden states of student and teacher, row by row."""
    rollouts = make_rollouts(9, teacher=True)
    hidden = []
    for packed in (False, True):
        policy = make_policy("ema", packing="on" if packed else "off")
        batch = make_micro_batch(rollouts, lambda _: 1.0, 1.0, world.device, packed=packed)
        assert (batch.position_ids is None) != packed
        assert batch.teacher_ids is not None
        assert batch.teacher_row_index is not None
        with torch.no_grad():
            student = policy.score(
                batch.ids, batch.row_index, lambda h, _: h.clone(), batch.position_ids
            )
        teacher, _ = policy.teach(
            batch.teacher_ids, batch.teacher_row_index, batch.teacher_position_ids
        )
        hidden.append((student, teacher, batch.rows.targets))
    for one, other in zip(*hidden, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_packed_micro_batches_hold_what_the_budget_allows() -> None:
    rollouts = make_rollouts(40, teacher=True)
    lengths = [
        max(len(r.ids), len(r.teacher_prompt_ids or ()) + len(r.response_ids())) for r in rollouts
    ]
    plans = {p: plan_micro_batches(rollouts, [1.0] * 40, 60, packed=p) for p in (False, True)}
    for packed, plan in plans.items():
        assert sorted(i for members in plan for i in members) == list(range(40))
        for members in plan:
            longest = max(lengths[i] for i in members) * len(members)
            assert (sum(lengths[i] for i in members) if packed else longest) <= 60
    assert len(plans[True]) < len(plans[False])
    alone = plan_micro_batches(rollouts, [1.0] * 40, 1, packed=True)
    assert [len(members) for members in alone] == [1] * 40


def test_recurrent_layers_are_not_packed(
    make_policy: Callable[..., Policy], model_folder: Path, tmp_path: Path
) -> None:
    assert attends_only(AutoModelForCausalLM.from_pretrained(model_folder))
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ModelError, match=r"mamba: its layers carry state .*--policy\.packing off"):
        make_policy(model=tmp_path / "mamba", packing="on")


def test_liger_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for installed in (None, object()):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=installed: found)
        for choice in ("auto", "on", "off"):
            config = PolicyConfig(liger=choice)  # type: ignore[arg-type]
            assert not uses_liger(config, cpu)
            wanted = choice == "on" or (choice == "auto" and installed is not None)
            assert uses_liger(config, gpu) == wanted


def test_the_denominator_counts_rollouts_without_a_teacher(
    make_policy: Callable[..., Policy], world: World
) -> None:
    algorithm = ALGORITHMS["sdpo"]()
    rollouts = make_rollouts(4, teacher=True)
    policy = make_policy(teacher="ema")
    full, _ = accumulate_gradients(policy, algorithm, rollouts, config_with(1000), world)
    more = rollouts + [dataclasses.replace(r, teacher_prompt_ids=None) for r in rollouts]
    policy = make_policy(teacher="ema")
    half, _ = accumulate_gradients(policy, algorithm, more, config_with(1000), world)
    assert half["loss"] == pytest.approx(full["loss"] / 2, rel=1e-6)


def test_a_step_without_any_signal_changes_nothing(
    make_policy: Callable[..., Policy], world: World
) -> None:
    rollouts = make_rollouts(4, teacher=False)
    policy = make_policy(teacher="ema")
    sums, signal = accumulate_gradients(
        policy, ALGORITHMS["sdpo"](), rollouts, config_with(99), world
    )
    assert not signal
    assert sums == {}
    assert not gradients(policy)
