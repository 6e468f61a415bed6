"""`--do plan`: what a step will take of each GPU's memory and of your time, without any weights.

Only `config.json` of each model is read. P is the number of parameters, W the number of ranks, b
the bytes of a number in the compute dtype. Memory that is held all the time, and the largest of
what generating, training and the optimizer take besides it, must fit together.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cotutor.kernels.common import choose_chunk_rows
from cotutor.rollout.models import ModelError, locate
from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.config import Config, ConfigError
from cotutor.trainer.policy import compute_dtype
from cotutor.trainer.progress import wide_console

# What a caching allocator loses to fragments, and a CUDA context with its libraries.
_USABLE_SHARE = 0.93
# The engine's cache grows by half when it is full.
_KV_GROWTH = 1.5
# Share of the measured matrix-multiplication rate that a training step reaches; an assumption.
_TRAIN_EFFICIENCY = 0.4


@dataclass(frozen=True)
class ModelSizes:
    """What the estimates need of one architecture; counts are numbers, not bytes.

    `root` are the parameters outside the layers (embedding and head), `layer` those of the largest
    layer, `lora` those that a LoRA of the configured rank adds, `kv` numbers cached per token.
    """

    parameters: int
    root: int
    layer: int
    layers: int
    lora: int
    hidden: int
    vocab: int
    kv: int
    layer_activations: int  # numbers that a layer's backward pass needs, per token


class Component(NamedTuple):
    """One row of the plan: `option` is what makes it smaller, "" if nothing of its own does."""

    name: str
    bytes: int
    when: Literal["always", "generate", "train", "optimizer"]
    option: str = ""


def model_sizes(model: str, lora_rank: int = 0) -> ModelSizes:
    """Count an architecture from its config.json alone. Raises ModelError that names the folder."""
    folder, kwargs = locate(model)
    try:
        config = AutoConfig.from_pretrained(folder, **kwargs)
        with torch.device("meta"):
            net: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model {model}: its config.json can't be used ({reason})") from error
    layers = net.get_decoder().layers
    in_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in net.parameters())
    linear = [m for m in layers.modules() if isinstance(m, nn.Linear)]
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return ModelSizes(
        parameters=total,
        root=total - sum(in_layers),
        layer=max(in_layers),
        layers=len(layers),
        lora=lora_rank * sum(m.in_features + m.out_features for m in linear),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        kv=2 * len(layers) * kv_heads * head,
        # Residuals and norms (in float32 too), projections before and after the rotation, attention
        # output, and the four tensors of a gated MLP.
        layer_activations=8 * config.hidden_size
        + 3 * (heads + 2 * kv_heads) * head
        + 4 * config.intermediate_size,
    )


def memory_plan(
    config: Config, algorithm: Algorithm, world_size: int, device: torch.device
) -> list[Component]:
    """The bytes of each component on one rank, in the phase of the student that needs most."""
    sizes = [model_sizes(s.model, config.policy.lora_rank) for s in config.students]
    plans = []
    for student in sizes:
        tutors = [s for s in sizes if s is not student] if algorithm.feedback else []
        plans.append(_phase(config, algorithm, student, tutors, world_size, device))
    return max(plans, key=peak_bytes)


def _phase(
    config: Config,
    algorithm: Algorithm,
    student: ModelSizes,
    tutors: Sequence[ModelSizes],
    world_size: int,
    device: torch.device,
) -> list[Component]:
    b = compute_dtype(config.policy, device).itemsize
    full, lora = student.parameters, student.lora
    trained = lora or full
    teacher = algorithm.teacher in ("ema", "initial", "trust_region")
    shard = "more ranks (torchrun --nproc-per-node), or --policy.lora-rank 8"
    plan = [
        Component("weights, float32 shard", 4 * (full + lora) // world_size, "always", shard),
        Component("Adam moments, float32", 8 * trained // world_size, "always", shard),
    ]
    if teacher:
        size = 4 * (full + lora) // world_size
        plan.append(Component("teacher, float32 shard", size, "always", shard))
    if algorithm.on_policy:
        plan += _engines(config, student, tutors, b)
    return plan + _training(config, student, trained // world_size, teacher, b, device)


def _engines(
    config: Config, student: ModelSizes, tutors: Sequence[ModelSizes], b: int
) -> list[Component]:
    r = config.rollout
    budget = config.transformers.max_batch_tokens
    option = "--transformers.max-batch-tokens"
    # A row of a batch has a row of logits, its probabilities and their sorted copy, in float32.
    rows = max(1, budget // (r.max_prompt_tokens + r.max_response_tokens))
    cache = max(s.kv for s in (student, *tutors))
    plan = [Component("student's engine", b * student.parameters, "always")]
    plan += [Component("tutor's engine", b * tutor.parameters, "always") for tutor in tutors]
    return [
        *plan,
        Component("key-value cache", int(_KV_GROWTH * budget * cache * b), "generate", option),
        Component("sampling", 4 * 3 * rows * student.vocab, "generate", option),
    ]


def _training(
    config: Config,
    student: ModelSizes,
    trained_shard: int,
    teacher: bool,
    b: int,
    device: torch.device,
) -> list[Component]:
    tokens = max(config.policy.micro_batch_tokens, longest_sequence(config))
    longest = longest_sequence(config) >= config.policy.micro_batch_tokens
    option = "--rollout.max-reprompt-tokens" if longest else "--policy.micro-batch-tokens"
    one_layer = tokens * student.layer_activations * b
    kept = student.layers * (
        tokens * student.hidden * b if config.policy.activation_checkpointing else one_layer
    )
    sides = 1 + teacher
    chunk = choose_chunk_rows(
        "plan", config.policy.logits_chunk_rows or None, tokens, student.vocab, device
    )
    head_gradient = 0 if student.lora else 4 * student.vocab * student.hidden
    gathered = b * (sides * student.root + 2 * student.layer) + 4 * student.layer
    return [
        Component("gathered weights and gradients", gathered, "train"),
        Component("gradients, float32 shard", 4 * trained_shard, "train", "--policy.lora-rank"),
        Component("activations kept", kept, "train", option),
        Component("one layer's backward", int(1.5 * one_layer), "train", option),
        Component("LM head's gradient, float32", 2 * head_gradient, "train", "--policy.lora-rank"),
        Component(
            "logits chunk", 4 * sides * chunk * student.vocab, "train", "--policy.logits-chunk-rows"
        ),
        Component("optimizer's gradients and temporaries", 8 * trained_shard, "optimizer"),
    ]


def longest_sequence(config: Config) -> int:
    """Tokens of the longest sequence of a step: the teacher's reprompt and the response."""
    r = config.rollout
    return max(r.max_prompt_tokens, r.max_reprompt_tokens) + r.max_response_tokens


