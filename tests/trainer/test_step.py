"""One optimizer step: the same gradient however the batch is cut and on however many ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


RANKS = """
import json, sys
from pathlib import Path
from test_step import ALGORITHMS, CASES, config_with, gradients, rollouts_for
from cotutor.trainer.config import OptimizerConfig, PolicyConfig, StudentConfig
from cotutor.trainer.policy import Policy
from cotutor.trainer.step import accumulate_gradients
from cotutor.trainer.world import World

world = World()
results = []
for name, split in CASES:
    algorithm = ALGORITHMS[name]()
    rollouts = rollouts_for(name)
    mine = rollouts[:split] if world.rank == 0 else rollouts[split:]
    policy = Policy(StudentConfig("s", sys.argv[2]), PolicyConfig(), OptimizerConfig(), world,
        teacher=algorithm.teacher, teacher_rate=0.05, seed=0)
    sums, _ = accumulate_gradients(policy, algorithm, mine, config_with(60), world)
    results.append([{k: v.tolist() for k, v in gradients(policy).items()}, sums["loss"]])
if world.main:
    Path(sys.argv[1]).write_text(json.dumps(results))
world.barrier()
world.close()
"""
# How many of 9 rollouts rank 0 has.
CASES = [("sdpo", 9), ("sdpo", 2), ("grpo", 7), ("sft", 3), ("rl2f with a world model", 7)]


@pytest.mark.distributed
def test_two_ranks_with_uneven_work_give_one_rank_s_gradient(
    make_policy: Callable[..., Policy],
    model_folder: Path,
    world: World,
    torchrun: Callable[..., Any],
) -> None:
    found = torchrun(RANKS, 2, str(model_folder))
    for (name, _), (two, two_loss) in zip(CASES, found, strict=True):
        algorithm = ALGORITHMS[name]()
        rollouts = rollouts_for(name)
        policy = make_policy(teacher=algorithm.teacher, activation_checkpointing=True)
        sums, _ = accumulate_gradients(policy, algorithm, rollouts, config_with(60), world)
        tensors = {k: torch.tensor(v) for k, v in two.items()}
        assert relative(tensors, gradients(policy)) < 1e-5
        assert two_loss == pytest.approx(sums["loss"], rel=1e-5)


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
