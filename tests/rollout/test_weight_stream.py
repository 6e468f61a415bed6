"""What is streamed into an engine: all of it, nothing else, tied weights under all their names."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotutor.rollout.weight_stream import CheckedStream, expected_weights


def small(tied: bool) -> tuple[Qwen3Config, dict[str, torch.Tensor]]:
    config = Qwen3Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return config, dict(Qwen3ForCausalLM(config).state_dict())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("left_out", ["", "lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_arrive_under_all_names(tied: bool, left_out: str) -> None:
    config, weights = small(tied)
    weights.pop(left_out, None)
    stream = CheckedStream(weights.items(), expected_weights(config))
    passed = dict(stream)
    if left_out and not tied:
        with pytest.raises(ValueError, match=f"1 weights were not loaded, such as '{left_out}'"):
            stream.check()
        return
    stream.check()
    assert passed.keys() == expected_weights(config).keys()
    if tied:
        assert torch.equal(passed["lm_head.weight"], passed["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(1)}, "no weight 'extra'"),
        ({"model.norm.weight": torch.zeros(3)}, r"'model.norm.weight' is \(8,\) .* got \(3,\)"),
        ({"lm_head.weight": torch.zeros(11, 8)}, "'lm_head.weight' is tied"),
    ],
)
def test_mistakes_end_the_stream(change: dict[str, torch.Tensor], message: str) -> None:
    config, weights = small(tied=True)
    stream = CheckedStream({**weights, **change}.items(), expected_weights(config))
    passed = dict(stream)
    assert not any(passed.get(name) is tensor for name, tensor in change.items())
    with pytest.raises(ValueError, match=message):
        stream.check()
