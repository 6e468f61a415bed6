"""Weights on their way into an engine: known, right in shape, none left out, tied ones equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Expected(dict[str, tuple[int, ...]]):
    """Shapes by name, and `tied`: groups of names that are one weight."""

    tied: list[list[str]]


def expected_weights(config: Any) -> Expected:
    """Names and shapes of the Hugging Face state dict, without any memory for it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = Expected({name: tuple(t.shape) for name, t in model.state_dict().items()})
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    expected.tied = [names for names in groups.values() if len(names) > 1]
    return expected


class CheckedStream:
    """Weights on their way into vLLM, once: each one known, right in shape, and none left out.

    Mistakes end the stream and are told by `check`, so that vLLM can finish what it has begun.
    vLLM's packed head doesn't follow its embedding: a tied weight is passed on under all its names.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], expected: Expected) -> None:
        self._weights = weights
        self._expected = expected
        self._group = {name: names for names in expected.tied for name in names}
        self._tied: dict[str, torch.Tensor] = {}  # the value of a group, by its first name
        self._given: set[str] = set()
        self._mistake = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self._mistake = self._look_at(name, tensor)
            if self._mistake:
                return
            self._given.add(name)
            yield name, tensor
        for names in self._expected.tied:
            for name in names:
                if names[0] in self._tied and name not in self._given:
                    self._given.add(name)
                    yield name, self._tied[names[0]]

    def _look_at(self, name: str, tensor: torch.Tensor) -> str:
        shape = self._expected.get(name)
        if shape is None:
            return f"the model has no weight {name!r}"
        if shape != tuple(tensor.shape):
            return f"{name!r} is {shape} in the model, got {tuple(tensor.shape)}"
        if name in self._group:
            known = self._tied.setdefault(self._group[name][0], tensor)
            if known is not tensor and not torch.equal(known, tensor):
                return f"{name!r} is tied to another weight but got another value"
        return ""

    def check(self) -> None:
        """Raises ValueError for what was wrong or is missing."""
        if self._mistake:
            raise ValueError(self._mistake)
        missing = [name for name in self._expected if name not in self._given]
        if missing:
            raise ValueError(f"{len(missing)} weights were not loaded, such as {missing[0]!r}")
