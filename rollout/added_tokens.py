"""A tokenizer whose added tokens go by secret names, so that no text can spell one."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from cotutor.rollout.problems import DataError


class ChatError(DataError):
    """A tokenizer or chat template that can't be used."""


def rename_added_tokens(backend: Any, secret: str) -> tuple[Tokenizer, dict[str, str], int | None]:
    """Copy a tokenizer, with a secret name for every added token.

    Added tokens of nothing but white space keep theirs: they are spelling, not structure.

    Args:
        backend: a `tokenizers.Tokenizer`.
        secret: a part of each name that no text can guess.

    Returns:
        The copy, the secret names by the tokens' contents, and the id of the unknown token or None.

    Raises:
        ChatError: an added token whose id the copy would change.
    """
    spec = json.loads(backend.to_str())
    spec["post_processor"] = spec["padding"] = spec["truncation"] = None
    names: dict[str, str] = {}
    for token in spec["added_tokens"]:
        if token["content"].strip(" \t\r\n▁"):
            names[token["content"]] = f"\ue000{secret}n{token['id']}\ue001"
            token["content"] = names[token["content"]]
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    else:  # unigram: [text, score] by id
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    unknown = model.get("unk_id")
    if model.get("unk_token") is not None:
        unknown = backend.token_to_id(model["unk_token"])
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            pair
            for pair in model["merges"]
            if not names.keys() & {pair[0], pair[1], pair[0] + pair[1]}
        ]
    encoder = Tokenizer.from_str(json.dumps(spec))
    for content, name in names.items():
        if encoder.token_to_id(name) != backend.token_to_id(content):
            raise ChatError(f"the added token {content!r} has an id out of order in tokenizer.json")
    return encoder, names, unknown
