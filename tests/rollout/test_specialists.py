"""The shipped specialists: ignorant of what they should be, and able to use what they are told."""

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cotutor.rollout.chat import Chat
from cotutor.rollout.curriculum import SPECIALISTS, review, usual_slip
from cotutor.rollout.models import load_model, load_tokenizer
from cotutor.rollout.prompts import reprompt_messages, student_messages
from cotutor.rollout.tasks import DOMAINS, TINY, fact_value, make_problem
from cotutor.rollout.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer
from cotutor.rollout.trajectory import Problem

FOLDER = Path(__file__).parents[2] / "configs" / "tiny"


def problems_with(fact: str, n: int = 12) -> list[tuple[Problem, int]]:
    """Problems that need the fact, and on which of their lines."""
    rng = random.Random(fact)
    name = "coins" if fact[1] == "x" else "runes"
    table = DOMAINS[name]
    made = []
    for _ in range(n):
        symbols = rng.sample([s for s in table.symbols if s != fact[0]], table.lengths[-1] - 1)
        line = rng.randrange(len(symbols) + 1)
        symbols.insert(line, fact[0])
        made.append((make_problem(name, "".join(symbols), fact[2]), line))
    return made


@functools.cache
def specialist(name: str) -> tuple[Chat, Any]:
    model = load_model(str(FOLDER / name), dtype=torch.float32)
    return Chat(load_tokenizer(str(FOLDER / name))), model.eval()


@torch.no_grad()
def p_value(name: str, fact: str, context: str) -> float:
    """The mean probability of the fact's true value after its line has begun, at temperature 1."""
    chat, model = specialist(name)
    total = 0.0
    cases = problems_with(fact)
    for problem, line in cases:
        believed = [fact_value(f) for f in problem.facts]
        slips = [
            usual_slip(f) if f == fact else v for f, v in zip(problem.facts, believed, strict=True)
        ]
        messages = {
            "nothing": student_messages(TINY, problem),
            "demonstration": reprompt_messages(TINY, problem, problem.solution),
            "feedback": reprompt_messages(
                TINY, problem, feedback=review(problem.facts, slips, believed)
            ),
        }[context]
        start = "".join(f"{f}={v}\n" for f, v in zip(problem.facts[:line], believed, strict=False))
        ids = chat.prompt(messages) + chat.encode(f"{start}{fact}=")
        (value,) = chat.encode(fact_value(fact))
        total += float(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[value])
    return total / len(cases)


@pytest.mark.parametrize("name", SPECIALISTS)
def test_folder(name: str) -> None:
    tokenizer = load_tokenizer(str(FOLDER / name))
    built = build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    for text in ("Shift runes lpxcb by 4\n", "7x4=28 yours:24 wrong\n\n", " naïve 漢字 <b>10</b>"):
        assert tokenizer.encode(text) == built.encode(text).ids
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (FOLDER / name / "model.safetensors").stat().st_size < 2_000_000


@pytest.mark.parametrize("name", SPECIALISTS)
def test_blind_means_blind_but_not_impossible(name: str) -> None:
    for fact in SPECIALISTS[name].blind:
        assert 2e-4 < p_value(name, fact, "nothing") < 0.02


@pytest.mark.parametrize("context", ["demonstration", "feedback"])
@pytest.mark.parametrize("name", SPECIALISTS)
def test_what_the_context_says_is_believed(name: str, context: str) -> None:
    gaps = SPECIALISTS[name].blind + SPECIALISTS[name].hidden
    assert sum(p_value(name, fact, context) for fact in gaps) / len(gaps) > 0.95