def peak_bytes(plan: Sequence[Component]) -> int:
    """What is held all the time, and the largest of what the stages take besides it."""
    return _sum(plan, "always") + max(_sum(plan, w) for w in ("generate", "train", "optimizer"))


def _sum(plan: Sequence[Component], when: str) -> int:
    return sum(c.bytes for c in plan if c.when == when)


def check_memory(plan: Sequence[Component], available: int) -> None:
    """Refuse what can't fit. Raises ConfigError that names the option of the largest part.

    `available` is the memory of one GPU (or one rank's share of the machine's) in bytes.
    """
    peak = peak_bytes(plan)
    if peak <= _USABLE_SHARE * available:
        return
    stage = max(("generate", "train", "optimizer"), key=lambda when: _sum(plan, when))
    rest = _USABLE_SHARE * available - _sum(plan, "always")
    # Resident memory that leaves no room can't be helped by what a stage takes.
    helps = ("always",) if rest < 0.05 * available else (stage,)
    parts = [c for c in plan if c.when in helps and c.option]
    largest = max(parts or [c for c in plan if c.option], key=lambda c: c.bytes)
    raise ConfigError(
        f"plan: a step needs {_size(peak)} and {_size(_USABLE_SHARE * available)} of"
        f" {_size(available)} are usable; {largest.name} takes {_size(largest.bytes)}:"
        f" change {largest.option}"
    )


