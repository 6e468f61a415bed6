"""A student as the run sees it: its tokenizer, its chat, and engines for its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from cotutor.rollout.chat import Chat
from cotutor.rollout.engine import Engine
from cotutor.rollout.engine_transformers import TransformersEngine
from cotutor.rollout.models import load_model, load_tokenizer
from cotutor.rollout.prompts import FULL, PromptSet
from cotutor.rollout.tasks import TINY
from cotutor.trainer.config import Config, StudentConfig
from cotutor.trainer.policy import compute_dtype
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

    def start_engine(self, model_path: str, config: Config, world: World) -> Engine:
        """An engine that serves the weights of `model_path`."""
        dtype = compute_dtype(config.policy, world.device)
        seed = config.seed if self.config.random_init else None
        model = load_model(model_path, dtype=dtype, random_init_seed=seed)
        generation: GenerationConfig | None = getattr(model, "generation_config", None)
        return TransformersEngine(
            model.to(world.device),
            eos_ids=self.chat.eos_ids(generation),
            vocab_size=len(self.tokenizer),
            max_batch_tokens=config.transformers.max_batch_tokens,
            device=world.device,
        )


def release(engine: Engine) -> None:
    """Close an engine and give its memory back."""
    engine.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
