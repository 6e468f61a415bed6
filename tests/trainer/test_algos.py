"""What each algorithm puts on rollouts and computes from them, by hand-worked examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cotutor.rollout.trajectory import Feedback, Problem, Trajectory
from cotutor.trainer.algos.base import Heads, Phase, Rows, StepContext, Tutor
from cotutor.trainer.algos.grpo import GRPO, GRPOConfig, group_advantages
from cotutor.trainer.algos.opcod import OPCoD, OPCoDConfig, assign_tutors, gate_deltas
from cotutor.trainer.algos.sdpo import SDPO, SDPOConfig, demonstration_for
from cotutor.trainer.algos.sft import SFT, SFTConfig

QUESTION = "Which enzyme cuts the plasmid?"


def rollout(sample: int, reward: float, domain: str = "a", text: str = "") -> Trajectory:
    problem = Problem("key", domain, QUESTION, gold="A", kind="mcq")
    t = Trajectory.start(problem, sample, [1, 2])
    t.append("student", [3, 4, 5], [-1.0, -1.0, -1.0])
    t.reward, t.text = reward, text or f"answer {sample}"
    return t


def context(tutors: Sequence[Tutor] = ()) -> StepContext:
    def reprompt(problem: Problem, demonstration: str, feedback: str) -> list[int] | None:
        return [len(demonstration), len(feedback)] if demonstration or feedback else None

    return StepContext(tutors, reprompt, seed=lambda *key: hash(key) >> 1)


def tutor(name: str, *, cognizant: bool = True, best: Sequence[str] = (), says: str = "") -> Tutor:
    def write(requests: Sequence[tuple[Any, str, int]]) -> list[str]:
        return [says or f"<concept>enzyme</concept> {name} read {text}" for _, text, _ in requests]

    return Tutor(name, cognizant, frozenset(best), write)


# --- SDPO ---------------------------------------------------------------------------------------


def test_the_demonstration_is_the_earliest_right_rollout_of_somebody_else() -> None:
    group = [rollout(0, 0), rollout(1, 1), rollout(2, 1)]
    assert demonstration_for(group, 0, exclude_self=True) == "answer 1"
    assert demonstration_for(group, 1, exclude_self=True) == "answer 2"
    assert demonstration_for(group, 1, exclude_self=False) == "answer 1"
    assert demonstration_for([rollout(0, 1), rollout(1, 0)], 0, exclude_self=True) == ""
    thoughts = rollout(0, 1, text="<think>nothing else</think>")
    assert demonstration_for([thoughts, rollout(1, 1)], 2, exclude_self=True) == "answer 1"


def test_rollouts_without_context_are_masked_and_counted() -> None:
    group = [rollout(0, 0), rollout(1, 0)]
    sdpo = SDPO(SDPOConfig())
    counts = sdpo.annotate([group], context())
    assert counts == {"with_demonstration": 0, "with_feedback": 0, "without_context": 2}
    assert [sdpo.row_weights(r) for r in group] == [0.0, 0.0]
    unmasked = SDPO(SDPOConfig(mask_without_context=False))
    unmasked.annotate([group], context())
    assert group[0].teacher_prompt_ids == [1, 2]  # its own prompt
    assert unmasked.row_weights(group[0]) == pytest.approx(1 / 3)


def three_token_case() -> tuple[Heads, Rows]:
    # One row, three tokens: the head is the identity, so hidden states are logits.
    student = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).requires_grad_()
    teacher = torch.log(torch.tensor([[0.2, 0.3, 0.5]]))
    eye = torch.eye(3)
    rows = Rows(
        targets=torch.tensor([0]),
        turn_ids=torch.tensor([0], dtype=torch.int32),
        sequence_ids=torch.tensor([0], dtype=torch.int32),
        rollout_logprobs=torch.log(torch.tensor([0.25])),  # importance weight 0.5/0.25 = 2
        advantages=torch.tensor([0.5]),
        weights=torch.tensor([0.25]),
        sampled=torch.tensor([True]),
        temperature=1.0,
    )
    return Heads(student, eye.clone().requires_grad_(), teacher, eye), rows


def test_sdpo_s_loss_and_gradient_on_three_tokens_by_hand() -> None:
    heads, rows = three_token_case()
    # K = 1 keeps token 0 and one tail: buckets S = (.5, .5), T = (.2, .8), M = (.35, .65).
    result = SDPO(SDPOConfig(k=1)).loss(heads, rows)
    kl_s = 0.5 * math.log(0.5 / 0.35) + 0.5 * math.log(0.5 / 0.65)
    kl_t = 0.2 * math.log(0.2 / 0.35) + 0.8 * math.log(0.8 / 0.65)
    weight = 0.25 * 2.0
    assert result.loss.item() == pytest.approx(weight * 0.5 * (kl_s + kl_t), rel=1e-5)
    result.loss.backward()
    h0, h_tail = 0.25 * math.log(0.5 / 0.35), 0.25 * math.log(0.5 / 0.65)
    total = h0 + h_tail
    inside = h0 - 0.5 * total
    outside = [p * (h_tail / 0.5 - total) for p in (0.3, 0.2)]
    expected = weight * torch.tensor([[inside, *outside]])
    torch.testing.assert_close(heads.hidden.grad, expected, rtol=1e-4, atol=1e-7)
    # d logits / d weight: the hidden state, here the log-probabilities.
    outer = expected.T @ heads.hidden.detach()
    torch.testing.assert_close(heads.weight.grad, outer, rtol=1e-4, atol=1e-7)


def test_sdpo_s_importance_weight_is_truncated() -> None:
    heads, rows = three_token_case()
    plain = SDPO(SDPOConfig(k=1)).loss(heads, rows).loss.item()
    capped = SDPO(SDPOConfig(k=1, importance_upper=1.5)).loss(heads, rows).loss.item()
    assert capped == pytest.approx(plain * 1.5 / 2.0, rel=1e-5)


# --- OPCoD --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"i": {"a": 100, "b": 70}, "j": {"a": 70, "b": 100}}, {"i": 0.3, "j": 0.3}),
        ({"i": {"a": 0.8, "b": 0.9}, "j": {"a": 0.8, "b": 0.6}}, {"i": 0.0, "j": 1 / 3}),
        ({"i": {"a": 0.0, "b": 0.5}, "j": {"a": 0.0, "b": 0.4}}, {"i": 0.0, "j": 0.2}),
        ({"i": {"a": 0.0}, "j": {"a": 0.0}}, {"i": 0.0, "j": 0.0}),
        (
            {"i": {"a": 0.5, "b": 0.0}, "j": {"a": 0.0, "b": 0.5}, "k": {"a": 0.5, "b": 0.5}},
            {"i": 1.0, "j": 1.0, "k": 0.0},
        ),
    ],
)
def test_gate_arithmetic(scores: dict[str, dict[str, float]], expected: dict[str, float]) -> None:
    assert gate_deltas(scores) == pytest.approx(expected)


def test_two_one_sided_students_are_both_silent() -> None:
    gate = OPCoD(OPCoDConfig()).gate({"i": {"a": 100, "b": 70}, "j": {"a": 70, "b": 100}})
    assert {name: g[1] for name, g in gate.items()} == {"i": False, "j": False}
    assert gate["i"][2] == {"a"}
    assert gate["j"][2] == {"b"}


def test_the_gate_s_modes_choose_who_may_speak() -> None:
    tutors = [tutor("loud"), tutor("silent", cognizant=False, best=["b"])]

    def names(gate: str, domain: str) -> list[str]:
        return [t.name for t in assign_tutors(tutors, rollout(0, 0, domain), gate)]

    assert names("cognizance", "b") == ["loud"]
    assert names("domain_selective", "a") == ["loud"]
    assert names("domain_selective", "b") == ["loud", "silent"]
    assert names("always", "a") == ["loud", "silent"]
    assert names("never", "a") == []


def test_a_delta_of_exactly_tau_is_still_cognizant() -> None:
    scores = {"i": {"a": 0.75, "b": 0.5}, "j": {"a": 0.6, "b": 0.5}}  # (0.75 − 0.6)/0.75 = 0.2
    assert OPCoD(OPCoDConfig()).gate(scores)["j"].cognizant


def test_only_peers_that_may_speak_get_an_engine() -> None:
    for gate, expected in {
        "cognizance": (True, False),
        "never": (False, False),
        "always": (True, True),
        "domain_selective": (True, True),
    }.items():
        opcod = OPCoD(OPCoDConfig(gate=gate))  # type: ignore[arg-type]
        assert (opcod.may_speak(True), opcod.may_speak(False)) == expected


def test_phases_alternate_within_rounds() -> None:
    schedule = OPCoD(OPCoDConfig(rounds=2, steps=3)).schedule(2, n_problems=9, steps=0)
    assert schedule == [Phase(1, 0, 3), Phase(1, 1, 3), Phase(2, 0, 3), Phase(2, 1, 3)]


def test_feedback_reaches_the_teacher_and_what_fails_the_filter_is_dropped() -> None:
    group = [rollout(0, 1), rollout(1, 0)]
    counts = OPCoD(OPCoDConfig()).annotate([group], context([tutor("peer")]))
    assert counts["feedback/match"] == 2
    assert counts["with_feedback"] == 2
    assert group[1].feedback is not None
    assert group[1].feedback.outcome == "match:enzyme"
    assert "answer 1" in group[1].feedback.text
    assert "concept" not in group[1].feedback.text

    group = [rollout(0, 1), rollout(1, 0)]
    counts = OPCoD(OPCoDConfig()).annotate([group], context([tutor("peer", says="no anchor")]))
    assert counts["feedback/no_concept_tag"] == 2
    assert counts["with_feedback"] == 0
    # Falls back to the demonstration alone; the only right rollout has none.
    assert group[0].teacher_prompt_ids is None
    assert group[1].teacher_prompt_ids == [len("answer 0"), 0]


def test_several_tutors_take_turns() -> None:
    group = [rollout(n, 0) for n in range(4)]
    OPCoD(OPCoDConfig()).annotate([group], context([tutor("p"), tutor("q")]))
    assert [r.feedback.tutor for r in group if r.feedback] == ["p", "q", "p", "q"]


def test_thinking_is_hidden_from_the_tutor() -> None:
    group = [rollout(0, 0, text="<think>secret</think>shown")]
    OPCoD(OPCoDConfig()).annotate([group], context([tutor("peer")]))
    assert isinstance(group[0].feedback, Feedback)
    assert "shown" in group[0].feedback.raw
    assert "secret" not in group[0].feedback.raw


# --- GRPO and SFT -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "normalize", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], True, [0, 0, 0, 0]),
        ([0.0, 0.0, 0.0], True, [0, 0, 0]),
        ([1.0], True, [0]),
        ([1.0, 0.0], False, [0.5, -0.5]),
        ([1.0, 0.0, 0.0, 0.0], True, [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]),
    ],
)
def test_group_advantages(rewards: list[float], normalize: bool, expected: list[float]) -> None:
    assert group_advantages(rewards, normalize) == pytest.approx(expected)


def test_grpo_counts_groups_without_a_signal() -> None:
    grpo = GRPO(GRPOConfig())
    groups = [[rollout(0, 1), rollout(1, 1)], [rollout(0, 0)], [rollout(0, 1), rollout(1, 0)]]
    counts = grpo.annotate(groups, context())
    assert counts == {"groups": 3, "groups_all_right": 1, "groups_all_wrong": 1}
    assert grpo.row_weights(groups[0][0]) == 0.0
    assert grpo.row_weights(groups[2][0]) == 1.0


def test_grpo_s_loss_and_gradient_on_three_tokens_by_hand() -> None:
    heads, rows = three_token_case()
    result = GRPO(GRPOConfig()).loss(heads, rows)
    scale = 0.25 * 2.0 * 0.5  # weight × importance weight × advantage
    assert result.loss.item() == pytest.approx(-scale)
    result.loss.backward()
    expected = -scale * torch.tensor([[1 - 0.5, -0.3, -0.2]])  # A ∂ log p(0)
    torch.testing.assert_close(heads.hidden.grad, expected, rtol=1e-4, atol=1e-7)


def test_sft_s_loss_on_three_tokens_by_hand() -> None:
    heads, rows = three_token_case()
    assert SFT(SFTConfig()).loss(heads, rows).loss.item() == pytest.approx(-0.25 * math.log(0.5))


def test_learning_rates() -> None:
    sdpo = SDPO(SDPOConfig(lr=1.0, warmup_steps=5))
    assert [sdpo.learning_rate(n, 100) for n in (0, 4, 99)] == pytest.approx([0.2, 1.0, 1.0])
    sft = SFT(SFTConfig(lr=1.0, warmup_share=0.1))
    assert [sft.learning_rate(n, 100) for n in (0, 9, 10, 55)] == pytest.approx([0.1, 1, 1, 0.5])
    assert sft.learning_rate(99, 100) < 0.001
