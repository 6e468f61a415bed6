"""What a configuration must not say, told before anything is loaded."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import torch

from cotutor.trainer.config import Config, ConfigError


def check(config: Config) -> None:
    """Refuse impossible combinations. Raises ConfigError that names the option."""
    _check_numbers(config)
    _check_names(config)
    _check_machine(config)
    r, d = config.rollout, config.data
    if config.resume not in ("", "auto") and not (Path(config.resume) / "checkpoints").is_dir():
        raise ConfigError(
            f"--resume {config.resume}: no run with checkpoints there; name a run folder, or use"
            " --resume auto with --out"
        )
    if r.top_p != 1.0:
        raise ConfigError(
            "--rollout.top-p must be 1 in training: the trainer's log-probs are those of the whole"
            f" distribution, and the importance weights would be wrong; got {r.top_p}"
        )
    if r.max_reprompt_tokens < r.max_prompt_tokens:
        raise ConfigError(
            f"--rollout.max-reprompt-tokens {r.max_reprompt_tokens} must be at least"
            f" --rollout.max-prompt-tokens {r.max_prompt_tokens}: a reprompt holds the question"
        )
    if "opcod" in (config.algo, *config.baselines) and d.validation_problems_per_domain < 1:
        raise ConfigError(
            "--data.validation-problems-per-domain must be at least 1 for opcod: its gate compares"
            " the students on them"
        )
    if d.source != "files" and d.test_problems_per_domain < 1:
        raise ConfigError(
            f"--data.test-problems-per-domain must be at least 1 for {d.source} data; got"
            f" {d.test_problems_per_domain}"
        )
    if d.source != "files" and d.train_problems_per_domain < 1:
        raise ConfigError(
            f"--data.train-problems-per-domain must be at least 1 for {d.source} data; got"
            f" {d.train_problems_per_domain}"
        )
    if d.source == "games":
        for domain in d.domains:
            if not domain.game:
                raise ConfigError(
                    f"data.domains: {domain.name} needs a `game`, such as embedded:digits"
                )
        if config.algo != "rl2f" or config.baselines:
            raise ConfigError(
                'data.source = "games" needs --algo rl2f --baselines none: games have several turns'
            )
    if d.source == "files":
        for domain in d.domains:
            if not domain.train or not domain.test:
                raise ConfigError(
                    f"data.domains: {domain.name} needs `train` and `test` files under data.root"
                )
    if config.algo == "rl2f" or config.dialogue.evaluate:
        _check_dialogues(config)
    for name in {config.algo, *config.baselines}:
        getattr(config, name).check(f"--{name}", len(config.students))


def _check_dialogues(config: Config) -> None:
    r, d = config.rollout, config.dialogue
    needed = r.max_prompt_tokens + r.max_response_tokens
    if d.max_dialogue_tokens < needed:
        raise ConfigError(
            f"--dialogue.max-dialogue-tokens {d.max_dialogue_tokens} must be at least {needed}:"
            " --rollout.max-prompt-tokens and --rollout.max-response-tokens together"
        )
    if d.leak_judge and config.data.prompts == "tiny":
        raise ConfigError(
            "--dialogue.leak-judge: the tiny models can't judge; use --data.prompts full"
        )
    if len(set(d.evaluate)) < len(d.evaluate):
        raise ConfigError(f"--dialogue.evaluate: names a setting twice: {', '.join(d.evaluate)}")
    if "games" in d.evaluate and not d.games:
        raise ConfigError(
            "--dialogue.evaluate games needs at least one of --dialogue.games, such as"
            " embedded:digits"
        )


def _check_numbers(config: Config) -> None:
    r, e, d, p, o = (
        config.rollout, config.evaluation, config.data, config.policy, config.optimizer,
    )  # fmt: skip
    at_least = {
        "rollout.questions_per_step": (r.questions_per_step, 1),
        "rollout.samples_per_question": (r.samples_per_question, 1),
        "rollout.max_prompt_tokens": (r.max_prompt_tokens, 1),
        "rollout.max_response_tokens": (r.max_response_tokens, 1),
        "rollout.max_reprompt_tokens": (r.max_reprompt_tokens, 1),
        "rollout.max_feedback_tokens": (r.max_feedback_tokens, 1),
        "rollout.verifier_workers": (r.verifier_workers, 1),
        "dialogue.max_turns": (config.dialogue.max_turns, 1),
        "dialogue.max_guidance_tokens": (config.dialogue.max_guidance_tokens, 1),
        "dialogue.redrafts": (config.dialogue.redrafts, 0),
        "dialogue.episodes_per_game": (config.dialogue.episodes_per_game, 1),
        "evaluation.samples": (e.samples, 1),
        "evaluation.validation_samples": (e.validation_samples, 1),
        "evaluation.temperature": (e.temperature, 0),
        "policy.micro_batch_tokens": (p.micro_batch_tokens, 1),
        "policy.logits_chunk_rows": (p.logits_chunk_rows, 0),
        "policy.lora_rank": (p.lora_rank, 0),
        "policy.canary_max_mean_diff": (p.canary_max_mean_diff, 0),
        "transformers.max_batch_tokens": (config.transformers.max_batch_tokens, 1),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 1),
        "checkpoint.keep": (config.checkpoint.keep, 1),
        "data.validation_problems_per_domain": (d.validation_problems_per_domain, 0),
        "data.test_problems_per_domain": (d.test_problems_per_domain, 0),
        "data.train_problems_per_domain": (d.train_problems_per_domain, 0),
        "optimizer.weight_decay": (o.weight_decay, 0),
        "steps": (config.steps, 0),
        "parallel.replicate": (config.parallel.replicate, 0),
        "parallel.shard": (config.parallel.shard, 0),
        "vllm.student_kv_cache_gb": (config.vllm.student_kv_cache_gb, 0),
        "vllm.tutor_kv_cache_gb": (config.vllm.tutor_kv_cache_gb, 0),
        "plan.gpus": (config.plan.gpus, 0),
        "plan.gpu_memory_gb": (config.plan.gpu_memory_gb, 0),
    }
    for name, (value, least) in at_least.items():
        if not value >= least:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be at least {least}; got {value}")
        if value == math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be finite; got {value}")
    above_zero = {
        "rollout.temperature": r.temperature,
        "rollout.verifier_timeout_s": r.verifier_timeout_s,
        "optimizer.eps": o.eps,
        "vllm.step_timeout_s": config.vllm.step_timeout_s,
        "optimizer.max_grad_norm": o.max_grad_norm,
        "evaluation.top_p": e.top_p,
    }
    for name, value in above_zero.items():
        if not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0; got {value}")
    if e.top_p > 1:
        raise ConfigError(f"--evaluation.top-p must be in (0, 1]; got {e.top_p}")
    for name, beta in (("beta1", o.beta1), ("beta2", o.beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(f"--optimizer.{name} must be in [0, 1); got {beta}")


def _check_machine(config: Config) -> None:
    if (config.plan.gpus == 0) != (config.plan.gpu_memory_gb == 0):
        raise ConfigError("--plan.gpus and --plan.gpu-memory-gb name a machine together: give both")
    if config.policy.liger == "on" and config.do != "plan":
        if not torch.cuda.is_available():
            raise ConfigError("--policy.liger on needs a GPU; use --policy.liger auto or off")
        if importlib.util.find_spec("liger_kernel") is None:
            raise ConfigError(
                '--policy.liger on needs liger-kernel: pip install -e ".[gpu]", or use auto'
            )


_KINDS = ("mcq", "math", "expression", "numeric", "text", "code")


def _check_names(config: Config) -> None:
    if not config.students:
        raise ConfigError("students: name at least one [[students]] with a model in the preset")
    if not config.data.domains:
        raise ConfigError("data.domains: name at least one [[data.domains]] in the preset")
    for kind, names in (
        ("students", [s.name for s in config.students]),
        ("data.domains", [d.name for d in config.data.domains]),
    ):
        if len(set(names)) != len(names):
            raise ConfigError(f"{kind}: names must differ; got {', '.join(names)}")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ConfigError(
                    f"{kind}: a name is made of letters, digits, '.', '_' and '-'; got {name!r}"
                )
    for s in config.students:
        if not s.model:
            raise ConfigError(f"students: {s.name} needs a model (--students.N.model FOLDER)")
    for d in config.data.domains:
        if d.kind not in _KINDS:
            raise ConfigError(
                f"data.domains: kind must be one of {', '.join(_KINDS)}; got {d.kind}"
            )
        if d.shown_tests < 0 or (d.shown_tests and d.kind != "code"):
            raise ConfigError(
                f"data.domains: shown_tests of {d.name} must be at least 0, and 0 unless its kind"
                f" is code; got {d.shown_tests}"
            )
    for name in config.baselines:
        if config.baselines.count(name) > 1 or name in ("opcod", "rl2f"):
            raise ConfigError(
                f"--baselines: {name} is named twice, or is none of sdpo, grpo and sft, which learn"
                " alone in single turns"
            )
