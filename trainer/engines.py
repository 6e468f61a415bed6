"""Which engine serves a student's weights, and with what memory and budgets."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AutoConfig, GenerationConfig

from cotutor.rollout.engine import Engine
from cotutor.rollout.engine_process import ProcessEngine
from cotutor.rollout.engine_transformers import TransformersEngine
from cotutor.rollout.engine_vllm import VLLMEngine, why_not
from cotutor.rollout.models import is_folder, load_model
from cotutor.trainer.algos.base import Algorithm
from cotutor.trainer.config import Config, ConfigError
from cotutor.trainer.memory import kv_caches, longest_request, planned_machine
from cotutor.trainer.policy import compute_dtype
from cotutor.trainer.world import World

if TYPE_CHECKING:
    from cotutor.trainer.students import Student

# "student": its weights are handed over before it samples. "tutor": frozen, beside a student's.
# "evaluated": frozen and alone.
Role = Literal["student", "tutor", "evaluated"]

_START_TIMEOUT_S = 900.0


def choose_engine(config: Config) -> tuple[Literal["transformers", "vllm"], str]:
    """The engine to use, and why in a few words.

    Raises ConfigError: `--engine vllm` where vLLM can't be used.
    """
    if config.engine == "transformers":
        return "transformers", "as configured"
    reason = why_not()
    if not reason:
        return "vllm", "as configured" if config.engine == "vllm" else "it is installed"
    if config.engine == "vllm":
        raise ConfigError(
            f"--engine vllm: {reason}; `make vllm` installs it (README, Engines), or use --engine"
            " transformers"
        )
    return "transformers", reason


def plan_caches(config: Config, algorithm: Algorithm, world: World) -> Config:
    """The configuration with the sizes of vLLM's key-value caches, as the memory plan has them.

    Raises ConfigError or ModelError.
    """
    samples = algorithm.on_policy or config.do != "train"
    if config.engine != "vllm" or not samples:
        return config
    machine = planned_machine(config, world.size, world.device)
    caches = kv_caches(config, algorithm, machine)
    sizes = dataclasses.replace(
        config.vllm,
        student_kv_cache_gb=caches.student / 1e9,
        tutor_kv_cache_gb=caches.tutor / 1e9,
    )
    return dataclasses.replace(config, vllm=sizes)


def start_engine(
    student: Student, model_path: str, config: Config, world: World, role: Role
) -> Engine:
    """An engine that serves the weights of `model_path`; collective."""
    seed = config.seed if student.config.random_init else None
    dtype = compute_dtype(config.policy, world.device)
    if config.engine == "vllm":
        return _start_vllm(student, model_path, config, world, role, dtype, seed)
    model = load_model(model_path, dtype=dtype, random_init_seed=seed)
    return TransformersEngine(
        model.to(world.device),
        eos_ids=student.chat.eos_ids(getattr(model, "generation_config", None)),
        vocab_size=len(student.tokenizer),
        max_batch_tokens=config.transformers.max_batch_tokens,
        device=world.device,
    )


def _start_vllm(
    student: Student,
    model_path: str,
    config: Config,
    world: World,
    role: Role,
    dtype: torch.dtype,
    seed: int | None,
) -> Engine:
    v = config.vllm
    cache_gb = v.tutor_kv_cache_gb if role == "tutor" else v.student_kv_cache_gb
    with _folder(student, model_path, config, world, seed) as folder:
        options: dict[str, Any] = {
            "model": folder,
            "eos_ids": sorted(student.chat.eos_ids(_generation_config(folder))),
            "vocab_size": len(student.tokenizer),
            "max_model_tokens": longest_request(config),
            "kv_cache_bytes": round(1e9 * cache_gb),
            "dtype": dtype,
            "device": str(world.device),
        }
        if role == "tutor" and in_own_process(config, world.device):
            return ProcessEngine(
                f"the tutor engine of {student.name} on rank {world.rank}",
                start_timeout_s=_START_TIMEOUT_S,
                step_timeout_s=config.vllm.step_timeout_s,
                **options,
            )
        return VLLMEngine(**options, can_sleep=role == "student", stale=role == "student")


def in_own_process(config: Config, device: torch.device) -> bool:
    """Whether tutors' engines get processes of their own."""
    if config.vllm.tutor_process == "auto":
        return device.type == "cuda"
    return config.vllm.tutor_process == "own"


@contextmanager
def _folder(
    student: Student, model_path: str, config: Config, world: World, seed: int | None
) -> Iterator[str]:
    """The model as a folder that vLLM reads: a copy where it is none, or weights are drawn."""
    if is_folder(model_path) and seed is None:
        yield model_path
        return
    # In the run folder, which all nodes see; transformers writes on the first rank only.
    copy = Path(config.out) / f"copy-of-{student.name}"
    if world.main:
        dtype = compute_dtype(config.policy, world.device)
        load_model(model_path, dtype=dtype, random_init_seed=seed).save_pretrained(copy)
    world.barrier()
    try:
        yield str(copy)
    finally:
        world.barrier()
        if world.main:
            shutil.rmtree(copy)


def _generation_config(folder: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def release(engine: Engine) -> None:
    """Close an engine and give its memory back."""
    engine.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
