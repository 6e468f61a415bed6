"""The fast engine: vLLM in this process, the CUDA wheel or the CPU wheel.

Under torchrun every rank has an engine of its own; starting one is collective, since vLLM makes
process groups. vLLM changes the process that it starts in (random generators, thread count,
environment): what the trainer had is put back.
"""

from __future__ import annotations

import importlib.util
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from cotutor.rollout.engine import Sampling
from cotutor.rollout.engine_state import EngineState, refuse_expandable_segments
from cotutor.rollout.models import ModelError
from cotutor.rollout.trajectory import Completion
from cotutor.rollout.weight_stream import CheckedStream, expected_weights

_ENVIRONMENT = {
    # The engine core runs in this process, where the trainer's tensors are.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads stay where the trainer put them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}
_MAX_SEQUENCES = 256  # decoded at once


def why_not() -> str:
    """Why vLLM can't be used here; "" where it can. Imports it (seconds) where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        _import()
    except Exception as error:
        return f"vLLM doesn't import: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _import() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _quiet():
        import vllm
        import vllm.sampling_params
    return vllm


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # vLLM looks at every attribute of every module; torch warns about its deprecated ones.
        warnings.filterwarnings("ignore", ".*torch.distributed.reduce_op", FutureWarning)
        yield


class VLLMEngine:
    """An `Engine` on vLLM in this process. Under torchrun its start is collective.

    Args:
        model: a Hugging Face model folder.
        eos_ids: every id at which a completion ends.
        vocab_size: ids at or above it are never sampled (rows of a padded head).
        max_model_tokens: prompt and completion together, at most.
        kv_cache_bytes: the key-value cache's size.
        dtype: of weights and computation.
        device: "cuda" engines can sleep; on the CPU sleeping only changes the state.
        can_sleep: take memory from the allocator that can give it back (CUDA).
        stale: start without reading weights: they are handed over before the first request.
        on_step: called after each step of the engine, as a sign of life.

    Raises:
        ModelError: the model can't read that many tokens.
        RuntimeError: expandable segments together with sleep.
    """

    def __init__(
        self,
        model: str,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        max_model_tokens: int,
        kv_cache_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        can_sleep: bool = True,
        stale: bool = False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._sleeps = can_sleep and self._cuda
        if self._sleeps:
            refuse_expandable_segments()
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        _check_length(model, config, max_model_tokens)
        self._expected = expected_weights(config)
        self._eos_ids = sorted(set(eos_ids))
        self._max_model_tokens = max_model_tokens
        self._on_step = on_step
        self._state = EngineState(stale=stale)
        self._requests = 0
        vllm = _import()
        with _own_settings(), _quiet():
            self._llm: Any = vllm.LLM(
                model=model,
                skip_tokenizer_init=True,
                generation_config="vllm",
                load_format="dummy" if stale else "auto",
                dtype=str(dtype).removeprefix("torch."),
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else "uni",
                max_model_len=max_model_tokens,
                max_num_seqs=_MAX_SEQUENCES,
                kv_cache_memory_bytes=kv_cache_bytes,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                # Compiling takes longer than a small model's whole run.
                enforce_eager=not self._cuda,
                use_tqdm_on_load=False,
                seed=0,
                **({"enable_sleep_mode": True} if self._sleeps else {}),
                **({} if self._cuda else _cpu_options(max_model_tokens)),
            )
            self._llm.apply_model(lambda module: _hide_padded_ids(module, vocab_size))
        global _alive
        _alive += 1

    @property
    def version(self) -> int:
        """How many times weights were handed over."""
        return self._state.version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """Sample one completion per prompt.

        Args:
            prompts: token ids, at least one each.
            sampling: with temperature 0 the distribution is a point: its log-probabilities are 0.
            seeds: one integer in [0, 2^63) per prompt.

        Returns:
            Completions in the order of the prompts; log-probabilities in nats, float32, of the
            distribution sampled from: temperature and top-p applied, ids ≥ `vocab_size` left out.

        Raises:
            RuntimeError: the engine is asleep, closed or without complete weights, or logits
                aren't finite.
            ValueError: an empty prompt, one that leaves no room for `max_tokens`, or a setting
                out of range.
        """
        self._state.generate()
        _check_requests(prompts, sampling, seeds, self._max_model_tokens)
        first = self._requests
        self._requests += len(prompts)
        engine = self._llm.llm_engine
        found: dict[int, Completion] = {}
        # The sampler's helpers are compiled at their first use, which takes longer than all else.
        eager = nullcontext() if self._cuda else torch.compiler.set_stance("force_eager")
        with eager, _quiet():
            for n, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                tokens = {"prompt_token_ids": list(prompt)}
                engine.add_request(str(first + n), tokens, self._parameters(sampling, seed))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        n = int(output.request_id) - first
                        found[n] = _completion(output.outputs[0], sampling)
                self._on_step()
        return [found[n] for n in range(len(prompts))]

    def _parameters(self, sampling: Sampling, seed: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=seed,
            # 0: of the sampled id alone.
            logprobs=0,
            flat_logprobs=True,
            # vLLM knows one end id of its own; ours are all given as stop ids.
            ignore_eos=True,
            stop_token_ids=self._eos_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all weights, one after the other; tied ones need one name only.

        The prefix cache is emptied: it was computed with the old weights.

        Raises:
            RuntimeError: the engine is asleep or closed, or vLLM reports weights as not loaded.
            ValueError: a name that the model doesn't have, a shape that differs, two values for
                tied weights, or weights that were left out. Until a complete load the engine
                refuses to generate.
        """
        self._state.begin_load()
        stream = CheckedStream(weights, self._expected)
        with _quiet():
            left_out = self._llm.collective_rpc(_reload, args=(stream,))[0]
        stream.check()
        if left_out:
            raise RuntimeError(f"vLLM did not load {len(left_out)} weights, such as {left_out[0]}")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: requests are still running")
        self._state.end_load()

    def sleep(self, level: int = 1) -> None:
        """Give back the device's memory; level 2 drops the weights, level 1 keeps them on the host.

        On the CPU nothing is given back, but the engine refuses the same calls.
        """
        self._state.sleep(level)
        if self._sleeps:
            self._llm.sleep(level=level)

    def wake(self) -> None:
        """Take the memory again; after level 2 weights have to be handed over."""
        self._state.wake()
        if self._sleeps:
            self._llm.wake_up()

    def close(self) -> None:
        """Free everything; the engine can't be used afterwards."""
        if self._state.close():
            _shut_down(self._llm)
            self._llm = None


def _cpu_options(max_model_tokens: int) -> dict[str, Any]:
    return {
        "block_size": 32,  # the default of 128 would leave short prompts uncached
        # A prompt that is read in parts takes its generator back, which only CUDA's can.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, max_model_tokens),
    }


def _check_length(model: str, config: Any, max_model_tokens: int) -> None:
    longest = getattr(config, "max_position_embeddings", None) or max_model_tokens
    rope = getattr(config, "rope_scaling", None) or {}
    scaled = rope.get("rope_type", "default") != "default"  # vLLM knows how far that reaches
    if longest < max_model_tokens and not scaled:
        raise ModelError(
            f"model {model}: reads at most {longest} tokens, but --rollout's token budgets add up"
            f" to {max_model_tokens}; lower --rollout.max-…-tokens"
        )


def _check_requests(
    prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], limit: int
) -> None:
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt without tokens can't be continued")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1:
        raise ValueError(f"need temperature ≥ 0, 0 < top_p ≤ 1, max_tokens ≥ 1: {sampling}")
    longest = max(map(len, prompts), default=0)
    if longest + sampling.max_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and up to {sampling.max_tokens} sampled ones exceed the"
            f" engine's {limit}"
        )


