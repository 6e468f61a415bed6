"""The plan's counts against models that are really built, and its refusals."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_mistakes import write_rows
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cotutor.rollout.models import ModelError
from cotutor.trainer.algos.grpo import GRPO, GRPOConfig
from cotutor.trainer.algos.opcod import OPCoD, OPCoDConfig
from cotutor.trainer.algos.rl2f import RL2F
from cotutor.trainer.config import (
    Config,
    ConfigError,
    ParallelConfig,
    PlanConfig,
    PolicyConfig,
    StudentConfig,
    VLLMConfig,
)
from cotutor.trainer.memory import (
    Component,
    KVCaches,
    Machine,
    available_bytes,
    check_memory,
    kv_caches,
    memory_plan,
    peak_bytes,
    stage_bytes,
)
from cotutor.trainer.model_sizes import model_sizes
from cotutor.trainer.plan import Rates, measure_rates, memory_line, print_plan, time_plan
from cotutor.trainer.preset import load_preset

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
H200 = 141 * 10**9
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3-8b")
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(folder)


@pytest.fixture(scope="module")
def paper(qwen: str) -> Config:
    config = load_preset(ROOT / "configs" / "qwen3-8b-sciknoweval-2xh200.toml")
    students = tuple(dataclasses.replace(s, model=qwen) for s in config.students)
    return dataclasses.replace(config, students=students)


def opcod(config: Config) -> OPCoD:
    return OPCoD(config.opcod)


@pytest.mark.parametrize("tied", [False, True])
def test_counts_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    config = Qwen3Config(**SMALL, head_dim=16, num_hidden_layers=3, tie_word_embeddings=tied)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    model = Qwen3ForCausalLM(config)
    sizes = model_sizes(str(tmp_path), lora_rank=8)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for p in model.model.layers.parameters())
    assert sizes.root == sizes.parameters - layers
    assert sizes.layer == layers // 3
    cache = model(torch.zeros(1, 5, dtype=torch.int64), use_cache=True).past_key_values
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert sizes.kv == cached // 5


def test_lora_parameters_are_those_that_the_policy_adds(tmp_path: Path) -> None:
    from cotutor.trainer.policy import _add_lora

    config = LlamaConfig(**SMALL, num_hidden_layers=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    _add_lora(model, PolicyConfig(lora_rank=8), seed=0)
    added = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model_sizes(str(tmp_path), lora_rank=8).lora == added


@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [(Qwen3Config, Qwen3ForCausalLM), (LlamaConfig, LlamaForCausalLM)],
)
def test_activations_of_a_layer_are_what_autograd_keeps(
    tmp_path: Path, config_class: Any, model_class: Any
) -> None:
    tokens = 64

    def kept(layers: int) -> float:
        model = model_class(config_class(**SMALL, head_dim=16, num_hidden_layers=layers))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        assert hidden.requires_grad
        return sum(s.nbytes() for s in storages.values()) / 4 / tokens

    config = config_class(**SMALL, head_dim=16, num_hidden_layers=2)
    config.architectures = [model_class.__name__]
    config.save_pretrained(tmp_path)
    measured = kept(3) - kept(2)
    assert measured <= model_sizes(str(tmp_path)).layer_activations <= 1.3 * measured


def with_engine(config: Config, engine: Any) -> Config:
    return dataclasses.replace(config, engine=engine)


def h200s(ranks: int) -> Machine:
    return Machine(ranks, CUDA, H200)


def test_papers_setting_fits_two_h200_and_not_one(paper: Config) -> None:
    config = with_engine(paper, "vllm")
    two = memory_plan(config, opcod(config), h200s(2))
    parts = {component.name: component.bytes for component in two}
    p, kv = 8_190_735_360, 2 * 36 * 8 * 128
    assert parts["weights, float32 shard"] == parts["teacher, float32 shard"] == 2 * p
    assert parts["Adam moments, float32"] == 4 * p
    assert parts["student's engine"] == parts["tutor's engine"] == 2 * p
    assert parts["activations kept of 16,384 tokens"] == 36 * 16384 * 4096 * 2
    check_memory(two, H200)
    # Each cache holds at least a few sequences of full length, and leaves the margin alone.
    caches = kv_caches(config, opcod(config), h200s(2))
    assert parts["student's key-value cache"] == caches.student > 8 * (2048 + 4096) * kv * 2
    assert parts["tutor's key-value cache"] == caches.tutor > 8 * (2048 + 4096 + 1024) * kv * 2
    assert max(stage_bytes(two).values()) < 0.93 * H200
    one = memory_plan(config, opcod(config), h200s(1))
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GB .*change more ranks \(torchrun"):
        check_memory(one, H200)
    copies = dataclasses.replace(config, parallel=ParallelConfig(replicate=2))
    whole = memory_plan(copies, opcod(config), h200s(2))
    assert _held(whole) > 1.9 * _held(two)
    with pytest.raises(ConfigError, match=r"change --parallel\.replicate 1"):
        check_memory(whole, H200)
    many = dataclasses.replace(config, parallel=ParallelConfig(replicate=4))
    assert _held(memory_plan(many, opcod(config), h200s(8))) == _held(two)


def _held(plan: list[Component]) -> int:
    return sum(c.bytes for c in plan if c.option and c.when == "always")


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_engines_sleep_on_a_gpu_alone(paper: Config, engine: str) -> None:
    config = with_engine(paper, engine)
    when = {c.name: c.when for c in memory_plan(config, opcod(config), h200s(2))}
    assert (when["student's engine"], when["tutor's engine"]) == ("generate", "feedback")
    third = dataclasses.replace(config.students[0], name="third")
    three = dataclasses.replace(config, students=(*config.students, third))
    plan = memory_plan(three, opcod(config), h200s(2))
    assert sum(c.name == "tutor's engine" for c in plan) == 1  # they are asked one by one
    cpu = Machine(2, CPU, 400 * 10**9)
    held = [c.name for c in memory_plan(three, opcod(config), cpu) if c.when == "always"]
    assert held.count("student's engine") == 1
    assert held.count("tutor's engine") == 2
    assert "what engines hold asleep" not in held
    # The paper's set-up would not fit if the engines stood beside the training.
    sleeping = sum(
        c.bytes
        for c in memory_plan(config, opcod(config), h200s(2))
        if c.name in ("student's engine", "tutor's engine")
    )
    train = stage_bytes(memory_plan(config, opcod(config), h200s(2)))["train"]
    assert train < 0.93 * H200 < train + sleeping


def test_caches_are_what_a_step_can_fill_or_what_is_left(paper: Config) -> None:
    config, machine = with_engine(paper, "vllm"), h200s(2)
    few = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, questions_per_step=2)
    )
    token = 2 * 36 * 8 * 128 * 2
    filled = KVCaches(8 * 6144 * token, 8 * 7168 * token)  # above the least, which is one reprompt
    assert kv_caches(few, opcod(config), machine) == filled
    larger = kv_caches(config, opcod(config), machine)
    smaller = kv_caches(config, opcod(config), Machine(2, CUDA, H200 - 10**10))
    lost = 0.9 * 0.93 * 10**10
    assert larger.student - smaller.student == pytest.approx(lost, rel=1e-6)
    assert larger.tutor - smaller.tutor == pytest.approx(lost, rel=1e-6)
    chosen = dataclasses.replace(config, vllm=VLLMConfig(student_kv_cache_gb=20.0))
    assert kv_caches(chosen, opcod(config), machine) == KVCaches(20 * 10**9, larger.tutor)
    assert kv_caches(config, GRPO(GRPOConfig()), machine).tutor == 0
    # A CPU's engines never sleep: both caches stand beside the training.
    cpu = Machine(2, CPU, 400 * 10**9)
    plan = memory_plan(config, opcod(config), cpu)
    when = {c.name: c.when for c in plan}
    assert when["student's key-value cache"] == when["tutor's key-value cache"] == "always"
    check_memory(plan, cpu.memory)
    # Written out, as a run does for its engines, they stay what they are.
    least = kv_caches(few, opcod(config), Machine(2, CUDA, 10**9))
    written = VLLMConfig(least.student / 1e9, least.tutor / 1e9)
    again = kv_caches(dataclasses.replace(config, vllm=written), opcod(config), machine)
    assert again == least


def test_a_cache_that_holds_no_sequence_or_too_much_is_refused(paper: Config) -> None:
    tiny = dataclasses.replace(paper, vllm=VLLMConfig(tutor_kv_cache_gb=0.1))
    with pytest.raises(ConfigError, match=r"--vllm\.tutor-kv-cache-gb 0\.1 must be at least 2\.13"):
        kv_caches(tiny, opcod(paper), h200s(2))
    huge = dataclasses.replace(paper, engine="vllm", vllm=VLLMConfig(student_kv_cache_gb=90.0))
    with pytest.raises(ConfigError, match=r"change --vllm\.student-kv-cache-gb"):
        check_memory(memory_plan(huge, opcod(paper), h200s(2)), H200)


def test_refusal_names_the_option_that_helps(paper: Config) -> None:
    policy = dataclasses.replace(paper.policy, micro_batch_tokens=131072)
    config = dataclasses.replace(with_engine(paper, "vllm"), policy=policy)
    with pytest.raises(ConfigError, match=r"change --policy\.micro-batch-tokens"):
        check_memory(memory_plan(config, opcod(config), h200s(2)), H200)
    engine = dataclasses.replace(paper.transformers, max_batch_tokens=1_000_000)
    config = dataclasses.replace(with_engine(paper, "transformers"), transformers=engine)
    with pytest.raises(ConfigError, match=r"change --transformers\.max-batch-tokens"):
        check_memory(memory_plan(config, opcod(config), h200s(2)), H200)


def test_algorithm_decides_what_is_held(paper: Config) -> None:
    machine = h200s(2)
    for engine in ("vllm", "transformers"):
        config = with_engine(paper, engine)
        grpo = memory_plan(config, GRPO(GRPOConfig()), machine)
        names = {component.name for component in grpo}
        assert "tutor's engine" not in names
        assert "teacher, float32 shard" not in names
        held = stage_bytes(memory_plan(config, opcod(config), machine))
        assert stage_bytes(grpo)["train"] < held["train"]
        current = OPCoD(dataclasses.replace(OPCoDConfig(), teacher="current"))
        names = {component.name for component in memory_plan(config, current, machine)}
        assert "teacher, float32 shard" not in names
        assert "tutor's engine" in names


def test_a_dialogue_s_frozen_guide_stands_beside_the_student(paper: Config) -> None:
    for engine in ("vllm", "transformers"):
        config = dataclasses.replace(with_engine(paper, engine), algo="rl2f")
        dialogue = dataclasses.replace(config.dialogue, max_dialogue_tokens=20_000)
        config = dataclasses.replace(config, dialogue=dialogue)
        plans = {}
        for teacher in ("self", "frozen"):
            algorithm = RL2F(dataclasses.replace(config.rl2f, teacher=teacher))
            plans[teacher] = memory_plan(config, algorithm, h200s(2))
            names = [(c.name, c.when) for c in plans[teacher]]
            assert (("tutor's engine", "generate") in names) == (teacher == "frozen")
            assert any(c.name == "activations kept of 20,000 tokens" for c in plans[teacher])
            check_memory(plans[teacher], H200)
        found = {name: stage_bytes(plan)["generate"] for name, plan in plans.items()}
        if engine == "transformers":  # vLLM's caches take what is left, with or without a guide
            assert found["frozen"] == found["self"] + 2 * 8_190_735_360


def test_peak_is_what_is_held_and_the_largest_stage() -> None:
    plan = [
        Component("a", 5, "always"),
        Component("b", 7, "generate"),
        Component("c", 4, "train"),
        Component("d", 4, "train"),
        Component("e", 1, "optimizer"),
    ]
    assert peak_bytes(plan) == 13


def test_time_follows_the_stated_formula(paper: Config, qwen: str) -> None:
    sizes = [model_sizes(qwen)]
    rates = Rates(flops=8e14, bytes=4e12)
    seconds = time_plan(paper, opcod(paper), sizes, 2, 2, rates)
    tokens = 8 * (2048 + 4096) + 2 * (10240 + 4096)
    assert seconds["train"] == pytest.approx(128 * tokens * 8_190_735_360 / (0.4 * 8e14))
    rows = 65536 // (2048 + 4096)
    read = 2 * (8_190_735_360 + rows * (2048 + 2048) * 73_728) / 4e12
    prefill = 2 * 8_190_735_360 * 2048 * 128 / 8e14
    assert seconds["generate"] == pytest.approx(13 * 4096 * read + prefill)
    assert set(seconds) == {"train", "generate", "feedback"}


def test_printed_plan_has_every_component_and_needs_no_weights(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, num_hidden_layers=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    students = tuple(StudentConfig(name, str(tmp_path)) for name in "ab")
    for engine in ("vllm", "transformers"):
        run = with_engine(
            Config(students=students, policy=PolicyConfig(micro_batch_tokens=64)), engine
        )
        output = io.StringIO()
        print_plan(run, opcod(run), 1, CPU, Console(file=output, width=140))
        for component in memory_plan(run, opcod(run), Machine(1, CPU, available_bytes(CPU))):
            assert component.name in output.getvalue()
        assert "s a step" in output.getvalue()
        assert "fits: at most" in output.getvalue()
        machine = Machine(1, CPU, available_bytes(CPU))
        line = memory_line(memory_plan(run, opcod(run), machine), machine)
        assert re.match(r"memory planned .*: generate \d.*, optimizer \d.* · .*key-value", line)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json"]


@pytest.mark.slow
def test_the_paper_s_plan_is_made_anywhere(tmp_path: Path) -> None:
    """The preset names its two H200s: no GPU and no weights are needed to see that it fits."""
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "configs/tiny/s1" / name, folder)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    for domain in ("physics", "chemistry"):
        (tmp_path / "sciknoweval" / domain).mkdir(parents=True)
        write_rows(tmp_path / f"sciknoweval/{domain}/train.json", 40, of=domain)
        write_rows(tmp_path / f"sciknoweval/{domain}/test.json", 1, of=f"unseen {domain}")
    command = [sys.executable, "trainer/main.py", "--do", "plan", "--data.root", str(tmp_path)]
    command += ["--config", "configs/qwen3-8b-sciknoweval-2xh200.toml"]
    command += [f"--students.{n}.model={folder}" for n in range(2)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    for name in (
        "weights, float32 shard", "gradients, float32 shard", "Adam moments", "teacher, float32",
        "student's engine", "tutor's engine", "student's key-value cache",
        "tutor's key-value cache", "activations kept of 16,384 tokens", "logits chunk of 2,048",
        "10,240 + 4,096 tokens (teacher)",
    ):  # fmt: skip
        assert name in out
    fits = re.search(r"fits: at most ([\d.]+) GB \(\w+\) of 141\.0 GB .*; ([\d.]+) GB left", out)
    assert fits
    assert float(fits[1]) + float(fits[2]) == pytest.approx(141, abs=0.11)
    assert float(fits[2]) > 0.07 * 141


def test_a_named_machine_that_is_too_small_is_refused(paper: Config) -> None:
    config = dataclasses.replace(paper, do="plan", plan=PlanConfig(2, 80.0))
    output = io.StringIO()
    with pytest.raises(ConfigError, match=r"plan: .* of 80\.0 GB are usable; .*change"):
        print_plan(config, opcod(config), 1, CPU, Console(file=output, width=140))
    assert "memory of each of 2 rank(s): 1 × 2 sharded, vLLM" in output.getvalue()
    assert "fits" not in output.getvalue()


def test_measured_rates_and_memory_are_this_machines() -> None:
    rates = measure_rates(CPU, torch.float32)
    assert 1e8 < rates.flops < 1e15
    assert 1e8 < rates.bytes < 1e14
    assert GIB // 4 < available_bytes(CPU) < 2**50


def test_absent_or_unreadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        model_sizes(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"its config\.json can't be used"):
        model_sizes(str(tmp_path))
