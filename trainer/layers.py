"""Which attention and which layers a policy's model runs with."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from cotutor.rollout.models import ModelError
from cotutor.trainer.config import PolicyConfig


def choose_attention(
    model: Any, config: PolicyConfig, device: torch.device, compute_dtype: torch.dtype
) -> bool:
    """Decide whether micro-batches are packed, and give the model varlen attention for it.

    Without flash-attn's kernel, which needs a GPU and 16 bits, the mask of packed sequences is
    made in full: right, but slower than padding. Raises ModelError if packing is asked for and the
    model can't keep sequences apart.
    """
    half = compute_dtype in (torch.bfloat16, torch.float16)
    varlen = device.type == "cuda" and half and is_flash_attn_2_available()
    if config.packing == "off" or (config.packing == "auto" and not varlen):
        return False
    if not attends_only(model):
        if config.packing == "auto":
            return False
        raise ModelError(
            f"model {model.name_or_path}: its layers carry state from one packed sequence to the"
            " next; use --policy.packing off"
        )
    if varlen:
        model.set_attn_implementation("flash_attention_2")
    return True


def attends_only(model: Any) -> bool:
    """Do position ids alone keep packed sequences apart? Not in recurrent or linear layers."""
    kinds = set(getattr(model.config, "layer_types", None) or ())
    return not model._is_stateful and kinds <= {"full_attention", "sliding_attention"}


def uses_liger(config: PolicyConfig, device: torch.device) -> bool:
    """Never on the CPU: Liger's layers are Triton kernels."""
    wanted = config.liger == "on" or (
        config.liger == "auto" and importlib.util.find_spec("liger_kernel") is not None
    )
    return device.type == "cuda" and wanted


def add_liger(model: Any, wanted: bool) -> None:
    """Replace norms, gated MLPs and rotations; the loss is the project's own kernels'.

    Raises ModelError if that is `wanted` and Liger doesn't know the model.
    """
    from liger_kernel.transformers import monkey_patch

    if model.config.model_type in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        monkey_patch._apply_liger_kernel_to_instance(
            model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    elif wanted:
        raise ModelError(
            f"model {model.name_or_path}: Liger knows no {model.config.model_type}; use"
            " --policy.liger auto"
        )
