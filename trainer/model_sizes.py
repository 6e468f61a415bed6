"""How large an architecture is, from its config.json alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cotutor.rollout.models import ModelError, locate


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


@functools.cache  # a GGUF file takes seconds
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
