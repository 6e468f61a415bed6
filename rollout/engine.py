"""The engine protocol: token ids in, sampled ids with their log-probabilities out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cotutor.rollout.trajectory import Completion


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` ≥ 0 (0: greedy), `top_p` in (0, 1], `max_tokens` ≥ 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024


def request_seed(*parts: object) -> int:
    """A 63-bit seed that is a function of its parts alone: (seed, step, problem, sample, …)."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Engine(Protocol):
    """A sampler of completions whose weights can be replaced while it lives."""

    @property
    def version(self) -> int:
        """How many times weights were handed over."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """Sample one completion per prompt; request i depends on `seeds[i]`, not on its batch."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights; names are those of the Hugging Face state dict."""

    def sleep(self, level: int = 1) -> None:
        """Give back the accelerator's memory. Level 2: the weights may be lost with it."""

    def wake(self) -> None:
        """Take it again. After level 2 the weights have to be handed over before `generate`."""

    def close(self) -> None:
        """Free everything; the engine can't be used afterwards."""
