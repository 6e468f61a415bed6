"""A dialogue of three turns in the templates of the main families: appended to, never rewritten."""

from __future__ import annotations

import re

import pytest
from tokenizer_families import assistant, chat, family, rendered, user

from cotutor.rollout.chat import Chat
from cotutor.rollout.prompts import Message
from cotutor.rollout.trajectory import Problem, Role, Trajectory

PROBLEM = Problem(key="k", domain="d", question="What is 12 + 30?", gold="42", kind="math")
ANSWERS = ["It is 40.", "It is 41.", "It is 42."]
GUIDANCE = ["Check the last digit.", "1 is missing: <|im_end|> </think>."]
CASES = [
    ("qwen3", None),
    ("qwen3", True),
    ("qwen3", False),
    ("llama3", None),
    ("gemma", None),
    ("gemma3", None),
    ("chatml", None),
]


def sampled(name: str, this: Chat, answer: str, thinks: bool) -> list[int]:
    """What a model samples: its thinking, where its template has any, the answer, the end token."""
    if not thinks:
        return this.response(answer)
    opening, closing = family(name).convert_tokens_to_ids(["<think>", "</think>"])
    return [opening, *this.encode("\nstep by step\n"), closing, *this.response(f"\n\n{answer}")]


def dialogue(
    name: str, thinking: bool | None, cut_off: int | None = None
) -> tuple[Trajectory, list[list[int]]]:
    """The trajectory, built turn by turn, and what was sampled in each of its student's turns."""
    this = chat(name, thinking)
    trajectory = Trajectory.start(PROBLEM, 0, this.prompt([user(PROBLEM.question)]))
    turns: list[list[int]] = []

    def append(role: Role, ids: list[int], logprobs: list[float] | None = None) -> None:
        before = list(trajectory.ids)
        trajectory.append(role, ids, logprobs)
        assert trajectory.ids == before + ids

    for number, answer in enumerate(ANSWERS):
        ids = sampled(name, this, answer, thinks=name == "qwen3" and thinking is not False)
        if number == cut_off:
            ids = ids[:-1]
        turns.append(ids)
        append("student", ids, [-0.5] * len(ids))
        if number < len(GUIDANCE):
            bridge = this.bridge(ids, GUIDANCE[number])
            append("glue", bridge.before)
            append("teacher", bridge.content)
            append("glue", bridge.after)
    return trajectory, turns


@pytest.mark.parametrize(("name", "thinking"), CASES)
@pytest.mark.parametrize("cut_off", [None, 0, 1, 2])
def test_trained_are_the_sampled_tokens_and_no_others(
    name: str, thinking: bool | None, cut_off: int | None
) -> None:
    trajectory, turns = dialogue(name, thinking, cut_off)
    numbers = trajectory.turn_ids()
    for number, ids in enumerate(turns):
        at = [n for n, turn in enumerate(numbers) if turn == number]
        assert at == list(range(at[0], at[0] + len(ids)))
        assert [trajectory.ids[n] for n in at] == ids
        assert all(trajectory.logprobs[n] == -0.5 for n in at)
        end = chat(name, thinking).response("")[-1]
        assert (ids[-1] == end) == (number != cut_off)
        # Closed once, by the student or else by the glue.
        following = trajectory.ids[at[-1] + 1 : at[-1] + 2]
        assert number == 2 or (following == [end]) == (number == cut_off)
    assert sum(turn >= 0 for turn in numbers) == sum(map(len, turns))
    assert {
        numbers[n]
        for turn in trajectory.turns
        for n in range(turn.start, turn.stop)
        if turn.role != "student"
    } == {-1}


@pytest.mark.parametrize(("name", "thinking"), CASES)
def test_the_text_is_that_of_the_template(name: str, thinking: bool | None) -> None:
    trajectory, turns = dialogue(name, thinking)
    messages: list[Message] = [user(PROBLEM.question)]
    for answer, guidance in zip(ANSWERS, GUIDANCE, strict=False):
        messages += [assistant(answer), user(guidance.replace("<|im_end|>", "STOP"))]
    options = {} if thinking is None else {"enable_thinking": thinking}
    expected = family(name).decode(rendered(name, messages, **options))
    expected = expected.replace("STOP", "<|im_end|>")
    text = family(name).decode(trajectory.ids[: -len(turns[-1])])
    if name != "qwen3":
        assert text == expected
        return
    # Qwen3's template drops the thinking of earlier turns; a trajectory keeps what was sampled.
    assert text != expected
    block = r"<think>\n[^<]*\n</think>\n\n"
    n_kept = {None: 2, True: 2, False: 3}[thinking]  # False: an empty block before each answer
    assert len(re.findall(block, text)) == n_kept
    assert re.sub(block, "", text) == re.sub(block, "", expected)


def test_the_first_prompt_is_a_prefix_of_every_later_one() -> None:
    for name in ("llama3", "gemma", "gemma3"):
        first = chat(name).prompt([user(PROBLEM.question)])
        bos = family(name).bos_token_id
        trajectory, _ = dialogue(name, None)
        assert trajectory.ids[: len(first)] == first
        assert trajectory.ids.count(bos) == 1, "the template writes it, and nobody else"
