"""The embedded engine: batched sampling from any Hugging Face causal language model.

One loop over `model.forward` with a key-value cache that is written in place. Prompts are padded on
the left, so that the last column is everybody's last token; samples of one prompt share its
prefill; rows that have ended leave the batch when a quarter of it has. A request's randomness is a
counter-based stream of its own seed, turned into tokens through the inverse of the cumulative
distribution: the global generators of torch and numpy are neither used nor changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from cotutor.rollout.engine import Sampling
from cotutor.rollout.trajectory import Completion

_RESERVE = 64  # columns by which a cache grows at least


class _Layer(CacheLayerMixin):
    """Keys and values [rows, heads, capacity, head size], of which `length` columns are in use.

    Layers with a sliding window keep all columns too; the model's own mask hides the old ones.
    """

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.length + key_states.shape[2]
        if self.keys.shape[2] < stop:
            capacity = stop + max(_RESERVE, stop // 2) if self.length else stop
            self.keys = self._copy(self.keys, capacity)
            self.values = self._copy(self.values, capacity)
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def select(self, rows: torch.Tensor) -> None:
        """Keep (or repeat) the rows with these indices, with room for more columns."""
        capacity = self.length + _RESERVE
        self.keys = self._copy(self.keys, capacity, rows)
        self.values = self._copy(self.values, capacity, rows)

    def _copy(
        self, old: torch.Tensor, capacity: int, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        used = old[:, :, : self.length]
        n_rows = old.shape[0] if rows is None else len(rows)
        new = old.new_empty(n_rows, old.shape[1], capacity, old.shape[3])
        new[:, :, : self.length] = used if rows is None else used.index_select(0, rows)
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _select(cache: Cache, rows: torch.Tensor) -> None:
    for layer in cache.layers:
        assert isinstance(layer, _Layer), f"{type(layer).__name__} holds no keys and values"
        layer.select(rows)


class TransformersEngine:
    """An `Engine` on a transformers model in this process.

    The engine uses the module that it is given; what shares the module sees `load_weights`.

    Args:
        model: a causal language model whose `forward` takes `past_key_values` (attention layers
            only: a recurrent state can't be padded on the left).
        eos_ids: every id at which a completion ends.
        vocab_size: ids at or above it are never sampled (rows of a padded embedding).
        pad_id: any valid id; padding is masked by position.
        max_batch_tokens: rows × (longest prompt + `max_tokens`) of one batch, at most; a single
            request is served whatever it needs.
        device: where to put the model; default: where it is.
    """

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
        if device is not None:
            model = model.to(device)
        self._model: Any = model
        self._device = next(model.parameters()).device
        self._is_eos = torch.zeros(vocab_size, dtype=torch.bool)
        self._is_eos[[i for i in eos_ids if i < vocab_size]] = True
        self._is_eos = self._is_eos.to(self._device)
        self._vocab_size = vocab_size
        self._pad_id = pad_id
        self._max_batch_tokens = max_batch_tokens
        parameters = inspect.signature(model.forward).parameters
        self.version = 0
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._state = "ready"

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """Sample one completion per prompt.

        Args:
            prompts: token ids, at least one each.
            sampling: with temperature 0 the distribution is a point: its log-probabilities are 0.
            seeds: one integer in [0, 2^64) per prompt. Request i is a function of its prompt and
                `seeds[i]`, up to the rounding of the logits, which depends on the batch's shape.

        Returns:
            Completions in the order of the prompts; log-probabilities in nats, float32, of the
            distribution sampled from: temperature and top-p applied, ids ≥ `vocab_size` left out.

        Raises:
            RuntimeError: the engine is asleep, closed or partly loaded, or logits aren't finite.
            ValueError: an empty prompt, or a setting out of range.
        """
        self._require("ready", "generate")
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("a prompt without tokens can't be continued")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1:
            raise ValueError(f"need temperature ≥ 0, 0 < top_p ≤ 1, max_tokens ≥ 1: {sampling}")
        completions: dict[int, Completion] = {}
        was_training = self._model.training
        self._model.eval()
        try:
            with torch.inference_mode():
                for batch in self._batches(prompts, sampling.max_tokens):
                    done = self._complete(
                        [prompts[i] for i in batch], sampling, [seeds[i] for i in batch]
                    )
                    completions.update(zip(batch, done, strict=True))
        finally:
            self._model.train(was_training)
        return [completions[i] for i in range(len(prompts))]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all weights into the model, in place: tied ones stay tied and need one name only.

        Raises:
            RuntimeError: the engine is asleep or closed.
            ValueError: a name that the model doesn't have, a shape that differs, two values for
                tied weights, or weights that were left out. Until a complete load the engine
                refuses to generate.
        """
        if self._state != "partly loaded":
            self._require("ready", "load weights")
        self._state = "partly loaded"
        own: dict[str, torch.Tensor] = self._model.state_dict()
        loaded: dict[int, str] = {}
        for name, tensor in weights:
            if name not in own:
                raise ValueError(f"the model has no weight {name!r}")
            target = own[name]
            if target.shape != tensor.shape:
                raise ValueError(
                    f"{name!r} is {tuple(target.shape)} in the model, got {tuple(tensor.shape)}"
                )
            twin = loaded.get(target.data_ptr())
            new = tensor.detach().to(target.device, target.dtype)
            if twin not in (None, name) and not torch.equal(target, new):
                raise ValueError(f"{name!r} is tied to {twin!r} but got another value")
            target.copy_(new)
            loaded[target.data_ptr()] = name
        missing = [name for name, target in own.items() if target.data_ptr() not in loaded]
        if missing:
            raise ValueError(f"{len(missing)} weights were not loaded, such as {missing[0]!r}")
        self._state = "ready"
        self.version += 1

    def sleep(self, level: int = 1) -> None:
        """Move the weights to the host's memory, where they stay as they are at either level."""
        self._require("ready", "sleep")
        self._model.to("cpu")
        self._state = "asleep"

    def wake(self) -> None:
        """Move the weights back to the device."""
        self._require("asleep", "wake")
        self._model.to(self._device)
        self._state = "ready"

    def close(self) -> None:
        """Let the model go; the engine can't be used afterwards."""
        self._model = None
        self._state = "closed"

    def _require(self, state: str, action: str) -> None:
        if self._state != state:
            raise RuntimeError(f"can't {action}: the engine is {self._state}, not {state}")

    def _batches(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
        """Indices of the requests, batch by batch, shortest first and equal prompts together."""
        batch: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), *prompts[i])):
            cost = (len(batch) + 1) * (len(prompts[i]) + max_tokens)
            if batch and cost > self._max_batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _complete(
        self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int]
    ) -> list[Completion]:
        """Sample one batch to its end."""
        n, steps, device = len(prompts), sampling.max_tokens, self._device
        cache, logits, mask, positions = self._prefill(prompts)
        uniforms = torch.from_numpy(_uniforms(seeds, steps)).to(device)
        ids = torch.zeros(n, steps, dtype=torch.long, device=device)
        logprobs = torch.zeros(n, steps, device=device)
        lengths = torch.full((n,), steps, device=device)
        rows = torch.arange(n, device=device)  # which request each row of the batch belongs to
        ended = torch.zeros(n, dtype=torch.bool, device=device)
        for step in range(steps):
            token, logprob = draw(logits, uniforms[rows, step], sampling)
            ids[rows, step], logprobs[rows, step] = token, logprob
            ends = self._is_eos[token] & ~ended
            lengths[rows[ends]] = step + 1
            ended |= ends
            alive = len(rows) - int(ended.sum())
            if alive == 0 or step + 1 == steps:
                break
            if alive <= 0.75 * len(rows):
                keep = (~ended).nonzero().squeeze(1)
                rows, token, ended = rows[keep], token[keep], ended[keep]
                mask, positions = mask[keep], positions[keep]
                _select(cache, keep)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            positions = positions + 1
            logits = self._forward(token[:, None], mask, positions, cache)
        counts = lengths.tolist()
        all_ids, all_logprobs = ids.tolist(), logprobs.tolist()
        stopped = self._is_eos[ids.gather(1, lengths[:, None] - 1)].squeeze(1).tolist()
        if not torch.isfinite(logprobs).all():
            raise RuntimeError("the model's logits are not finite: its weights are broken")
        return [
            Completion(i[:count], p[:count], "stop" if stop else "length")
            for i, p, count, stop in zip(all_ids, all_logprobs, counts, stopped, strict=True)
        ]

    def _prefill(
        self, prompts: list[Sequence[int]]
    ) -> tuple[Cache, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run each different prompt once: cache, last logits, mask, positions, row by request."""
        numbers: dict[tuple[int, ...], int] = {}
        of_request = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        width = max(map(len, prompts))
        ids = torch.full((len(numbers), width), self._pad_id)
        mask = torch.zeros(len(numbers), width, dtype=torch.bool)
        for prompt, row in numbers.items():
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = True
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        cache = Cache(layer_class_to_replicate=_Layer)
        logits = self._forward(ids, mask, positions, cache)
        rows = torch.tensor(of_request, device=self._device)
        _select(cache, rows)
        return cache, logits[rows], mask[rows], positions[rows, -1:]

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Logits [rows, vocab_size] of the last column."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        )
        logits: torch.Tensor = output.logits[:, -1, : self._vocab_size]
        return logits


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one id per row by inverting the cumulative distribution.

    Args:
        logits: [N, V].
        uniforms: [N] float64 in (0, 1).
        sampling: temperature and top-p; greedy at temperature 0.

    Returns:
        ids [N] and their log-probabilities [N] float32; NaN where the logits aren't finite.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        best, ids = logits.max(dim=-1)
        return ids, best - best
    logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
    order: torch.Tensor | None = None
    if sampling.top_p < 1:
        logprobs, order = logprobs.sort(dim=-1, descending=True, stable=True)
        probs = logprobs.double().exp()
        # The smallest set of most likely ids whose mass reaches top_p.
        logprobs = logprobs.masked_fill(probs.cumsum(-1) - probs >= sampling.top_p, -torch.inf)
        logprobs = torch.log_softmax(logprobs, dim=-1)
    # float64: in float32 the rounding of the sum would hide rare ids behind 100,000 others.
    cumulative = logprobs.double().exp().cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True).clamp(max=logits.shape[-1] - 1)
    ids = chosen if order is None else order.gather(-1, chosen)
    return ids.squeeze(-1), logprobs.gather(-1, chosen).squeeze(-1)


def _uniforms(seeds: Sequence[int], n: int) -> np.ndarray:
    """[len(seeds), n] float64 in (0, 1): row i is the Philox stream with key `seeds[i]`.

    32 bits and a half: never so near 1 that the product with the total rounds up to it.
    """
    raw = np.stack([np.random.Philox(key=seed).random_raw(n) for seed in seeds])
    return ((raw >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
