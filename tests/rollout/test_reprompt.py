"""The reprompt's budget: what is given up, in which order, and what never is."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_families import chat, family, user

from cotutor.rollout.chat import PromptTooLong, fit_reprompt
from cotutor.rollout.prompts import FULL
from cotutor.rollout.trajectory import Problem

PROBLEM = Problem(
    key="k", domain="d", question="What is 12 + 30?", gold="42", kind="numeric", source="f.jsonl:3"
)
DEMONSTRATION = "First, 12 + 30 is 42. Then it is checked: 42 - 30 is 12. <answer>42</answer>"
FEEDBACK = "The first step is right. The second step lacks a reason."


def fit(max_tokens: int, demonstration: str = DEMONSTRATION, feedback: str = FEEDBACK) -> Any:
    return fit_reprompt(chat("chatml"), FULL, PROBLEM, demonstration, feedback, max_tokens)


def between(text: str, left: str, right: str) -> str:
    return text.split(left)[1].split(right)[0] if left in text else ""


def test_reprompt_within_budget_is_whole() -> None:
    ids, cut = fit(10_000)
    text = family("chatml").decode(ids)
    assert DEMONSTRATION in text
    assert FEEDBACK in text
    assert cut == {"demonstration": 0, "feedback": 0}
    assert fit(len(ids))[1] == cut


def test_reprompt_gives_up_demonstration_from_its_start_then_feedback_from_its_end() -> None:
    this = chat("chatml")
    full = len(fit(10_000)[0])
    bare = len(this.prompt([{"role": "system", "content": FULL.system}, user(PROBLEM.question)]))
    heads = [FULL.demonstration.split("{")[0], FULL.feedback.split("{")[0]]
    seen = set()
    for budget in range(full - 1, bare - 1, -4):
        ids, cut = fit(budget)
        assert len(ids) <= budget
        text = family("chatml").decode(ids)
        assert PROBLEM.question in text
        shown = between(text, heads[0], f"\n\n{heads[1]}" if heads[1] in text else "\n\nNow ")
        said = between(text, heads[1], f"\n\n{FULL.closing}")
        assert DEMONSTRATION.endswith(shown)
        assert FEEDBACK.startswith(said)
        if said != FEEDBACK:
            assert shown == ""
        if shown or said:
            assert FULL.closing in text
        assert cut["demonstration"] == len(this.encode(DEMONSTRATION)) - len(this.encode(shown))
        assert cut["feedback"] == len(this.encode(FEEDBACK)) - len(this.encode(said))
        seen.add((bool(shown), bool(said)))
    assert seen == {(True, True), (False, True), (False, False)}
    with pytest.raises(PromptTooLong, match=r"f\.jsonl:3: .*--rollout\.max-reprompt-tokens"):
        fit(bare - 1)


def test_reprompt_uses_its_budget() -> None:
    full = len(fit(10_000)[0])
    for budget in range(full - 15, full):
        ids, cut = fit(budget)
        assert budget - len(ids) <= 3, "as little as possible is cut"
        assert 0 < cut["demonstration"] <= 20


def test_thinking_is_no_part_of_a_demonstration() -> None:
    ids, _ = fit(10_000, demonstration="<think>secret</think>\n\nshown")
    text = family("chatml").decode(ids)
    assert "secret" not in text
    assert "shown" in text
