"""Ranks as a mesh: the gradient, norm, step, checkpoint and export of one rank, on every shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_rollouts
from test_step import ALGORITHMS, config_with, gradients, relative, rollouts_for
from transformers import AutoModelForCausalLM

from cotutor.trainer.config import ConfigError, ParallelConfig
from cotutor.trainer.policy import Policy
from cotutor.trainer.step import accumulate_gradients
from cotutor.trainer.world import World, mesh_shape

# How many of 9 rollouts the first rank has; the last one has the others, those between none.
CASES = [("sdpo", 9), ("sdpo", 2), ("grpo", 7), ("sft", 3), ("rl2f with a world model", 7)]
CLIP = 1e-4

RANKS = """
import json, sys
from pathlib import Path
import torch
from test_mesh import CASES, CLIP, train
from test_policy import NoTokenizer
from test_step import ALGORITHMS, config_with, gradients, rollouts_for
from cotutor.trainer.config import OptimizerConfig, ParallelConfig, PolicyConfig, StudentConfig
from cotutor.trainer.policy import Policy
from cotutor.trainer.step import accumulate_gradients
from cotutor.trainer.world import World

out, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
world = World(ParallelConfig(int(sys.argv[4]), int(sys.argv[5])))
assert world.mesh.size() == world.size


def policy_with(teacher):
    return Policy(StudentConfig("s", model), PolicyConfig(), OptimizerConfig(max_grad_norm=CLIP),
        world, teacher=teacher, teacher_rate=0.05, seed=0)


def mine(rollouts, split):
    parts = {0: rollouts[:split], world.size - 1: rollouts[split:]}
    return parts.get(world.rank, [])


cases = []
for name, split in CASES:
    algorithm = ALGORITHMS[name]()
    rollouts = mine(rollouts_for(name), split)
    policy = policy_with(algorithm.teacher)
    sums, _ = accumulate_gradients(policy, algorithm, rollouts, config_with(60), world)
    cases.append([{k: v.tolist() for k, v in gradients(policy).items()}, sums["loss"]])

policy = policy_with("ema")
norms = train(policy, world, [0, 1], lambda rollouts: mine(rollouts, 2))
policy.save(folder / "state")
policy.export(folder / "export", NoTokenizer())
train(policy, world, [2], lambda rollouts: mine(rollouts, 3))
resumed = policy_with("ema")
resumed.load(folder / "state")
train(resumed, world, [2], lambda rollouts: mine(rollouts, 3))
same = all(
    torch.equal(a.to_local(), b.to_local())
    for one, other in ((policy.student, resumed.student), (policy.teacher, resumed.teacher))
    for a, b in zip(one.parameters(), other.parameters(), strict=True)
)
same = all(world.gather(same))
if world.main:
    Path(out).write_text(json.dumps({"cases": cases, "norms": norms, "same": same}))
world.barrier()
world.close()
"""


def train(
    policy: Policy, world: World, seeds: list[int], mine: Callable[[Any], Any]
) -> list[tuple[float, float]]:
    """Norms before clipping, and of what the optimizer sees, of a step with each seed."""
    norms: list[tuple[float, float]] = []
    seen: list[float] = []
    step = policy.optimizer.step

    def watched() -> None:
        seen.append(sum(float(g.double().pow(2).sum()) for g in gradients(policy).values()) ** 0.5)
        step()

    policy.optimizer.step = watched  # type: ignore[method-assign, assignment]
    for seed in seeds:
        rollouts = mine(make_rollouts(5, teacher=True, seed=seed))
        accumulate_gradients(policy, ALGORITHMS["sdpo"](), rollouts, config_with(60), world)
        norm, skipped = policy.step(1e-3)
        assert not skipped
        norms.append((norm, seen[-1]))
    policy.optimizer.step = step  # type: ignore[method-assign]
    return norms


@pytest.mark.distributed
@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 1), (2, 2)])
def test_every_mesh_does_what_one_rank_does(
    replicate: int,
    shard: int,
    make_policy: Callable[..., Policy],
    model_folder: Path,
    world: World,
    torchrun: Callable[..., Any],
    tmp_path: Path,
) -> None:
    arguments = (str(model_folder), str(tmp_path), str(replicate), str(shard))
    found = torchrun(RANKS, replicate * shard, *arguments, timeout_s=400)
    for (name, _), (many, many_loss) in zip(CASES, found["cases"], strict=True):
        algorithm = ALGORITHMS[name]()
        rollouts = rollouts_for(name)
        policy = make_policy(teacher=algorithm.teacher, activation_checkpointing=True)
        sums, _ = accumulate_gradients(policy, algorithm, rollouts, config_with(60), world)
        tensors = {k: torch.tensor(v) for k, v in many.items()}
        assert relative(tensors, gradients(policy)) < 1e-5
        assert many_loss == pytest.approx(sums["loss"], rel=1e-5)

    alone = make_policy("ema")
    alone.max_grad_norm = CLIP
    norms = train(alone, world, [0, 1], lambda rollouts: rollouts)
    for (norm, clipped), (expected, _) in zip(found["norms"], norms, strict=True):
        assert norm > 10 * CLIP
        assert norm == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(CLIP, rel=2e-2)
    assert found["same"]  # resumed on the mesh, bit for bit

    # What the mesh wrote, read by one rank: the same weights and teacher as one rank's own.
    loaded = make_policy("ema")
    loaded.load(tmp_path / "state")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for name, value in loaded.full_tensors():
        assert torch.equal(exported[name], value), name
    assert loaded.teacher is not None
    assert alone.teacher is not None
    for one, other in ((loaded.student, alone.student), (loaded.teacher, alone.teacher)):
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            # Two Adam steps of 1e-3: rounding in the gradient moves where it is all but 0.
            difference = (p.full_tensor() - q.full_tensor()).abs()  # type: ignore[attr-defined]
            assert difference.mean() < 1e-6, name


@pytest.mark.parametrize(
    ("asked", "ranks", "shape"),
    [
        ((0, 0), 8, (1, 8)),
        ((2, 0), 8, (2, 4)),
        ((0, 2), 8, (4, 2)),
        ((2, 4), 8, (2, 4)),
        ((8, 1), 8, (8, 1)),
    ],
)
def test_mesh_shapes(asked: tuple[int, int], ranks: int, shape: tuple[int, int]) -> None:
    assert mesh_shape(ParallelConfig(*asked), ranks) == shape


@pytest.mark.parametrize("asked", [(3, 0), (0, 3), (2, 2), (16, 0), (0, 16), (16, 16)])
def test_a_mesh_that_does_not_suit_the_ranks(asked: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"--parallel\.replicate .* the 8 rank\(s\)"):
        mesh_shape(ParallelConfig(*asked), 8)
