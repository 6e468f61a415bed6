"""One optimizer step: the same gradient however the batch is cut and on however many ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from conftest import make_dialogues, make_rollouts

from cotutor.rollout.trajectory import Trajectory
from cotutor.trainer.algos.grpo import GRPO, GRPOConfig
from cotutor.trainer.algos.rl2f import RL2F, RL2FConfig
from cotutor.trainer.algos.sdpo import SDPO, SDPOConfig
from cotutor.trainer.algos.sft import SFT, SFTConfig
from cotutor.trainer.config import Config, PolicyConfig
from cotutor.trainer.policy import Policy
from cotutor.trainer.step import accumulate_gradients
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
        results.append((gradients(policy), sums["loss"]))
    full, full_loss = results[0]
    for other, loss in results[1:]:
        assert relative(other, full) < 1e-5
        assert loss == pytest.approx(full_loss, rel=1e-5)


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
