"""A tiny random Qwen3, problems without a tokenizer, and runs under torchrun."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotutor.rollout.trajectory import Problem, Trajectory
from cotutor.trainer.config import OptimizerConfig, PolicyConfig, StudentConfig
from cotutor.trainer.policy import Policy
from cotutor.trainer.world import World

VOCABULARY = 61


def tiny_qwen3(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    head_dim: int = 16,
    window: int | None = None,
) -> Path:
    """A random two-layer Qwen3 model folder without a tokenizer; layer 2 may slide a window."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    w = World()
    yield w
    w.close()


@pytest.fixture
def make_policy(model_folder: Path, world: World) -> Callable[..., Policy]:
    def make(teacher: Any = None, model: Path = model_folder, **config: Any) -> Policy:
        return Policy(
            StudentConfig(name="s", model=str(model)),
            PolicyConfig(**{"activation_checkpointing": False, **config}),
            OptimizerConfig(),
            world,
            teacher=teacher,
            teacher_rate=0.05,
            seed=0,
        )

    return make


def make_rollouts(n: int, *, teacher: bool, seed: int = 0) -> list[Trajectory]:
    """`n` rollouts of random ids with very uneven lengths."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    rollouts = []
    for i in range(n):
        problem = Problem(key=f"p{i}", domain="d", question="", gold="", kind="text")
        rollout = Trajectory.start(problem, 0, ids(rng.randint(1, 9)))
        length = rng.choice([1, 2, 3, 17])
        rollout.append("student", ids(length), [-rng.random() * 5 for _ in range(length)])
        rollout.advantage = rng.uniform(-1, 1)
        if teacher:
            rollout.teacher_prompt_ids = ids(rng.randint(1, 20))
        rollouts.append(rollout)
    return rollouts


def make_dialogues(n: int, *, seed: int = 0) -> list[Trajectory]:
    """`make_rollouts` that go on for up to three more turns; every third has no advantage."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    dialogues = make_rollouts(n, teacher=False, seed=seed)
    for number, dialogue in enumerate(dialogues):
        if number % 3 == 0:
            dialogue.advantage = 0.0
        for _ in range(rng.randrange(4)):
            dialogue.append("glue", ids(2))
            dialogue.append("teacher", ids(rng.randint(1, 6)))
            dialogue.append("glue", ids(3))
            length = rng.randint(1, 8)
            dialogue.append("student", ids(length), [-rng.random() * 5 for _ in range(length)])
    return dialogues


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., Any]:
    """Run a Python source text on `ranks` gloo ranks; it may write JSON to the path in argv[1]."""

    def run(source: str, ranks: int, *arguments: str, timeout_s: float = 180) -> Any:
        script, out = tmp_path / "script.py", tmp_path / "out.json"
        script.write_text(source)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(script), str(out), *arguments]
        paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        path = os.pathsep.join(filter(None, paths))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(out.read_text())

    return run