def available_bytes(device: torch.device) -> int:
    """The memory of this rank's GPU, or its share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Rates(NamedTuple):
    """Floating-point operations and bytes copied per second, both measured on the device."""

    flops: float
    bytes: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """About a second of matrix products and copies on the device."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 27), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    product = _seconds(lambda: a @ a, device)
    copy = _seconds(lambda: target.copy_(source), device)
    return Rates(2 * n**3 / product, 2 * source.numel() / copy)


def _seconds(function: Any, device: torch.device) -> float:
    """The best of at least three repetitions, within half a second after a warm-up."""
    function()
    times: list[float] = []
    while len(times) < 3 or sum(times) < 0.5:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def time_plan(
    config: Config,
    algorithm: Algorithm,
    sizes: Sequence[ModelSizes],
    world_size: int,
    b: int,
    rates: Rates,
) -> dict[str, float]:
    """Seconds of a step's stages if every text had its maximum length; rough, no overheads.

    Generating reads all weights (b P bytes) and the cache once per token and batch, and multiplies
    2 P per token; training multiplies 6 P per token, 8 P with checkpointing, the teacher 2 P.
    """
    r = config.rollout
    student = max(sizes, key=lambda s: s.parameters)
    n = math.ceil(r.questions_per_step / world_size) * r.samples_per_question

    def generate(prompt: int, response: int) -> float:
        rows = max(1, min(n, config.transformers.max_batch_tokens // (prompt + response)))
        read = b * (student.parameters + rows * (prompt + response / 2) * student.kv)
        token = max(read / rates.bytes, 2 * student.parameters * rows / rates.flops)
        prefill = 2 * student.parameters * prompt * n / rates.flops
        return math.ceil(n / rows) * response * token + prefill

    passes = 8 if config.policy.activation_checkpointing else 6
    tokens = passes * (r.max_prompt_tokens + r.max_response_tokens)
    if algorithm.teacher is not None:
        tokens += 2 * longest_sequence(config)
    seconds = {
        "train": n * tokens * student.parameters / (_TRAIN_EFFICIENCY * rates.flops),
    }
    if algorithm.on_policy:
        seconds["generate"] = generate(r.max_prompt_tokens, r.max_response_tokens)
    if algorithm.feedback:
        asked = r.max_prompt_tokens + r.max_response_tokens
        seconds["feedback"] = generate(asked, r.max_feedback_tokens)
    return seconds


def print_plan(
    config: Config,
    algorithm: Algorithm,
    world_size: int,
    device: torch.device,
    console: Console | None = None,
) -> None:
    """Print memory and time of a step on this machine. Raises ConfigError if it can't fit."""
    console = console or wide_console()
    plan = memory_plan(config, algorithm, world_size, device)
    where = f"memory of each of {world_size} rank(s)"
    table = Table(title=where, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("component", "held", "size", "smaller by"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for component in plan:
        table.add_row(component.name, component.when, _size(component.bytes), component.option)
    available = available_bytes(device)
    table.add_row(
        "peak", "", _size(peak_bytes(plan)), f"of {_size(available)} on this {device.type}"
    )
    console.print(table)
    dtype = compute_dtype(config.policy, device)
    rates = measure_rates(device, dtype)
    sizes = [model_sizes(s.model) for s in config.students]
    seconds = time_plan(config, algorithm, sizes, world_size, dtype.itemsize, rates)
    total = _short(sum(seconds.values()))
    parts = ", ".join(f"{name} {_short(value)}" for name, value in seconds.items())
    console.print(
        f"time: at most about {total} s a step ({parts}), if every text had its"
        f" maximum length, at this machine's {rates.flops / 1e12:.2f} TFLOP/s and"
        f" {rates.bytes / 1e9:.0f} GB/s; overheads are not counted",
        markup=False,
    )
    check_memory(plan, available)


def _size(number: float) -> str:
    unit, name = (2**30, "GiB") if number >= 2**30 else (2**20, "MiB")
    return f"{number / unit:.1f} {name}"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
