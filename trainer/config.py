"""Configuration: dataclasses with the papers' defaults → TOML preset → command line, in that order.

Every field can be set in a preset (`[section]`, `key = value`) and on the command line
(`--section.key value`). Unknown keys and impossible combinations are errors; the resolved
configuration is saved with the run and is itself a valid preset.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from cotutor.trainer.algos.grpo import GRPOConfig
from cotutor.trainer.algos.opcod import OPCoDConfig
from cotutor.trainer.algos.sdpo import SDPOConfig
from cotutor.trainer.algos.sft import SFTConfig

AlgoName = Literal["opcod", "sdpo", "grpo", "sft"]


class ConfigError(ValueError):
    """A user's mistake in an option or a preset: one sentence that names it and the way out."""


@dataclass(frozen=True)
class StudentConfig:
    """One model that is trained. The order of the students is the order of the phases."""

    name: str = "student"
    # A Hugging Face model folder, or "package:NAME" for the GGUF file inside a Python package.
    model: str = ""
    # A file with a Jinja chat template, for tokenizers that bring none.
    chat_template: str = ""
    # True: take only configuration and tokenizer from `model`, and start from random weights.
    random_init: bool = False


@dataclass(frozen=True)
class DomainConfig:
    """Where one domain's problems come from: files, or the embedded generator when both are ""."""

    name: str
    train: str = ""  # path under data.root
    test: str = ""
    kind: str = "mcq"  # verifier: mcq | math | expression | numeric | text | code
    fields: dict[str, str] = field(default_factory=dict)  # our name → the file's field name


@dataclass(frozen=True)
class DataConfig:
    source: Literal["files", "embedded", "curriculum"] = "files"
    root: str = "data"
    domains: tuple[DomainConfig, ...] = ()
    skip_bad_rows: bool = False
    # Taken out of the training problems, by content hash; 60 in all, balanced, in the paper.
    validation_problems_per_domain: int = 30
    # 0: every problem of the test file. Embedded and curriculum data: how many to generate.
    test_problems_per_domain: int = 0
    train_problems_per_domain: int = 0
    prompts: Literal["full", "tiny"] = "full"


@dataclass(frozen=True)
class RolloutConfig:
    questions_per_step: int = 32
    samples_per_question: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    max_prompt_tokens: int = 2048
    max_response_tokens: int = 4096
    max_reprompt_tokens: int = 10240
    max_feedback_tokens: int = 1024
    # Qwen3-style templates: None leaves the template's own default.
    thinking: bool | None = None
    verifier_workers: int = 2
    verifier_timeout_s: float = 10.0


@dataclass(frozen=True)
class EvaluationConfig:
    samples: int = 16
    validation_samples: int = 16
    temperature: float = 0.6
    top_p: float = 0.95


@dataclass(frozen=True)
class OptimizerConfig:
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class PolicyConfig:
    # Tokens (padding included) of one micro-batch, the larger of student's and teacher's side.
    micro_batch_tokens: int = 16384
    activation_checkpointing: bool = True
    # "auto": bfloat16 on a GPU, float32 on the CPU. Master weights and reductions are float32.
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # Rows of the [rows, vocabulary] buffer of the LM-head kernels; 0 lets the kernel choose.
    logits_chunk_rows: int = 0
    # LoRA on all linear layers but the head; 0: full fine-tuning.
    lora_rank: int = 0
    lora_alpha: float = 16.0
    # A step whose rollouts' mean |Δ log-prob| between engine and trainer exceeds this is fatal.
    # 0 chooses by dtype: 1e-3 in float32, 5e-2 in bfloat16.
    canary_max_mean_diff: float = 0.0


@dataclass(frozen=True)
class EngineConfig:
    # Tokens that the transformers engine holds in one decoding batch (prompt + response budget).
    max_batch_tokens: int = 65536


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 10
    keep: int = 2


@dataclass(frozen=True)
class Config:
    """A whole run."""

    algo: AlgoName = "opcod"
    do: Literal["train", "evaluate", "break-rate", "plan"] = "train"
    out: str = ""  # "" becomes runs/<preset>-<algo>
    # "": a fresh run; "auto": go on if the folder holds a checkpoint; else a run folder's path.
    resume: str = ""
    # Optimizer steps of each phase (algorithms with one phase: in all); 0 keeps the preset's.
    steps: int = 0
    seed: int = 0
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    # Trained afterwards from the same start for the same number of steps; shown in the same table.
    baselines: tuple[AlgoName, ...] = ()
    students: tuple[StudentConfig, ...] = ()
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    transformers: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    opcod: OPCoDConfig = field(default_factory=OPCoDConfig)
    sdpo: SDPOConfig = field(default_factory=SDPOConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)


