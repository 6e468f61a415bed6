"""The embedded engine against plain forwards of small random models."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cotutor.rollout.engine import Engine, Sampling
from cotutor.rollout.engine_transformers import TransformersEngine, draw

VOCAB = 37  # real ids; the models' embeddings are padded to 48 rows
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen3(**options: object) -> torch.nn.Module:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, initializer_range=0.3, **options))


def llama(**options: object) -> torch.nn.Module:
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3, **options))


def sliding() -> torch.nn.Module:
    torch.manual_seed(3)
    kinds = ["sliding_attention", "full_attention"]
    return Qwen3ForCausalLM(
        Qwen3Config(
            **SIZES,
            head_dim=8,
            initializer_range=0.3,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=kinds,
        )
    )


def gpt2() -> torch.nn.Module:
    torch.manual_seed(4)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    )


def engine(model: torch.nn.Module, eos: tuple[int, ...] = (), **options: int) -> TransformersEngine:
    return TransformersEngine(model, eos_ids=eos, vocab_size=VOCAB, pad_id=0, **options)


def make_prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(n)]


def full_logprobs(
    model: torch.nn.Module, prompt: list[int], ids: list[int], temperature: float
) -> torch.Tensor:
    """Log-probs of `ids` after `prompt` from one uncached forward without padding."""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + ids])).logits[0, :, :VOCAB]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("build", [qwen3, llama, sliding, gpt2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampled_distribution(build, temperature: float) -> None:
    model = build()
    prompts = make_prompts(9)
    prompts += [prompts[0], prompts[3], prompts[3]]  # shared prefills
    done = engine(model, eos=(5, 11)).generate(
        prompts, Sampling(temperature, 1.0, 40), list(range(len(prompts)))
    )
    assert len({len(c.ids) for c in done}) > 3, "rows should end at different steps"
    for prompt, completion in zip(prompts, done, strict=True):
        expected = full_logprobs(model, prompt, completion.ids, temperature)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("build", [qwen3, llama])
def test_a_request_does_not_depend_on_its_batch(build) -> None:
    model, prompts = build(), make_prompts(12)
    sampling, seeds = Sampling(1.0, 0.9, 30), [1000 + i for i in range(12)]
    together = engine(model, eos=(5,)).generate(prompts, sampling, seeds)
    one_by_one = [
        engine(model, eos=(5,)).generate([p], sampling, [s])[0]
        for p, s in zip(prompts, seeds, strict=True)
    ]
    split = engine(model, eos=(5,), max_batch_tokens=150).generate(prompts, sampling, seeds)
    turned = engine(model, eos=(5,)).generate(prompts[::-1], sampling, seeds[::-1])[::-1]
    for other in (one_by_one, split, turned):
        assert [c.ids for c in other] == [c.ids for c in together]
        assert [c.finish_reason for c in other] == [c.finish_reason for c in together]


def test_seeds_decide() -> None:
    model, prompt = qwen3(), [1, 2, 3]
    run = engine(model)
    first = run.generate([prompt] * 3, Sampling(max_tokens=20), [7, 8, 7])
    # Rows of one batch may round differently; what is drawn is a function of the seed.
    assert first[0].ids == first[2].ids
    assert first[0].logprobs == pytest.approx(first[2].logprobs, abs=1e-5)
    assert first[0].ids != first[1].ids
    assert run.generate([prompt], Sampling(max_tokens=20), [2**64 - 1])[0].ids != first[0].ids


def test_the_global_generator_is_left_alone() -> None:
    model = qwen3()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    engine(model).generate([[1, 2]], Sampling(max_tokens=5), [0])
    assert torch.equal(torch.get_rng_state(), before)


def test_every_end_id_stops_and_reasons_say_so() -> None:
    prompts = make_prompts(40)
    eos = (5, 11, 23)
    done = engine(qwen3(), eos).generate(prompts, Sampling(max_tokens=25), list(range(40)))
    assert {c.ids[-1] for c in done if c.finish_reason == "stop"} == set(eos)
    for completion in done:
        assert not set(completion.ids[:-1]) & set(eos)
        stopped = completion.ids[-1] in eos
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert len(completion.ids) == len(completion.logprobs)
        assert stopped or len(completion.ids) == 25
    assert any(c.finish_reason == "length" for c in done)


def test_an_end_id_as_the_last_allowed_token_is_a_stop() -> None:
    done = engine(qwen3(), tuple(range(VOCAB))).generate([[1]], Sampling(max_tokens=1), [0])
    assert done[0].finish_reason == "stop"
    assert len(done[0].ids) == 1


def test_padded_rows_of_the_vocabulary_are_never_sampled() -> None:
    model = qwen3()
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 50 * model.lm_head.weight[:1]  # would win half of the time
    done = engine(model).generate([[1, 2]] * 50, Sampling(max_tokens=20), list(range(50)))
    assert max(max(c.ids) for c in done) < VOCAB


def test_greedy_takes_the_most_likely_with_log_probability_zero() -> None:
    model, prompt = qwen3(), [3, 1, 4]
    done = engine(model).generate([prompt], Sampling(temperature=0.0, max_tokens=6), [0])[0]
    ids = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :VOCAB].argmax()))
    assert done.ids == ids[3:]
    assert done.logprobs == [0.0] * 6


def test_draw_samples_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -3.0]])
    n = 200_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # every quantile once
    ids, logprobs = draw(logits.expand(n, -1), uniforms, Sampling(temperature=0.7))
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    torch.testing.assert_close(ids.bincount(minlength=5) / n, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[ids], atol=1e-6, rtol=1e-6)


def test_draw_with_top_p_renormalises_the_smallest_sufficient_set() -> None:
    probs = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    n = 10_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ids, logprobs = draw(probs.log().expand(n, -1), uniforms, Sampling(top_p=0.6))
    expected = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.0]) / 0.7
    torch.testing.assert_close(ids.bincount(minlength=5) / n, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[ids], atol=1e-6, rtol=1e-6)
    only, zero = draw(probs.log()[None], uniforms[:1], Sampling(top_p=1e-9))
    assert (only.item(), zero.item()) == (1, 0.0)


def test_extreme_uniforms_hit_ids_that_have_mass() -> None:
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 10], logits[:, 20] = 0.0, 0.0
    uniforms = torch.tensor([0.5 * 2.0**-32, 1 - 0.5 * 2.0**-32], dtype=torch.float64)
    assert draw(logits, uniforms, Sampling())[0].tolist() == [10, 20]


def test_broken_weights_are_named() -> None:
    model = qwen3()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(RuntimeError, match="not finite"):
            engine(model).generate([[1]], Sampling(temperature, 1.0, 3), [0])


def test_load_weights_equals_a_fresh_engine() -> None:
    model, other = qwen3(), qwen3()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    prompts, sampling = make_prompts(5), Sampling(max_tokens=12)
    run = engine(model)
    stale = run.generate(prompts, sampling, [0] * 5)
    run.load_weights(other.state_dict().items())
    new = run.generate(prompts, sampling, [0] * 5)
    assert new == engine(other).generate(prompts, sampling, [0] * 5)
    assert new != stale


@pytest.mark.parametrize("given", ["embedding", "head", "both"])
def test_tied_heads_stay_tied(given: str) -> None:
    model = qwen3(tie_word_embeddings=True)
    weights = {k: v + 1.0 for k, v in model.state_dict().items()}
    if given == "embedding":
        del weights["lm_head.weight"]
    elif given == "head":
        del weights["model.embed_tokens.weight"]
    engine(model).load_weights(weights.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in weights.items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


def test_wrong_weights_are_refused_and_block_generation() -> None:
    run = engine(qwen3(tie_word_embeddings=True))
    good = {k: v.clone() for k, v in run._model.state_dict().items()}
    cases = [
        ({**good, "extra": torch.zeros(1)}, "no weight 'extra'"),
        ({k: v for k, v in good.items() if "layers.1.mlp" not in k}, "3 weights were not loaded"),
        ({**good, "model.norm.weight": torch.zeros(3)}, r"'model.norm.weight' is \(32,\)"),
        ({**good, "lm_head.weight": good["lm_head.weight"] + 1}, "tied"),
    ]
    for weights, message in cases:
        with pytest.raises(ValueError, match=message):
            run.load_weights(weights.items())
        with pytest.raises(RuntimeError, match="partly loaded"):
            run.generate([[1]], Sampling(max_tokens=1), [0])
        run.load_weights(good.items())
        run.generate([[1]], Sampling(max_tokens=1), [0])


def test_state_machine() -> None:
    run: Engine = engine(qwen3())
    before = run.generate([[1]], Sampling(max_tokens=4), [0])
    run.sleep()
    for call in (
        lambda: run.generate([[1]], Sampling(max_tokens=1), [0]),
        lambda: run.load_weights([]),
        run.sleep,
    ):
        with pytest.raises(RuntimeError, match="the engine is asleep"):
            call()
    run.wake()
    with pytest.raises(RuntimeError, match="the engine is ready, not asleep"):
        run.wake()
    assert run.generate([[1]], Sampling(max_tokens=4), [0]) == before
    run.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        run.generate([[1]], Sampling(max_tokens=1), [0])


def test_dropout_is_off_and_the_mode_is_restored() -> None:
    model = qwen3(attention_dropout=0.9).train()
    run, sampling = engine(model), Sampling(max_tokens=10)
    assert run.generate([[1, 2]], sampling, [0]) == run.generate([[1, 2]], sampling, [0])
    assert model.training


@pytest.mark.parametrize(
    ("prompts", "sampling", "seeds", "message"),
    [
        ([[1], []], Sampling(), [0, 1], "without tokens"),
        ([[1]], Sampling(), [0, 1], "as many seeds"),
        ([[1]], Sampling(temperature=-1.0), [0], "temperature"),
        ([[1]], Sampling(top_p=0.0), [0], "top_p"),
        ([[1]], Sampling(max_tokens=0), [0], "max_tokens"),
    ],
)
def test_bad_requests(prompts, sampling: Sampling, seeds: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(qwen3()).generate(prompts, sampling, seeds)


def test_no_request_is_no_work() -> None:
    assert engine(qwen3()).generate([], Sampling(), []) == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_plain_forward_and_sleeps() -> None:
    model = qwen3()
    run = engine(model, eos=(5,), device="cuda")  # type: ignore[arg-type]
    prompts = make_prompts(6)
    done = run.generate(prompts, Sampling(max_tokens=20), list(range(6)))
    run.sleep()
    assert all(p.device.type == "cpu" for p in model.parameters())
    for prompt, completion in zip(prompts, done, strict=True):
        expected = full_logprobs(model, prompt, completion.ids, 1.0)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4
        )
    run.wake()
    assert run.generate(prompts, Sampling(max_tokens=20), list(range(6))) == done
