"""A student as the run sees it: its tokenizer, its chat, and engines for its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cotutor.rollout.chat import Chat
from cotutor.rollout.engine import Engine
from cotutor.rollout.models import load_tokenizer
from cotutor.rollout.prompts import FULL, PromptSet
from cotutor.rollout.tasks import TINY
from cotutor.trainer.config import Config, StudentConfig
from cotutor.trainer.engines import Role, start_engine
from cotutor.trainer.world import World

PROMPTS: dict[str, PromptSet] = {"full": FULL, "tiny": TINY}


@dataclass(frozen=True)
class Student:
    """One trained model's surroundings; the weights live in `Policy` and in engines."""

    config: StudentConfig
    tokenizer: Any
    chat: Chat
    prompts: PromptSet

    @property
    def name(self) -> str:
        return self.config.name

    @classmethod
    def load(cls, student: StudentConfig, config: Config) -> Student:
        """Load tokenizer and chat template. Raises ModelError or ChatError."""
        tokenizer = load_tokenizer(student.model, student.chat_template)
        chat = Chat(tokenizer, thinking=config.rollout.thinking)
        return cls(student, tokenizer, chat, PROMPTS[config.data.prompts])

    def start_engine(
        self, model_path: str, config: Config, world: World, role: Role = "evaluated"
    ) -> Engine:
        """An engine that serves the weights of `model_path`; collective."""
        return start_engine(self, model_path, config, world, role)
