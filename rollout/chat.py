"""From messages to token ids and back, with the contents always plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotutor.rollout.problems import DataError
from cotutor.rollout.prompts import Message, PromptSet
from cotutor.rollout.trajectory import Problem


class ChatError(DataError):
    """A tokenizer or chat template that can't be used."""


class PromptTooLong(DataError):
    """A prompt whose uncuttable part alone exceeds its budget."""


class Chat:
    """Renders messages with a tokenizer's chat template; foreign text can't act as a token of it."""

    def __init__(self, tokenizer: Any, *, thinking: bool | None = None) -> None:
        raise NotImplementedError

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the messages and of the generation prompt."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """The ids of a plain text."""
        raise NotImplementedError

    def response(self, text: str) -> list[int]:
        """The ids of a text as a model would sample it: the text and the turn's end token."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        raise NotImplementedError

    def eos_ids(self, generation_config: Any = None) -> set[int]:
        """All ids at which a response ends."""
        raise NotImplementedError

    def bridge(self, response_ids: Sequence[int], user: str) -> list[int]:
        """The ids between a sampled response and the next one: append them, sample on."""
        raise NotImplementedError


def fit_reprompt(
    chat: Chat,
    prompts: PromptSet,
    problem: Problem,
    demonstration: str,
    feedback: str,
    max_tokens: int,
) -> tuple[list[int], dict[str, int]]:
    """The reprompt within a budget, and the tokens cut: {"demonstration": n, "feedback": n}."""
    raise NotImplementedError
