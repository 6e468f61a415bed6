"""The real vLLM engine, always in child processes: log-probs, hand-overs, process."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, tiny_qwen3

from cotutor.rollout.engine import Sampling
from cotutor.rollout.engine_process import ProcessEngine

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
ROOT = Path(__file__).resolve().parents[2]
HEAD_DIM = 32  # the CPU wheel's attention knows no smaller one
# 6 ids of the vocabulary are padding.
OPTIONS: dict[str, Any] = {
    "eos_ids": [3, 5],
    "vocab_size": VOCABULARY - 6,
    "max_model_tokens": 160,
    "kv_cache_bytes": 1 << 26,
    "dtype": torch.float32,
}

HAND_OVERS = """
import json, sys
from pathlib import Path
import torch
from test_engine_vllm import OPTIONS
from cotutor.rollout.engine import Sampling
from cotutor.rollout.engine_vllm import VLLMEngine
from cotutor.trainer.config import OptimizerConfig, PolicyConfig, StudentConfig
from cotutor.trainer.policy import Policy
from cotutor.trainer.world import World


class NoTokenizer:
    def save_pretrained(self, folder): pass


def trainers_logprobs(policy, prompt, ids, temperature):
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)

    def function(hidden, weight):
        logprobs = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]

    with torch.no_grad():
        return policy.score(torch.tensor([prompt + ids]), rows, function)


