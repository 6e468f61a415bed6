"""A student's weights: sharded training, its teacher, and the ways out to engines and files.

Master weights are float32 shards; compute is bfloat16 on a GPU; gradients are reduced in float32.
The LM head is applied by the kernels inside the wrapped module's forward, at the trained rows
only, where FSDP has the head's weight whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cotutor.rollout.engine import request_seed
from cotutor.rollout.models import load_model
from cotutor.trainer.config import OptimizerConfig, PolicyConfig, StudentConfig
from cotutor.trainer.layers import add_liger, choose_attention, uses_liger
from cotutor.trainer.world import World

T = TypeVar("T")


class Scorer(nn.Module):
    """A causal LM as FSDP sees it: trunk, then a function of the hidden states and the LM head."""

    def __init__(self, model: Any, vocab_size: int | None) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size

    def forward(
        self,
        ids: torch.Tensor,
        row_index: torch.Tensor,
        function: Callable[[torch.Tensor, torch.Tensor], T],
        position_ids: torch.Tensor | None = None,
    ) -> T:
        """ids (B, L) → function(hidden (N, D) at the flat positions row_index, head (V, D)).

        position_ids (B, L) that start again at 0 keep packed sequences apart. That needs the
        absence of an attention mask: one of ones would let them see each other.
        """
        hidden = self.model.get_decoder()(
            input_ids=ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, row_index)
        # Rows of a padded head beyond the tokenizer are no tokens: the engine never samples them.
        return function(rows, self.model.get_output_embeddings().weight[: self.vocab_size])


class Policy:
    """One student: its sharded weights, optimizer and distillation teacher.

    Args:
        student: where the weights come from.
        config, optimizer: see `trainer/config.py`.
        teacher: "ema", "initial" and "trust_region" keep a second sharded copy; "current" uses the
            student's own weights; None has no teacher.
        teacher_rate: EMA rate, or trust_region's share of the current model's logits.
        seed: of random weights and of LoRA's, together with the student's name.
        vocab_size: how many rows of the LM head are tokens; None: all.
    """

    def __init__(
        self,
        student: StudentConfig,
        config: PolicyConfig,
        optimizer: OptimizerConfig,
        world: World,
        *,
        teacher: Literal["ema", "current", "initial", "trust_region"] | None,
        teacher_rate: float,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        self.world = world
        self.config = config
        self.teacher_kind = teacher
        self.teacher_rate = teacher_rate
        self.max_grad_norm = optimizer.max_grad_norm
        self.compute_dtype = compute_dtype(config, world.device)
        self.packs = False  # set with the model, which must be able to keep sequences apart
        self._vocab_size = vocab_size
        self._init_seed = seed if student.random_init else None
        self._lora_seed = request_seed(seed, student.name)
        self.student = self._sharded(student.model, trainable=True)
        keeps_copy = teacher in ("ema", "initial", "trust_region")
        self.teacher = self._sharded(student.model, trainable=False) if keeps_copy else None
        self.trainable = [p for p in self.student.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trainable,
            lr=0.0,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def _sharded(self, model_path: str, *, trainable: bool) -> Scorer:
        model = load_model(model_path, dtype=torch.float32, random_init_seed=self._init_seed)
        device = self.world.device
        self.packs = choose_attention(model, self.config, device, self.compute_dtype)
        if uses_liger(self.config, device):
            add_liger(model, wanted=self.config.liger == "on")
        if self.config.lora_rank:
            _add_lora(model, self.config, self._lora_seed)
        if not trainable:
            model.requires_grad_(False)
        elif self.config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train(trainable)
        precision = MixedPrecisionPolicy(
            param_dtype=None if self.compute_dtype == torch.float32 else self.compute_dtype,
            reduce_dtype=torch.float32,
        )
        scorer = Scorer(model, self._vocab_size)
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=self.world.mesh, mp_policy=precision)
        # Embedding and head stay together in the root group, tied or not. The root's weights stay
        # whole after a forward, so that the kernels can use the teacher's head in the student's.
        fully_shard(scorer, mesh=self.world.mesh, mp_policy=precision, reshard_after_forward=False)
        return scorer

    # --- forward and step -----------------------------------------------------------------------

    def score(
        self,
        ids: torch.Tensor,
        row_index: torch.Tensor,
        function: Callable[[torch.Tensor, torch.Tensor], T],
        position_ids: torch.Tensor | None = None,
    ) -> T:
        """Run `function(hidden, head_weight)` inside the student's forward, with gradients."""
        return self.student(ids, row_index, function, position_ids)

    @torch.no_grad()
    def teach(
        self,
        ids: torch.Tensor,
        row_index: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's hidden states (N, D) and head (V, D); valid until `end_of_step`."""

        def both(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return hidden, weight.detach()

        if self.teacher is None:
            return self.student(ids, row_index, both, position_ids)
        hidden, weight = self.teacher(ids, row_index, both, position_ids)
        if self.teacher_kind != "trust_region":
            return hidden, weight
        # (1 − r) W₀h₀ + r W h as one product: the concatenated hidden states and heads.
        r = self.teacher_rate
        current_hidden, current_weight = self.student(ids, row_index, both, position_ids)
        return (
            torch.cat([(1 - r) * hidden, r * current_hidden], dim=1),
            torch.cat([weight, current_weight], dim=1),
        )

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip, AdamW, EMA, zero the gradients; returns (gradient norm before clipping, skipped).

        A non-finite norm skips weights and EMA alike; the norm is global, so all ranks agree.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.max_grad_norm)
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        skipped = not torch.isfinite(torch.tensor(value)).item()
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.end_of_step()
        if not skipped and self.teacher_kind == "ema":
            self._move_teacher(self.teacher_rate)
        return value, skipped

    def end_of_step(self) -> None:
        """Drop gradients and the gathered root weights."""
        self.optimizer.zero_grad(set_to_none=True)
        self.student.reshard()  # type: ignore[operator]
        if self.teacher is not None:
            self.teacher.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def _move_teacher(self, rate: float) -> None:
        """θ_T ← (1 − rate) θ_T + rate θ_S on this rank's float32 shards; rate 1 copies exactly."""
        assert self.teacher is not None
        targets = [_local(p) for p in self.teacher.parameters()]
        sources = [_local(p) for p in self.student.parameters()]
        if rate == 1:
            torch._foreach_copy_(targets, sources)
        else:
            torch._foreach_lerp_(targets, sources, rate)

    def restart_teacher(self) -> None:
        """Begin a phase: an EMA teacher starts from the student's weights (others don't move)."""
        if self.teacher_kind == "ema":
            self._move_teacher(1.0)

    # --- ways out -------------------------------------------------------------------------------

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (Hugging Face name, whole tensor, compute dtype), LoRA merged; collective."""
        self.student.reshard()  # type: ignore[operator]
        state = self.student.model.state_dict()
        for name, parameter in state.items():
            if ".lora_" in name:
                continue
            merged = name.endswith(".base_layer.weight")
            # Cast before the gather, which then moves half of the bytes; LoRA adds in float32.
            value = _full(parameter if merged else parameter.to(self.compute_dtype))
            if merged:
                prefix = name.split(".base_layer.")[0]
                a = _full(state[f"{prefix}.lora_A.default.weight"])
                b = _full(state[f"{prefix}.lora_B.default.weight"])
                value = value + (b @ a) * (self.config.lora_alpha / self.config.lora_rank)
            yield name.replace(".base_layer.", "."), value.to(self.compute_dtype)

    def export(self, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face model folder, complete or not at all; collective."""
        tensors = {}
        for name, value in self.full_tensors():
            if self.world.main:
                tensors[name] = value.cpu()
        if self.world.main:
            temporary = folder.with_name(folder.name + ".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self.student.model.save_pretrained(temporary, state_dict=tensors)
            tokenizer.save_pretrained(temporary)
            _set_dtype(temporary / "config.json", self.compute_dtype)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        self.world.barrier()

    def save(self, folder: Path) -> None:
        """Write the sharded state (weights, optimizer, teacher) into `folder`; collective."""
        dcp.save(self._state(), checkpoint_id=str(folder))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; collective."""
        state = self._state()
        dcp.load(state, checkpoint_id=str(folder))
        set_optimizer_state_dict(self.student, self.optimizer, optim_state_dict=state["optimizer"])

    def _state(self) -> dict[str, Any]:
        fresh = not self.optimizer.state
        state: dict[str, Any] = {
            "student": self.student.state_dict(),
            "optimizer": get_optimizer_state_dict(self.student, self.optimizer),
        }
        if fresh:
            # Asked for its state, an optimizer that never stepped is stepped once with zeros.
            for entry in self.optimizer.state.values():
                entry["step"].zero_()
        if self.teacher is not None:
            state["teacher"] = self.teacher.state_dict()
        return state


def compute_dtype(config: PolicyConfig, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward: float32 on the CPU, bfloat16 on a GPU, unless set."""
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.compute_dtype]


def _add_lora(model: Any, config: PolicyConfig, seed: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear",
        exclude_modules=[head],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """save_pretrained writes the master dtype; engines should load what the file holds."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
