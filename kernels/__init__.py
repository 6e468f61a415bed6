"""Exact, frugal kernels for language models that teach each other: tensors in, tensors out."""

from .importance_weights import (
    ImportanceStats,
    ImportanceWeights,
    importance_weights,
    importance_weights_reference,
)
from .linear_token_logprobs import linear_token_logprobs, linear_token_logprobs_reference
from .linear_topk_jsd import TopKJSD, linear_topk_jsd, linear_topk_jsd_reference
from .token_logprobs import TokenLogprobs, token_logprobs, token_logprobs_reference
from .topk_jsd import topk_jsd, topk_jsd_reference

__all__ = [
    "ImportanceStats",
    "ImportanceWeights",
    "TokenLogprobs",
    "TopKJSD",
    "importance_weights",
    "importance_weights_reference",
    "linear_token_logprobs",
    "linear_token_logprobs_reference",
    "linear_topk_jsd",
    "linear_topk_jsd_reference",
    "token_logprobs",
    "token_logprobs_reference",
    "topk_jsd",
    "topk_jsd_reference",
]
