"""The plan's counts against models that are really built, and its refusals."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cotutor.rollout.models import ModelError
from cotutor.trainer.algos.grpo import GRPO, GRPOConfig
from cotutor.trainer.algos.opcod import OPCoD, OPCoDConfig
from cotutor.trainer.config import Config, ConfigError, PolicyConfig, StudentConfig
from cotutor.trainer.plan import (
    Component,
    Rates,
    available_bytes,
    check_memory,
    measure_rates,
    memory_plan,
    model_sizes,
    peak_bytes,
    print_plan,
    time_plan,
)
from cotutor.trainer.preset import load_preset

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 2**30
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
    preset = Path(__file__).parents[2] / "configs" / "qwen3-8b-sciknoweval-2xh200.toml"
    config = load_preset(preset)
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


def test_papers_setting_fits_two_h200_and_not_one(paper: Config) -> None:
    h200 = int(139.8 * GIB)
    two = memory_plan(paper, opcod(paper), 2, CUDA)
    parts = {component.name: component.bytes for component in two}
    assert parts["weights, float32 shard"] == 2 * 8_190_735_360
    assert parts["Adam moments, float32"] == 4 * 8_190_735_360
    assert parts["teacher, float32 shard"] == 2 * 8_190_735_360
    assert parts["student's engine"] == parts["tutor's engine"] == 2 * 8_190_735_360
    check_memory(two, h200)
    one = memory_plan(paper, opcod(paper), 1, CUDA)
    with pytest.raises(ConfigError, match=r"needs \d+\.\d GiB .*change more ranks \(torchrun"):
        check_memory(one, h200)


def test_refusal_names_the_option_that_helps(paper: Config) -> None:
    policy = dataclasses.replace(paper.policy, micro_batch_tokens=131072)
    config = dataclasses.replace(paper, policy=policy)
    with pytest.raises(ConfigError, match=r"change --policy\.micro-batch-tokens"):
        check_memory(memory_plan(config, opcod(config), 2, CUDA), int(139.8 * GIB))
    engine = dataclasses.replace(paper.transformers, max_batch_tokens=1_000_000)
    config = dataclasses.replace(paper, transformers=engine)
    with pytest.raises(ConfigError, match=r"change --transformers\.max-batch-tokens"):
        check_memory(memory_plan(config, opcod(config), 2, CUDA), int(139.8 * GIB))


def test_algorithm_decides_what_is_held(paper: Config) -> None:
    grpo = memory_plan(paper, GRPO(GRPOConfig()), 2, CUDA)
    names = {component.name for component in grpo}
    assert "tutor's engine" not in names
    assert "teacher, float32 shard" not in names
    assert peak_bytes(grpo) < peak_bytes(memory_plan(paper, opcod(paper), 2, CUDA))
    current = OPCoD(dataclasses.replace(OPCoDConfig(), teacher="current"))
    names = {component.name for component in memory_plan(paper, current, 2, CUDA)}
    assert "teacher, float32 shard" not in names
    assert "tutor's engine" in names


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
    run = Config(students=students, policy=PolicyConfig(micro_batch_tokens=64))
    output = io.StringIO()
    print_plan(run, opcod(run), 1, CPU, Console(file=output, width=140))
    for component in memory_plan(run, opcod(run), 1, CPU):
        assert component.name in output.getvalue()
    assert "s a step" in output.getvalue()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json"]


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