def furthest(policy, engine, prompts, temperature):
    done = engine.generate(prompts, Sampling(temperature, 1.0, 20), list(range(len(prompts))))
    distances = []
    for prompt, completion in zip(prompts, done, strict=True):
        expected = trainers_logprobs(policy, prompt, completion.ids, temperature)
        distances.append(float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return max(distances)


world = World()
found = {"furthest": [], "equal": [], "changed": [], "versions": []}
# Longer than a block of the prefix cache; the same ones before and after each hand-over.
prompts = [[(7 * n + i) % 50 + 6 for i in range(70)] for n in range(3)]
greedy = Sampling(0.0, 1.0, 12)
for model in sys.argv[2:]:
    policy = Policy(StudentConfig("s", model), PolicyConfig(), OptimizerConfig(), world,
        teacher=None, teacher_rate=0.0, seed=0, vocab_size=OPTIONS["vocab_size"])
    engine = VLLMEngine(model, stale=True, **OPTIONS)
    for n in range(4):
        policy.end_of_step()
        with torch.no_grad():
            for i, p in enumerate(policy.student.parameters()):
                torch.manual_seed(100 * n + i)
                p.to_local().add_(0.05 * torch.randn_like(p.to_local()))
        engine.load_weights(policy.full_tensors())
        for temperature in (0.7, 1.0):
            found["furthest"].append(furthest(policy, engine, prompts, temperature))
        if n == 0:
            before = engine.generate(prompts, greedy, [0] * 3)
            continue
        after = engine.generate(prompts, greedy, [0] * 3)
        found["changed"].append(after != before)
        before = after
        folder = Path(sys.argv[1]).parent / f"export-{Path(model).name}-{n}"
        policy.export(folder, NoTokenizer())
        fresh = VLLMEngine(str(folder), **OPTIONS)
        found["equal"].append(after == fresh.generate(prompts, greedy, [0] * 3))
        fresh.close()
    found["versions"].append(engine.version)
    # The test can fail: without emptying the prefix cache, the same comparison shows it.
    policy.end_of_step()
    with torch.no_grad():
        for p in policy.student.parameters():
            p.mul_(1.1)
    engine._llm.reset_prefix_cache = lambda: True
    engine.load_weights(policy.full_tensors())
    found.setdefault("stale cache", []).append(furthest(policy, engine, prompts, 1.0))
    engine.close()
    policy.end_of_step()
every = world.gather(found)
if world.main:
    Path(sys.argv[1]).write_text(json.dumps(every))
world.barrier()
world.close()
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_hand_overs_on_two_ranks(torchrun: Callable[..., Any], tmp_path: Path) -> None:
    models = [
        tiny_qwen3(tmp_path / name, tied=name == "tied", head_dim=HEAD_DIM)
        for name in ("tied", "untied")
    ]
    for found in torchrun(HAND_OVERS, 2, *map(str, models), timeout_s=500):
        assert len(found["furthest"]) == 16
        assert max(found["furthest"]) < 1e-5
        assert found["equal"] == [True] * 6
        assert found["changed"] == [True] * 6
        assert found["versions"] == [4, 4]
        assert min(found["stale cache"]) > 1e-3


REQUESTS = """
import json, sys
from pathlib import Path
import torch
from test_engine_vllm import OPTIONS
from cotutor.rollout.engine import Sampling
from cotutor.rollout.engine_vllm import VLLMEngine
from cotutor.rollout.models import ModelError, load_model

model = load_model(sys.argv[2], dtype=torch.float32)
V = OPTIONS["vocab_size"]
with torch.no_grad():
    model.lm_head.weight[V:] = 50 * model.lm_head.weight[:1]  # would win half of the time
weights = {k: v.clone() for k, v in model.state_dict().items()}
torch.manual_seed(3)
torch.set_num_threads(2)
before = torch.get_rng_state()
engine = VLLMEngine(sys.argv[2], stale=True, **OPTIONS)
found = {"generator": torch.equal(before, torch.get_rng_state())}
found["threads"] = torch.get_num_threads()
torch.set_num_threads(1)
found["threads can be set"] = torch.get_num_threads() == 1


def refused(name, call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        found[name] = f"{type(error).__name__}: {error}"


def generate(prompts=([1, 2],), sampling=Sampling(max_tokens=20), seeds=None):
    return engine.generate(prompts, sampling, list(range(len(prompts))) if seeds is None else seeds)


refused("never loaded", generate)
for name, bad in {
    "unknown": {**weights, "extra": torch.zeros(1)},
    "left out": {k: v for k, v in weights.items() if "k_proj" not in k},
    "shape": {**weights, "model.norm.weight": torch.zeros(3)},
}.items():
    refused(name, lambda: engine.load_weights(bad.items()))
    refused(f"after {name}", generate)
engine.load_weights(weights.items())
many = generate([[1, 2]] * 50)
found["largest"] = max(max(c.ids) for c in many)
stopped = [c for c in many if c.finish_reason == "stop"]
found["ends"] = sorted({c.ids[-1] for c in stopped})
found["inside"] = sum(i in (3, 5) for c in many for i in c.ids[:-1])
found["lengths"] = sorted({len(c.ids) for c in many if c.finish_reason == "length"})
found["log-probs"] = all(len(c.ids) == len(c.logprobs) for c in many)
one = generate([[1, 2]] * 3, seeds=[7, 8, 7])
found["seeds"] = [one[0].ids == one[2].ids, one[0].ids == one[1].ids]
found["alone"] = generate([[1, 2]], seeds=[8])[0].ids == one[1].ids
greedy = generate(sampling=Sampling(0.0, 1.0, 6))[0]
ids = [1, 2]
for _ in greedy.ids:
    with torch.no_grad():
        ids.append(int(model(torch.tensor([ids])).logits[0, -1, :V].argmax()))
found["greedy"] = [greedy.ids == ids[2:], greedy.logprobs == [0.0] * len(greedy.ids)]
found["none"] = generate([], seeds=[])
refused("empty", lambda: generate([[]]))
refused("too long", lambda: generate([[1] * 141]))
long = [[(n + i * i) % 50 + 6 for i in range(140)] for n in range(80)]  # more than one batch
found["long"] = len(generate(long, Sampling(max_tokens=3)))
refused("seeds missing", lambda: generate([[1]], seeds=[]))
engine.sleep(1)
refused("asleep", generate)
refused("loading asleep", lambda: engine.load_weights(weights.items()))
engine.wake()
found["awake"] = generate(seeds=[8])[0].ids == one[1].ids
engine.sleep(2)
engine.wake()
refused("dropped", generate)
engine.load_weights({k: v * torch.nan for k, v in weights.items()}.items())
refused("broken", generate)
engine.close()
refused("closed", generate)
refused("too many", lambda: VLLMEngine(sys.argv[2], **{**OPTIONS, "max_model_tokens": 10**6}))
Path(sys.argv[1]).write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_requests(torchrun: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", head_dim=HEAD_DIM)
    found = torchrun(REQUESTS, 1, str(model), timeout_s=300)
    assert found["generator"]
    assert found["threads"] == 2
    assert found["threads can be set"]
    assert "without complete weights" in found["never loaded"]
    assert "no weight 'extra'" in found["unknown"]
    assert "2 weights were not loaded" in found["left out"]
    assert "'model.norm.weight' is (32,)" in found["shape"]
    for name in ("unknown", "left out", "shape"):
        assert found[name].startswith("ValueError")
        assert "without complete weights" in found[f"after {name}"]
    assert found["largest"] < OPTIONS["vocab_size"]
    assert found["ends"] == [3, 5]
    assert found["inside"] == 0
    assert found["lengths"] == [20]
    assert found["log-probs"]
    assert found["seeds"] == [True, False]
    assert found["alone"]
    assert found["greedy"] == [True, True]
    assert found["none"] == []
    assert "without tokens" in found["empty"]
    assert "141 tokens and up to 20" in found["too long"]
    assert found["long"] == 80
    assert "as many seeds" in found["seeds missing"]
    assert "asleep (level 1)" in found["asleep"]
    assert "asleep (level 1)" in found["loading asleep"]
    assert found["awake"]
    assert "without complete weights" in found["dropped"]
    assert "not finite" in found["broken"]
    assert "closed" in found["closed"]
    assert "reads at most" in found["too many"]


@pytest.fixture
def tutor_engine(tmp_path: Path) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(
        "the tutor engine of s2",
        start_timeout_s=200,
        step_timeout_s=40,
        model=str(tiny_qwen3(tmp_path / "model", head_dim=HEAD_DIM)),
        **OPTIONS,
    )
    yield engine
    engine.close()


@pytest.mark.slow
def test_an_engine_in_its_own_process(tutor_engine: ProcessEngine) -> None:
    sampling = Sampling(max_tokens=5)
    done = tutor_engine.generate([[1, 2], [8]], sampling, [0, 1])
    assert [len(c.ids) for c in done] == [len(c.logprobs) for c in done]
    tutor_engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        tutor_engine.generate([[1]], sampling, [0])
    tutor_engine.wake()
    assert tutor_engine.generate([[1, 2], [8]], sampling, [0, 1]) == done
    with pytest.raises(RuntimeError, match="keeps its first weights"):
        tutor_engine.load_weights([])
    # Stopped, it is as silent as one that hangs.
    tutor_engine._step_timeout_s = 3
    os.kill(tutor_engine.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"tutor engine of s2 \(process \d+\) gave no sign of"):
        tutor_engine.generate([[1]], sampling, [0])
    assert not running(tutor_engine.pid)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie, after a moment to end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


NO_HAND_OVER = """
import sys
from cotutor.rollout.engine_vllm import VLLMEngine
from cotutor.trainer.main import main

load_weights = VLLMEngine.load_weights


def once(self, weights):
    if self.version == 0:
        load_weights(self, weights)
    else:
        list(weights)
        self._state.end_load()


VLLMEngine.load_weights = once
sys.exit(main(sys.argv[1:]))
"""


def start_run(out: Path, *arguments: str, script: str = "trainer/main.py") -> Any:
    """A small OPCoD run of the embedded specialists on vLLM."""
    command = [sys.executable, script, "--algo", "opcod", "--out", str(out), "--engine", "vllm"]
    options = {
        "baselines": "none",
        "steps": 3,
        "opcod.rounds": 1,
        "opcod.gate": "always",
        "data.test-problems-per-domain": 1,
        "data.validation-problems-per-domain": 1,
        "rollout.questions-per-step": 2,
        "rollout.samples-per-question": 4,
        "evaluation.samples": 1,
        "evaluation.validation-samples": 1,
        "vllm.student-kv-cache-gb": 0.1,
    }
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_without_the_hand_over_the_canary_stops_the_run(tmp_path: Path) -> None:
    script = tmp_path / "no_hand_over.py"
    script.write_text(NO_HAND_OVER)
    run = start_run(tmp_path / "run", "--opcod.lr", "1e-2", script=str(script))
    _, err = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "canary: engine and trainer disagree on step 1's rollouts" in err
    assert "stale" in err


def engine_process(run: Any) -> int:
    """The id of the run's tutor engine, once it has answered for a step."""
    deadline = time.monotonic() + 250
    for line in run.stdout:
        assert time.monotonic() < deadline
        if line.startswith("step 1/"):
            break
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    found = [c for c in children if "engine_process" in Path(f"/proc/{c}/cmdline").read_text()]
    assert len(found) == 1, run.communicate()[1][-3000:]
    return int(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_trainer_and_tutor_engine_die_together(victim: str, tmp_path: Path) -> None:
    run = start_run(tmp_path / "run", "--steps", "500", "--vllm.tutor-process", "own")
    engine = engine_process(run)
    if victim == "trainer":
        run.kill()
        run.communicate(timeout=60)
    else:
        os.kill(engine, signal.SIGKILL)
        _, err = run.communicate(timeout=60)
        assert run.returncode == 1
        assert f"the tutor engine of s2 on rank 0 (process {engine}) ended (signal 9)" in err
    assert not running(engine)
