"""The tokenizer of the embedded models: bytes, and one token for each word and tag they use."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The products, and the slips beside them, with two digits.
_NUMBERS = [str(n) for n in range(10, 91) if any(n % k == 0 and n <= 10 * k for k in range(2, 10))]
WORDS = (
    *("Times", " coins", "Shift", " runes", " by"),
    *("Example:", "Tutor:", "Solve", " again.", "Review", " with", " concept."),
    *(" ok", " wrong", "all"),
    *("<answer>", "</answer>", "<concept>", "</concept>"),
    *("coins", "runes", "problem", "user", "assistant", " yours:", "\n\n"),
    *_NUMBERS,
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """Build it: a pre-token that is one of `WORDS` is one id, and every other one is its bytes.

    No text is lost or changed, whatever it holds: there is no unknown token.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*letters, *SPECIALS, *(word.replace(" ", "Ġ").replace("\n", "Ċ") for word in WORDS)]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    words = Regex(r"</?[a-z]+>| ?[A-Za-z]+[:.]?|\n\n|\s|[0-9]+|[^\sA-Za-z0-9<]+|<")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return tokenizer
