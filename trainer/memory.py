"""What a step takes of each GPU's memory, counted from the models' config.json alone.

P is the number of parameters, S the number of ranks that share one copy, b the bytes of a number in
the compute dtype. Memory that is held all the time, and the largest of what the stages (generating,
feedback, training, the optimizer) take besides it, must fit together. The vLLM engines' key-value
caches take what the other parts leave: `kv_caches` is the one place that says how much.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from cotutor.kernels.common import choose_chunk_rows
from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.config import Config, ConfigError
from cotutor.trainer.model_sizes import ModelSizes, model_sizes
from cotutor.trainer.policy import compute_dtype
from cotutor.trainer.world import mesh_shape

# What a caching allocator loses to fragments, and a CUDA context with its libraries.
_USABLE_SHARE = 0.93
# The transformers engine's cache grows by half when it is full.
_KV_GROWTH = 1.5
# vLLM: share of the free memory that a cache gets at most; the rest is for what isn't counted.
_KV_SHARE = 0.9
# vLLM: what an engine holds on a GPU even asleep (CUDA graphs, communicators, the context of the
# tutor's process), and the tokens of one of its forward passes. Both are assumptions.
_ENGINE_RESIDUE = 2 * 10**9
_ENGINE_BATCH_TOKENS = 16384

Stage = Literal["always", "generate", "feedback", "train", "optimizer"]
STAGES: tuple[Stage, ...] = ("generate", "feedback", "train", "optimizer")


class Component(NamedTuple):
    """One row of the plan: `option` is what makes it smaller, "" if nothing of its own does."""

    name: str
    bytes: int
    when: Stage
    option: str = ""


class Machine(NamedTuple):
    """What a plan is made for: the ranks in all, their device, and the bytes that each one has."""

    ranks: int
    device: torch.device
    memory: int


class KVCaches(NamedTuple):
    """Bytes of key-value cache that each engine of a rank gets."""

    student: int
    tutor: int


class _Phase(NamedTuple):
    """One student's phase: `parts` is all that is held but the vLLM engines' caches.

    `tutors` are the models in other engines; `stages` say when the student's and theirs are awake.
    """

    student: ModelSizes
    tutors: list[ModelSizes]
    stages: tuple[Stage, Stage]
    parts: list[Component]


def planned_machine(config: Config, world_size: int, device: torch.device) -> Machine:
    """The machine that the configuration names for `--do plan`, or this one."""
    if config.do == "plan" and config.plan.gpus:
        memory = int(config.plan.gpu_memory_gb * 10**9)
        return Machine(config.plan.gpus, torch.device("cuda"), memory)
    return Machine(world_size, device, available_bytes(device))


def plans_vllm(config: Config) -> bool:
    """`auto` takes vLLM where it is installed; a machine that is only named has the extra `gpu`."""
    if config.engine != "auto":
        return config.engine == "vllm"
    named = config.do == "plan" and config.plan.gpus > 0
    return named or importlib.util.find_spec("vllm") is not None


def memory_plan(config: Config, algorithm: Algorithm, machine: Machine) -> list[Component]:
    """The bytes of each component on one rank, in the phase of the student that needs most."""
    phases = _phases(config, algorithm, machine)
    plans = [phase.parts for phase in phases]
    if algorithm.on_policy and plans_vllm(config):
        caches = _caches(config, phases, machine)
        for phase in phases:
            student, tutor = phase.stages
            option = "--vllm.student-kv-cache-gb"
            phase.parts.append(
                Component("student's key-value cache", caches.student, student, option)
            )
            option = "--vllm.tutor-kv-cache-gb"
            phase.parts.extend(
                Component("tutor's key-value cache", caches.tutor, tutor, option)
                for _ in _awake(phase.tutors, machine)
            )
    return max(plans, key=peak_bytes)


def kv_caches(config: Config, algorithm: Algorithm, machine: Machine) -> KVCaches:
    """The vLLM engines' key-value caches, in every phase the same.

    `--vllm.*-kv-cache-gb`, or 0: as much as a step's sequences of full length can fill, and at most
    _KV_SHARE of what the other parts leave. Raises ConfigError if one sequence wouldn't fit.
    """
    return _caches(config, _phases(config, algorithm, machine), machine)


def _caches(config: Config, phases: Sequence[_Phase], machine: Machine) -> KVCaches:
    b = compute_dtype(config.policy, machine.device).itemsize
    n = _sequences(config, machine.ranks)
    r = config.rollout
    longest = r.max_prompt_tokens + r.max_response_tokens
    if config.algo == "rl2f":
        longest = config.dialogue.max_dialogue_tokens
    least, found = KVCaches(0, 0), []
    for student, tutors, stages, parts in phases:
        kv = KVCaches(b * student.kv, b * max((t.kv for t in tutors), default=0))
        # vLLM doesn't start with less. A block has at most 128 tokens, and one is never used.
        tokens = (math.ceil(longest_request(config) / 128) + 1) * 128
        one = KVCaches(*(tokens * each for each in kv))
        least = KVCaches(*map(max, least, one))
        wanted = (n * longest * kv.student, n * (longest + r.max_feedback_tokens) * kv.tutor)
        rooms = [int(_KV_SHARE * room) for room in _rooms(parts, wanted, stages, machine)]
        found.append(KVCaches(*map(max, one, map(min, wanted, rooms))))
    chosen = (config.vllm.student_kv_cache_gb, config.vllm.tutor_kv_cache_gb)
    options = ("--vllm.student-kv-cache-gb", "--vllm.tutor-kv-cache-gb")
    for gb, bytes_, option in zip(chosen, least, options, strict=True):
        if 0 < round(gb * 10**9) < bytes_:
            raise ConfigError(
                f"{option} {gb} must be at least {bytes_ / 10**9:.3g}: a sequence of full length"
                " would not fit"
            )
    return KVCaches(
        round(chosen[0] * 10**9) or min(c.student for c in found),
        round(chosen[1] * 10**9) or min(c.tutor for c in found),
    )


def _rooms(
    parts: Sequence[Component],
    wanted: Sequence[int],
    stages: tuple[Stage, Stage],
    machine: Machine,
) -> tuple[float, float]:
    """Bytes that the other parts leave to the student's and to the tutor's cache."""
    usable = _USABLE_SHARE * machine.memory
    totals = stage_bytes(parts)
    student, tutor = stages
    if student != tutor:
        return usable - totals[student], usable - totals[tutor]
    room = usable - totals.get(student, peak_bytes(parts))
    share = wanted[0] / sum(wanted)
    return share * room, (1 - share) * room


def longest_request(config: Config) -> int:
    """Tokens of the longest prompt that an engine is given, with what is sampled after it."""
    r, d = config.rollout, config.dialogue
    single = r.max_reprompt_tokens + max(r.max_response_tokens, r.max_feedback_tokens)
    dialogue = max(r.max_reprompt_tokens + d.max_guidance_tokens, d.max_dialogue_tokens)
    if config.algo == "rl2f":
        return dialogue
    return max(single, dialogue) if d.evaluate else single


def _sequences(config: Config, ranks: int) -> int:
    """A step's rollouts on the rank that has most."""
    r = config.rollout
    return math.ceil(r.questions_per_step / ranks) * r.samples_per_question


