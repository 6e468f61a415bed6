"""Whole runs through the command line, with two random models: stop, kill, resume, two ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cotutor.rollout.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random students with the embedded tokenizer."""
    folders = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("student")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=build_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=len(tokenizer) + 3,  # a padded head, as real models have
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
        folders.append(folder)
    return folders


@pytest.fixture
def start(models: list[Path]) -> Start:
    """Start a small OPCoD run; random models earn no reward, so plain feedback is the signal."""

    def run(
        out: Path,
        *arguments: str,
        ranks: int = 1,
        script: str = "trainer/main.py",
        launch: tuple[str, ...] = ("--standalone",),
    ) -> subprocess.Popen[str]:
        torchrun = ["-m", "torch.distributed.run", *launch, "--nproc-per-node", str(ranks)]
        several = ranks > 1 or "--nnodes" in launch
        command = [sys.executable, *(torchrun if several else []), script]
        command += ["--algo", "opcod", "--out", str(out), "--baselines", "none"]
        for n, model in enumerate(models):
            command += [f"--students.{n}.model", str(model)]
        options = {
            "steps": 3,
            "opcod.rounds": 1,
            "opcod.gate": "always",
            "opcod.feedback": "plain",
            "data.test-problems-per-domain": 13,
            "data.validation-problems-per-domain": 3,
            "rollout.questions-per-step": 3,
            "rollout.samples-per-question": 2,
            "rollout.max-response-tokens": 8,
            "rollout.max-feedback-tokens": 6,
            "evaluation.samples": 1,
            "evaluation.validation-samples": 1,
            "checkpoint.every-steps": 2,
            "policy.micro-batch-tokens": 200,
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return run


def finish(process: subprocess.Popen[str], timeout_s: float = 200) -> str:
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err[-3000:]
    return out


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The records without what a clock measured."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if not k.startswith("seconds/")} for r in records]


def steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def wait_for_steps(process: subprocess.Popen[str], folder: Path, n: int) -> None:
    deadline = time.monotonic() + 150
    while steps(folder) < n:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_same_run(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    for name in ("rollouts/*.jsonl", "models/*/*/*.safetensors"):
        files = sorted(p.relative_to(a) for p in a.glob(name))
        assert files
        assert files == sorted(p.relative_to(b) for p in b.glob(name))
        for file in files:
            assert (a / file).read_bytes() == (b / file).read_bytes(), file


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "straight"


def test_a_run_trains_and_leaves_everything(start: Start, straight: Path) -> None:
    out = finish(start(straight))
    assert "mutual Pareto improvement: " in out
    records = metrics(straight)
    trained = [r for r in records if r["kind"] == "step"]
    assert [(r["step"], r["student"]) for r in trained] == [
        (n, student) for n, student in enumerate(["s1"] * 3 + ["s2"] * 3)
    ]
    for r in trained:
        assert r["grad_norm"] > 0
        assert not r["skipped"]
        assert r["canary_mean_abs_diff"] < 1e-5
        assert r["feedback/asked"] == 6
    assert {r["kind"] for r in records} == {"data", "evaluation", "gate", "step"}
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["steps"] == 6
    assert set(summary["students"]) == {"s1", "s2"}
    assert set(summary["students"]["s1"]["coins"]) >= {"start", "end", "blind_start", "blind_end"}
    assert (straight / "report.html").stat().st_size > 1000
    line = json.loads((straight / "rollouts/step_000000.jsonl").read_text().splitlines()[0])
    assert line["feedback"]["tutor"] == "s2"
    assert [t["trained"] for t in line["turns"]] == [False, True]


def test_a_killed_run_resumes_to_the_same_bits(
    start: Start, straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    for n in (1, 3, 5):  # before the first checkpoint, at the end of a phase, inside the next
        process = start(folder, *(["--resume", "auto"] if n > 1 else []))
        wait_for_steps(process, folder, n)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(folder, "--resume", "auto"))
    assert_same_run(straight, folder)


def test_sigterm_saves_and_exits_0(start: Start, straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    process = start(folder)
    wait_for_steps(process, folder, 1)
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert "--resume auto" in out
    assert 0 < steps(folder) < 6
    finish(start(folder, "--resume", "auto"))
    assert_same_run(straight, folder)


@pytest.mark.distributed
def test_two_ranks_with_uneven_work_finish(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    finish(start(folder, "--steps", "1", ranks=2))
    trained = [r for r in metrics(folder) if r["kind"] == "step"]
    assert [r["rollouts"] for r in trained] == [6, 6]
    assert all(r["grad_norm"] > 0 for r in trained)
    rollouts = (folder / "rollouts/step_000000.jsonl").read_text().splitlines()
    seen = [(r["problem"], r["sample"]) for r in map(json.loads, rollouts)]
    assert len(set(seen)) == 6
    # 13 test problems of each domain on two ranks: every one once.
    tested = [r for r in metrics(folder) if r["kind"] == "evaluation" and r["set"] == "test"]
    assert {a["problems"] for r in tested for a in r["accuracy"].values()} == {13}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_nodes_do_what_one_does(start: Start, tmp_path: Path) -> None:
    """A group of the mesh on each node: the same bits as two groups on one node."""
    arguments = ("--steps", "1", "--parallel.replicate", "2")
    finish(start(tmp_path / "one", *arguments, ranks=2), 400)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    nodes = [
        start(
            tmp_path / "two",
            *arguments,
            launch=("--nnodes", "2", "--node-rank", str(n), *rendezvous, "--rdzv-id", "cotutor"),
        )
        for n in range(2)
    ]
    told = [finish(node, 400) for node in nodes]
    assert sum("mutual Pareto improvement: " in out for out in told) == 1
    assert sum(r["kind"] == "step" for r in metrics(tmp_path / "two")) == 2
    assert_same_run(tmp_path / "one", tmp_path / "two")


FAILING = """
import sys
from cotutor.rollout.engine_transformers import TransformersEngine
from cotutor.trainer.main import main
import os

generate = TransformersEngine.generate


def failing(self, prompts, sampling, seeds):
    if os.environ["RANK"] == "1" and sampling.temperature == 1.0:
        raise RuntimeError("the engine broke")
    return generate(self, prompts, sampling, seeds)


TransformersEngine.generate = failing
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.distributed
def test_a_rank_that_fails_ends_them_all(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    began = time.monotonic()
    process = start(tmp_path / "run", "--steps", "1", ranks=2, script=str(script))
    _, err = process.communicate(timeout=170)
    assert process.returncode == 1
    assert "error: rank 1: the engine broke" in err
    assert time.monotonic() - began < 160  # start-up on a busy machine included


def test_a_resumed_run_keeps_its_configuration(start: Start, straight: Path) -> None:
    process = start(straight, "--resume", "auto", "--opcod.k", "7")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert err.startswith("error: --resume: ")
    assert "--opcod.k 100" in err or "--opcod.k 16" in err
    assert err.count("\n") == 1