def _build(cls: Any, value: Any, where: str) -> Any:
    """Turn parsed TOML into the annotated type, naming `where` in every error."""
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if dataclasses.is_dataclass(cls) and isinstance(cls, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table; got {value!r}")
        hints = typing.get_type_hints(cls)
        for key in value:
            if key not in hints:
                near = difflib.get_close_matches(key, hints, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(hints)}"
                raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        kwargs = {k: _build(hints[k], v, f"{where}: {k}") for k, v in value.items()}
        try:
            return cls(**kwargs)
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from None
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list; got {value!r}")
        return tuple(_build(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} must be one of {', '.join(args)}; got {value!r}")
        return value
    if origin in (types.UnionType, typing.Union):
        return _build(next(a for a in args if a is not type(None)), value, where)
    if origin is dict:
        return dict(value)
    if cls is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be {cls.__name__}; got {value!r}")
    return value


def load_preset(path: Path) -> Config:
    """Read a TOML preset. Raises ConfigError that names file, and line or key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; the presets are in configs/"
        ) from None
    try:
        return _build(Config, tomllib.loads(text), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except ConfigError as error:
        line = _line_of(text, str(error))
        raise ConfigError(str(error).replace(str(path), f"{path}:{line}", 1)) from None


def _line_of(text: str, message: str) -> int:
    """The 1-based line of the last-named key, 1 if it can't be found."""
    quoted = message.split("unknown key '")[-1].split("'")[0] if "unknown key" in message else ""
    key = quoted or message.split(" must be")[0].split(": ")[-1].split("[")[0]
    for number, line in enumerate(text.splitlines(), start=1):
        name = line.split("=")[0].strip().strip("[]").split(".")[-1]
        if name == key:
            return number
    return 1


def to_toml(config: Config) -> str:
    """The resolved configuration as a preset; None (a template's own default) is left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    return tomli_w.dumps(plain(dataclasses.asdict(config)))


def check(config: Config) -> None:
    """Refuse impossible combinations. Raises ConfigError that names the option."""
    r, e, d, p = config.rollout, config.evaluation, config.data, config.policy
    positive = {
        "rollout.questions_per_step": r.questions_per_step,
        "rollout.samples_per_question": r.samples_per_question,
        "rollout.max_prompt_tokens": r.max_prompt_tokens,
        "rollout.max_response_tokens": r.max_response_tokens,
        "rollout.max_reprompt_tokens": r.max_reprompt_tokens,
        "rollout.max_feedback_tokens": r.max_feedback_tokens,
        "rollout.verifier_workers": r.verifier_workers,
        "evaluation.samples": e.samples,
        "evaluation.validation_samples": e.validation_samples,
        "policy.micro_batch_tokens": p.micro_batch_tokens,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "checkpoint.keep": config.checkpoint.keep,
    }
    for name, value in positive.items():
        if value < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be at least 1; got {value}")
    if config.resume not in ("", "auto") and not (Path(config.resume) / "checkpoints").is_dir():
        raise ConfigError(
            f"--resume {config.resume}: no run with checkpoints there; name a run folder, or use"
            " --resume auto with --out"
        )
    if config.steps < 0:
        raise ConfigError(f"--steps must be at least 0 (0 keeps the preset's); got {config.steps}")
    if not config.students:
        raise ConfigError("students: name at least one [[students]] with a model in the preset")
    names = [s.name for s in config.students]
    if len(set(names)) != len(names):
        raise ConfigError(f"students: names must differ; got {', '.join(names)}")
    for s in config.students:
        if not s.model:
            raise ConfigError(f"students: {s.name} needs a model (--students.N.model FOLDER)")
    if not d.domains:
        raise ConfigError("data.domains: name at least one [[data.domains]] in the preset")
    if d.source == "files":
        for domain in d.domains:
            if not domain.train or not domain.test:
                raise ConfigError(
                    f"data.domains: {domain.name} needs `train` and `test` files under data.root"
                )
    if r.temperature <= 0:
        raise ConfigError(
            f"--rollout.temperature must be above 0 for training; got {r.temperature}"
        )
    if r.top_p != 1.0:
        raise ConfigError(
            "--rollout.top-p must be 1 in training: the trainer's log-probs are those of the whole"
            f" distribution, and the importance weights would be wrong; got {r.top_p}"
        )
    if not 0 < e.top_p <= 1:
        raise ConfigError(f"--evaluation.top-p must be in (0, 1]; got {e.top_p}")
    if e.temperature < 0:
        raise ConfigError(f"--evaluation.temperature must be at least 0; got {e.temperature}")
    for name in {config.algo, *config.baselines}:
        getattr(config, name).check(f"--{name}", len(config.students))