def _completion(output: Any, sampling: Sampling) -> Completion:
    ids = list(output.token_ids)
    logprobs = [0.0] * len(ids) if sampling.temperature == 0 else list(output.logprobs.logprobs)
    if output.finish_reason not in ("stop", "length") or len(logprobs) != len(ids):
        raise RuntimeError(
            f"vLLM ended a request with {output.finish_reason!r} after {len(ids)} ids with"
            f" {len(logprobs)} log-probs"
        )
    if not np.isfinite(output.logprobs.logprobs).all():
        raise RuntimeError("the model's logits are not finite: its weights are broken")
    return Completion(ids, logprobs, output.finish_reason)


def _hide_padded_ids(module: Any, vocab_size: int) -> None:
    """Make the logits of ids ≥ `vocab_size` −inf, in front of every sampler that vLLM has."""
    compute_logits = module.compute_logits

    def without_padding(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits = compute_logits(*args, **kwargs)
        if logits is not None:
            logits[..., vocab_size:] = -torch.inf
        return logits

    module.compute_logits = without_padding


def _reload(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Replace a worker's weights; returns the parameters that vLLM did not load."""
    model = worker.get_model()
    names = {name for name, _ in model.named_parameters()}
    load_weights = model.load_weights
    loaded: set[str] = set()

    # vLLM compares them too, but only logs a warning.
    def recording(stream: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded.update(load_weights(stream))
        return loaded

    model.load_weights = recording
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    finally:
        del model.load_weights
    return sorted(names - loaded)


@contextmanager
def _own_settings() -> Iterator[None]:
    """Put back what starting an engine changes: random generators and the number of threads."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


_alive = 0  # engines in this process; the last one takes vLLM's process groups along


def _shut_down(llm: Any) -> None:
    """End an engine; the trainer's process group and the groups of other engines stay."""
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    def clean_up(shutdown_ray: bool = False) -> None:
        if _alive == 0:
            parallel_state.destroy_model_parallel()
            if parallel_state._WORLD is not None:
                parallel_state._WORLD.destroy()
            parallel_state._WORLD = parallel_state._NODE_COUNT = None

    global _alive
    _alive -= 1
    # vLLM's own ends torch.distributed as a whole.
    original, core.cleanup_dist_env_and_memory = core.cleanup_dist_env_and_memory, clean_up
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = original