def _engine_stages(algorithm: Algorithm, machine: Machine) -> tuple[Stage, Stage]:
    """When the student's and the others' engines are awake: on a GPU only while they write.

    The guide of a dialogue replies in turn with the student, so both are awake.
    """
    if machine.device.type != "cuda":
        return "always", "always"
    return "generate", "generate" if algorithm.guide == "frozen" else "feedback"


def _awake(tutors: Sequence[ModelSizes], machine: Machine) -> Sequence[ModelSizes]:
    """Tutors that are awake together: on a GPU one after the other, so the largest counts."""
    if machine.device.type != "cuda":
        return tutors
    return sorted(tutors, key=lambda t: t.parameters)[-1:]


def _phases(config: Config, algorithm: Algorithm, machine: Machine) -> list[_Phase]:
    """Each student's phase. Raises ModelError or ConfigError."""
    sizes = [model_sizes(s.model, config.policy.lora_rank) for s in config.students]
    replicate, shard = mesh_shape(config.parallel, machine.ranks)
    b = compute_dtype(config.policy, machine.device).itemsize
    option = "more ranks (torchrun --nproc-per-node), or --policy.lora-rank 8"
    option = "--parallel.replicate 1" if replicate > 1 else option
    teacher = algorithm.teacher in ("ema", "initial", "trust_region")
    phases = []
    for n, student in enumerate(sizes):
        tutors = sizes[:n] + sizes[n + 1 :] if algorithm.feedback else []
        tutors += [student] if algorithm.guide == "frozen" else []
        stages = _engine_stages(algorithm, machine)
        whole = student.parameters + student.lora
        trained = (student.lora or student.parameters) // shard
        parts = [
            Component("weights, float32 shard", 4 * whole // shard, "always", option),
            Component("Adam moments, float32", 8 * trained, "always", option),
        ]
        if teacher:
            parts.append(Component("teacher, float32 shard", 4 * whole // shard, "always", option))
        if algorithm.on_policy and plans_vllm(config):
            parts += _vllm_engines(config, student, tutors, stages, b, machine)
        elif algorithm.on_policy:
            parts += _transformers_engines(config, student, tutors, stages, b, machine)
        parts += _training(config, student, trained, teacher, b, machine.device)
        phases.append(_Phase(student, tutors, stages, parts))
    return phases


def _vllm_engines(
    config: Config,
    student: ModelSizes,
    tutors: Sequence[ModelSizes],
    stages: tuple[Stage, Stage],
    b: int,
    machine: Machine,
) -> list[Component]:
    parts = []
    engines = [("student", student, stages[0])]
    engines += [("tutor", t, stages[1]) for t in _awake(tutors, machine)]
    for name, model, when in engines:
        # One layer at work, and the logits of a step, their probabilities and a sorted copy.
        work = b * _ENGINE_BATCH_TOKENS * model.layer_activations
        work += 4 * 3 * _sequences(config, machine.ranks) * model.vocab
        parts.append(Component(f"{name}'s engine", b * model.parameters, when))
        parts.append(Component(f"{name}'s engine at work", work, when))
    if machine.device.type == "cuda":
        residue = _ENGINE_RESIDUE * (1 + len(tutors))
        parts.append(Component("what engines hold asleep", residue, "always"))
    return parts


def _transformers_engines(
    config: Config,
    student: ModelSizes,
    tutors: Sequence[ModelSizes],
    stages: tuple[Stage, Stage],
    b: int,
    machine: Machine,
) -> list[Component]:
    r = config.rollout
    budget = config.transformers.max_batch_tokens
    option = "--transformers.max-batch-tokens"
    # A row of a batch has a row of logits, its probabilities and their sorted copy, in float32.
    rows = max(1, budget // (r.max_prompt_tokens + r.max_response_tokens))
    parts = [Component("student's engine", b * student.parameters, stages[0])]
    parts += [
        Component("tutor's engine", b * t.parameters, stages[1]) for t in _awake(tutors, machine)
    ]
    # A cache lives no longer than a call: the guide's is never beside the student's.
    writing: list[tuple[Stage, Sequence[ModelSizes]]] = [("generate", [student])]
    if stages[1] != "generate":
        writing.append(("feedback", tutors))
    for stage, models in writing:
        if models:
            cache = int(_KV_GROWTH * budget * max(m.kv for m in models) * b)
            logits = 4 * 3 * rows * max(m.vocab for m in models)
            parts.append(Component("key-value cache", cache, stage, option))
            parts.append(Component("sampling", logits, stage, option))
    return parts


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
    option = "--policy.micro-batch-tokens"
    if longest:
        dialogue = config.algo == "rl2f"
        option = "--dialogue.max-dialogue-tokens" if dialogue else "--rollout.max-reprompt-tokens"
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
        Component(f"activations kept of {tokens:,} tokens", kept, "train", option),
        Component("one layer's backward", int(1.5 * one_layer), "train", option),
        Component("LM head's gradient, float32", 2 * head_gradient, "train", "--policy.lora-rank"),
        Component(
            f"logits chunk of {chunk:,} rows",
            4 * sides * chunk * student.vocab,
            "train",
            "--policy.logits-chunk-rows",
        ),
        Component("optimizer's gradients and temporaries", 8 * trained_shard, "optimizer"),
    ]


def longest_sequence(config: Config) -> int:
    """Tokens of a step's longest sequence: the teacher's reprompt and response, or a dialogue."""
    r = config.rollout
    if config.algo == "rl2f":
        return config.dialogue.max_dialogue_tokens
    return max(r.max_prompt_tokens, r.max_reprompt_tokens) + r.max_response_tokens


def peak_bytes(plan: Sequence[Component]) -> int:
    """What is held all the time, and the largest of what the stages take besides it."""
    return max(stage_bytes(plan).values())


def stage_bytes(plan: Sequence[Component]) -> dict[Stage, int]:
    """What each stage needs in all: its own and what is always held."""
    return {when: _sum(plan, "always") + _sum(plan, when) for when in STAGES}


def _sum(plan: Sequence[Component], when: Stage) -> int:
    return sum(c.bytes for c in plan if c.when == when)


def check_memory(plan: Sequence[Component], available: int) -> None:
    """Refuse what can't fit. Raises ConfigError that names the option of the largest part.

    `available` is the memory of one GPU (or one rank's share of the machine's) in bytes.
    """
    peak = peak_bytes(plan)
    if peak <= _USABLE_SHARE * available:
        return
    stage = max(STAGES, key=lambda when: _sum(plan, when))
    rest = _USABLE_SHARE * available - _sum(plan, "always")
    # Resident memory that leaves no room can't be helped by what a stage takes.
    helps = "always" if rest < 0.05 * available else stage
    parts = [c for c in plan if c.when == helps and c.option]
    largest = max(parts or [c for c in plan if c.option], key=lambda c: c.bytes)
    raise ConfigError(
        f"plan: a step needs {size(peak)} and {size(_USABLE_SHARE * available)} of"
        f" {size(available)} are usable; {largest.name} takes {size(largest.bytes)}:"
        f" change {largest.option}"
    )


def available_bytes(device: torch.device) -> int:
    """The memory of this rank's GPU, or its share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def size(number: float) -> str:
    """Bytes as text, in GB (10⁹ bytes) or MB, as machines are sold."""
    unit, name = (10**9, "GB") if number >= 10**9 else (10**6, "MB")
    return f"{number / unit:.1f} {name}"
