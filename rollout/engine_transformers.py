"""The embedded engine: batched sampling from any Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cotutor.rollout.engine import Sampling
from cotutor.rollout.trajectory import Completion


class TransformersEngine:
    """An `Engine` on a transformers model in this process."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        pad_id: int = 0,
        max_batch_tokens: int = 65_536,
        device: torch.device | str | None = None,
    ) -> None:
        raise NotImplementedError

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """Sample one completion per prompt; request i depends on `seeds[i]`."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all weights into the model."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Move the weights to the host."""
        raise NotImplementedError

    def wake(self) -> None:
        """Move them back."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the model."""
        raise NotImplementedError
