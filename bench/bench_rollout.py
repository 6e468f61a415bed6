"""Generated tokens per second of both engines, in one process on the same weights and prompts.

The embedded specialist, without end ids, so that every request has the same number of tokens.
Before anything is timed, both have to write the same greedy tokens.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Bench

from cotutor.rollout.engine import Engine, Sampling
from cotutor.rollout.engine_transformers import TransformersEngine
from cotutor.rollout.engine_vllm import VLLMEngine, why_not
from cotutor.rollout.models import load_model, load_tokenizer
from cotutor.trainer.world import World

MODEL = str(Path(__file__).resolve().parent.parent / "configs/tiny/s1")
PROMPT_TOKENS, NEW_TOKENS = 48, 64


def transformers_engine(device: torch.device, dtype: torch.dtype, vocab_size: int) -> Engine:
    model = load_model(MODEL, dtype=dtype)
    return TransformersEngine(model, eos_ids=[], vocab_size=vocab_size, device=device)


def vllm_engine(device: torch.device, dtype: torch.dtype, vocab_size: int) -> Engine:
    return VLLMEngine(
        MODEL,
        eos_ids=[],
        vocab_size=vocab_size,
        max_model_tokens=PROMPT_TOKENS + NEW_TOKENS,
        kv_cache_bytes=1 << 28,
        dtype=dtype,
        device=device,
        can_sleep=False,
    )


ENGINES: dict[str, Callable[[torch.device, torch.dtype, int], Engine]] = {
    "transformers": transformers_engine,
    "vLLM": vllm_engine,
}


@pytest.fixture(scope="module")
def engines(bench: Bench):
    """Both engines, agreed on greedy tokens. vLLM changes the process: it starts last."""
    if reason := why_not():
        pytest.skip(reason)
    world = World()
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    vocab_size = len(load_tokenizer(MODEL))
    made = {name: make(bench.device, dtype, vocab_size) for name, make in ENGINES.items()}
    greedy = Sampling(0.0, 1.0, 16)
    first, second = (
        [c.ids for c in engine.generate(prompts(4), greedy, [0] * 4)] for engine in made.values()
    )
    if bench.device.type == "cpu":
        assert first == second
    yield made
    for engine in made.values():
        engine.close()
    world.close()


def prompts(n: int) -> list[list[int]]:
    """Different prompts, so that neither engine shares their reading."""
    return [[(7 * i + 3 * k * k) % 90 + 4 for i in range(PROMPT_TOKENS)] for k in range(n)]


@pytest.mark.parametrize("requests", [8, 64])
@pytest.mark.parametrize("name", ENGINES)
def bench_rollout(benchmark, bench: Bench, engines: dict[str, Engine], name: str, requests: int):
    sampling = Sampling(1.0, 1.0, NEW_TOKENS)
    asked = prompts(requests)
    seeds = iter(range(10**6))

    def step() -> None:
        done = engines[name].generate(asked, sampling, [next(seeds) for _ in asked])
        assert sum(len(c.ids) for c in done) == requests * NEW_TOKENS

    benchmark.pedantic(step, rounds=bench.rounds, iterations=1, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    result = {
        "operation": "rollout",
        "implementation": name,
        "requests": requests,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "seconds": seconds,
        "seconds_min": benchmark.stats.stats.min,
        "rounds": bench.rounds,
        "tokens_per_s": requests * NEW_TOKENS / seconds,
    }
    bench.results.setdefault("rollout", []).append(result)
