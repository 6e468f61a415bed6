"""Tokenizers of the main families, trained on a few words, with minimal templates of our own."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from cotutor.rollout.chat import Chat
from cotutor.rollout.prompts import Message

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Qwen3's: thinking is kept only after the last user message, where an assistant's last turn
# without any gets an empty block; one can be forced into the generation prompt.
QWEN3 = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{% set text = '<think>\n' + thought + '\n</think>\n\n' + text.lstrip('\n') %}{% endif %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' "
    "else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Like Gemma 3's: a system message is written into the first user's turn, and turns must alternate.
GEMMA3 = (
    "{{ bos_token }}{% set prefix = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
    "{% set prefix = messages[0].content + '\n\n' %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "(prefix if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CORPUS = [
    "What is the magnitude of the particle's charge? Step by step, then the answer.",
    "user assistant system model\n\nThe correct step is missing:\n  12 + 30 = 42.\n",
    "<answer>42</answer> think im_start im_end start_of_turn end_of_turn INST",
] * 3


def added(texts: list[str], special: bool = True) -> list[AddedToken]:
    return [AddedToken(text, special=special, normalized=False) for text in texts]


def byte_level(specials: list[str], split: str | None = None) -> Tokenizer:
    """Byte-level BPE (GPT-2, Qwen, Llama 3): added tokens follow the model's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(added(specials))
    tokenizer.add_tokens(added(["<think>", "</think>"], special=False))
    return tokenizer


def byte_level_lines(specials: list[str]) -> Tokenizer:
    """Byte-level BPE as of Llama 3 and Qwen: a run of line breaks is one piece (GPT-2: two)."""
    return byte_level(
        specials,
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )


def spaces_as_signs(specials: list[str]) -> Tokenizer:
    """BPE over "▁" (Gemma): added tokens are in the vocabulary, runs of line breaks among them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    first = ["<unk>", *specials, *(f"<0x{n:02X}>" for n in range(256)), "\n\n"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    data = Tokenizer.from_str(tokenizer.to_str())
    return _only_added(data, [*added(["<unk>", *specials]), *added(["\n\n"], special=False)])


def metaspace(specials: list[str]) -> Tokenizer:
    """Unigram with a space in front of the first word only (Llama 2, T5)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", *specials],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _only_added(tokenizer: Tokenizer, tokens: list[AddedToken]) -> Tokenizer:
    """The tokenizer with these added tokens and no others (training marks all of `first`)."""
    spec = json.loads(tokenizer.to_str())
    wanted = {token.content: token.special for token in tokens}
    spec["added_tokens"] = [
        {**entry, "special": wanted[entry["content"]]}
        for entry in spec["added_tokens"]
        if entry["content"] in wanted
    ]
    return Tokenizer.from_str(json.dumps(spec))


@functools.cache
def family(name: str) -> Any:
    """A Hugging Face tokenizer with its template."""
    build, specials, template, options = {
        "chatml": (
            byte_level,
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            CHATML,
            {"eos_token": "<|endoftext|>"},
        ),
        "qwen3": (
            byte_level_lines,
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            QWEN3,
            {"eos_token": "<|im_end|>"},
        ),
        "llama3": (
            byte_level_lines,
            ["<|bos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            LLAMA3,
            {"bos_token": "<|bos|>", "eos_token": "<|eot_id|>"},
        ),
        "gemma": (
            spaces_as_signs,
            ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
            GEMMA,
            {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        ),
        "gemma3": (
            spaces_as_signs,
            ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
            GEMMA3,
            {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        ),
        "llama2": (
            metaspace,
            ["<s>", "</s>"],
            LLAMA2,
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        ),
    }[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build(specials), **options)
    tokenizer.chat_template = template
    assert tokenizer.pad_token is None
    return tokenizer


@functools.cache
def chat(name: str, thinking: bool | None = None) -> Chat:
    return Chat(family(name), thinking=thinking)


FAMILIES = ["chatml", "qwen3", "llama3", "gemma", "gemma3", "llama2"]


def rendered(name: str, messages: list[Message], **options: Any) -> list[int]:
    ids = family(name).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )
    return list(ids)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
