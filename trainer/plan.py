"""`--do plan`: what a step will take of each GPU's memory and of your time, without any weights.

Memory is memory.py's. Time is measured where the plan runs, so it is left out for another machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.config import Config
from cotutor.trainer.memory import (
    STAGES,
    Component,
    Machine,
    check_memory,
    longest_sequence,
    memory_plan,
    peak_bytes,
    planned_machine,
    plans_vllm,
    size,
    stage_bytes,
)
from cotutor.trainer.model_sizes import ModelSizes, model_sizes
from cotutor.trainer.policy import compute_dtype
from cotutor.trainer.progress import wide_console
from cotutor.trainer.world import mesh_shape

# Share of the measured matrix-multiplication rate that a training step reaches; an assumption.
_TRAIN_EFFICIENCY = 0.4


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
    """Print a step's memory, and its time on this machine. Raises ConfigError if it can't fit."""
    console = console or wide_console()
    machine = planned_machine(config, world_size, device)
    plan = memory_plan(config, algorithm, machine)
    _print_memory(config, plan, machine, console)
    if config.plan.gpus:
        console.print("time: measured only where the run will be (--plan.gpus 0)", markup=False)
    else:
        _print_time(config, algorithm, machine, console)
    check_memory(plan, machine.memory)
    _print_verdict(plan, machine, console)


def _print_memory(
    config: Config, plan: Sequence[Component], machine: Machine, console: Console
) -> None:
    replicate, shard = mesh_shape(config.parallel, machine.ranks)
    engine = "vLLM" if plans_vllm(config) else "transformers"
    where = f"memory of each of {machine.ranks} rank(s): {replicate} × {shard} sharded, {engine}"
    table = Table(title=where, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("component", "held", "size", "smaller by"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for when in ("always", *STAGES):
        for c in plan:
            if c.when == when:
                table.add_row(c.name, c.when, size(c.bytes), c.option)
    table.add_section()
    for stage, total in stage_bytes(plan).items():
        table.add_row("in all", stage, size(total))
    console.print(table)
    r = config.rollout
    console.print(
        f"longest sequences: {r.max_prompt_tokens:,} + {r.max_response_tokens:,} tokens (student),"
        f" {r.max_reprompt_tokens:,} + {r.max_response_tokens:,} tokens (teacher)",
        markup=False,
    )


def _print_verdict(plan: Sequence[Component], machine: Machine, console: Console) -> None:
    """One line: the peak, when it is, and what is left."""
    stages = stage_bytes(plan)
    peak = peak_bytes(plan)
    stage = max(stages, key=lambda when: stages[when])
    console.print(
        f"fits: at most {size(peak)} ({stage}) of {size(machine.memory)} on each"
        f" {machine.device.type} device; {size(machine.memory - peak)} left",
        markup=False,
    )


def memory_line(plan: Sequence[Component], machine: Machine) -> str:
    """What a run says of its memory when it starts."""
    stages = ", ".join(f"{stage} {size(total)}" for stage, total in stage_bytes(plan).items())
    caches = ", ".join(f"{c.name} {size(c.bytes)}" for c in plan if "cache" in c.name)
    return f"memory planned for each rank, of {size(machine.memory)}: {stages} · {caches}"


def _print_time(config: Config, algorithm: Algorithm, machine: Machine, console: Console) -> None:
    dtype = compute_dtype(config.policy, machine.device)
    rates = measure_rates(machine.device, dtype)
    sizes = [model_sizes(s.model) for s in config.students]
    seconds = time_plan(config, algorithm, sizes, machine.ranks, dtype.itemsize, rates)
    total = _short(sum(seconds.values()))
    parts = ", ".join(f"{name} {_short(value)}" for name, value in seconds.items())
    console.print(
        f"time: at most about {total} s a step ({parts}), if every text had its"
        f" maximum length, at this machine's {rates.flops / 1e12:.2f} TFLOP/s and"
        f" {rates.bytes / 1e9:.0f} GB/s; overheads are not counted",
        markup=False,
    )


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
