"""Configuration: dataclasses with the papers' defaults → TOML preset → command line, in that order.

Every field can be set in a preset (`[section]`, `key = value`; preset.py) and on the command line
(`--section.key value`; main.py). Impossible combinations are errors (checks.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cotutor.trainer.algos.grpo import GRPOConfig
from cotutor.trainer.algos.opcod import OPCoDConfig
from cotutor.trainer.algos.rl2f import RL2FConfig
from cotutor.trainer.algos.sdpo import SDPOConfig
from cotutor.trainer.algos.sft import SFTConfig

AlgoName = Literal["opcod", "rl2f", "sdpo", "grpo", "sft"]
DialogueSetting = Literal["teacher", "self", "games"]


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
    game: str = ""  # source "games": "embedded:…", "textarena:…" or "reasoning_gym:…"
    fields: dict[str, str] = field(default_factory=dict)  # our name → the file's field name
    # kind = "code": how many of the tests stand in the question; the others stay hidden.
    shown_tests: int = 0


@dataclass(frozen=True)
class DataConfig:
    source: Literal["files", "embedded", "curriculum", "games"] = "files"
    root: str = "data"
    domains: tuple[DomainConfig, ...] = ()
    skip_bad_rows: bool = False
    # Taken out of the training problems, by content hash; 60 in all, balanced, in the paper.
    validation_problems_per_domain: int = 30
    # 0: every problem of the test file. Other sources: how many to generate.
    test_problems_per_domain: int = 0
    train_problems_per_domain: int = 0
    prompts: Literal["full", "tiny"] = "full"
    # Generated problems: another number draws other ones. Settings are chosen on those, reported
    # figures are those of 0.
    problem_seed: int = 0


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
    # Programs of a model run under bubblewrap. True: without it, under Landlock and a system-call
    # filter instead; False: no program runs without bubblewrap.
    allow_restricted_sandbox: bool = False


@dataclass(frozen=True)
class DialogueConfig:
    """Dialogues of several turns: how long, who replies, and in which settings they are scored."""

    max_turns: int = 5  # answers of the student
    max_dialogue_tokens: int = 16384
    max_guidance_tokens: int = 1024
    # How often guidance that gives the answer away is written anew, before a fixed sentence.
    redrafts: int = 2
    # Also ask the teacher's model whether its message gives the answer away.
    leak_judge: bool = False
    # Scored at start and end: "teacher" (the initial weights, with the solution at hand), "self"
    # (the student as its own critic, without it), "games" (no teacher at all).
    evaluate: tuple[DialogueSetting, ...] = ()
    games: tuple[str, ...] = ()  # "embedded:…", "textarena:…", "reasoning_gym:…"
    episodes_per_game: int = 20


@dataclass(frozen=True)
class EvaluationConfig:
    samples: int = 16
    validation_samples: int = 16
    temperature: float = 0.6
    top_p: float = 0.95
    # `--do evaluate`: model folders that are compared in the first student's place; none: the
    # students' own models.
    checkpoints: tuple[str, ...] = ()


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
    # Micro-batches as one row of sequences end to end, instead of padded rows. "auto": on a GPU in
    # bfloat16 with flash-attn, whose varlen attention then skips what other sequences hold.
    packing: Literal["auto", "on", "off"] = "auto"
    # Liger's RMSNorm, SwiGLU and rotary kernels. "auto": on a GPU where liger-kernel is installed.
    liger: Literal["auto", "on", "off"] = "auto"
    # LoRA on all linear layers but the head; 0: full fine-tuning.
    lora_rank: int = 0
    lora_alpha: int = 16
    # A step whose rollouts' mean |Δ log-prob| between engine and trainer exceeds this is fatal.
    # 0 chooses by dtype: 1e-3 in float32, 5e-2 in bfloat16.
    canary_max_mean_diff: float = 0.0


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks as a mesh: `replicate` groups, each of which shards all weights over `shard` ranks.

    0 chooses: one group of all ranks, or what the other number leaves. Several nodes: a group per
    node keeps the gathering of weights inside it.
    """

    replicate: int = 0
    shard: int = 0


@dataclass(frozen=True)
class EngineConfig:
    # Tokens that the transformers engine holds in one decoding batch (prompt + response budget).
    max_batch_tokens: int = 65536


@dataclass(frozen=True)
class VLLMConfig:
    # Key-value cache of each engine, in GB (10⁹ bytes); 0: what the memory plan leaves for it.
    student_kv_cache_gb: float = 0.0
    tutor_kv_cache_gb: float = 0.0
    # Tutors' engines in processes of their own, or in the ranks'. "auto": their own on a GPU,
    # where a process can hold one sleeping engine.
    tutor_process: Literal["auto", "own", "same"] = "auto"
    # A tutor's process without a step for so long counts as hung.
    step_timeout_s: float = 60.0


@dataclass(frozen=True)
class PlanConfig:
    """The machine that `--do plan` is for; 0 and 0: the one it runs on."""

    gpus: int = 0  # in all nodes; one rank each
    gpu_memory_gb: float = 0.0  # of one GPU, 10⁹ bytes


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
    dialogue: DialogueConfig = field(default_factory=DialogueConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    transformers: EngineConfig = field(default_factory=EngineConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    opcod: OPCoDConfig = field(default_factory=OPCoDConfig)
    rl2f: RL2FConfig = field(default_factory=RL2FConfig)
    sdpo: SDPOConfig = field(default_factory=SDPOConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
