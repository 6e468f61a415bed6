"""RL²F: which tokens of a dialogue get a gradient and how much, and what its scores count."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import make_dialogues

from cotutor.rollout.trajectory import Answer, Guidance, Problem, Trajectory
from cotutor.trainer.algos.base import Heads, StepContext
from cotutor.trainer.algos.rl2f import RL2F, RL2FConfig
from cotutor.trainer.batch import make_micro_batch, plan_micro_batches
from cotutor.trainer.dialogues import _by_turn, _curve, _shares, _tally
from cotutor.trainer.policy import Policy
from cotutor.trainer.step import accumulate_gradients, loss_metrics
from cotutor.trainer.world import World

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem(key="p", domain="d", question="", gold="", kind="text")


def dialogue() -> Trajectory:
    """Prompt 2, student 2, glue 1, teacher 2, glue 1, student 1."""
    d = Trajectory.start(PROBLEM, 0, [1, 2])
    d.append("student", [3, 4], [-0.5, -0.7])
    d.append("glue", [5])
    d.append("teacher", [6, 7])
    d.append("glue", [8])
    d.append("student", [9], [-0.9])
    d.advantage = 0.5
    return d


@pytest.mark.parametrize(
    ("turn_weight", "advantage", "targets", "sampled"),
    [
        (0.0, 0.5, [3, 4, 9], [True] * 3),
        (0.3, 0.5, [3, 4, 6, 7, 9], [True, True, False, False, True]),
        (0.3, 0.0, [6, 7], [False, False]),
    ],
)
def test_rows_of_a_dialogue(
    turn_weight: float, advantage: float, targets: list[int], sampled: list[bool]
) -> None:
    algorithm = RL2F(RL2FConfig())
    d = dataclasses.replace(dialogue(), advantage=advantage)
    assert plan_micro_batches([d], [algorithm.row_weights(d)], 99, turn_weight) == [[0]]
    batch = make_micro_batch([d], algorithm.row_weights, 1.0, torch.device("cpu"), turn_weight)
    rows = batch.rows
    assert rows.targets.tolist() == targets
    assert rows.sampled.tolist() == sampled
    # Each row's hidden state stands right before its target.
    assert [batch.ids[0, n].item() for n in batch.row_index.tolist()] == [
        d.ids[d.ids.index(target) - 1] for target in targets
    ]
    assert rows.weights.tolist() == pytest.approx([1.0 if s else 0.3 for s in sampled])
    assert rows.advantages.tolist() == [advantage if s else 0.0 for s in sampled]
    changes = [a != b for a, b in zip(rows.turn_ids[1:], rows.turn_ids[:-1], strict=True)]
    assert sum(changes) == (1 if turn_weight == 0 else 2 if advantage else 0)


def test_nobody_trains_a_dialogue_without_signal() -> None:
    d = dataclasses.replace(dialogue(), advantage=0.0)
    assert plan_micro_batches([d], [RL2F(RL2FConfig()).row_weights(d)], 99, 0.0) == []


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_gradient_of_teacher_and_glue_positions(coef: float) -> None:
    """Only what predicts a trained token has a gradient, and that of the others is exactly 0."""
    algorithm = RL2F(RL2FConfig(world_model_coef=coef))
    d = dialogue()
    batch = make_micro_batch([d], algorithm.row_weights, 1.0, torch.device("cpu"), coef)
    torch.manual_seed(0)
    hidden = torch.randn(len(d.ids) - 1, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    result = algorithm.loss(Heads(hidden[batch.row_index], weight), batch.rows)
    result.loss.backward()
    touched = hidden.grad.abs().sum(1) > 0
    roles = [turn.role for turn in d.turns for _ in range(turn.start, turn.stop)]
    trained = {"student"} | ({"teacher"} if coef else set())
    assert touched.tolist() == [role in trained for role in roles[1:]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_loss_by_hand(temperature: float) -> None:
    """Two rows with probabilities 1/2 and 1/4: one that was sampled, one of the teacher's.

    At another temperature the first row's logits are as much smaller, the teacher's stay.
    """
    algorithm = RL2F(RL2FConfig(world_model_coef=0.3))
    d = Trajectory.start(PROBLEM, 0, [0])
    d.append("student", [0], [math.log(0.4)])
    d.append("teacher", [1])
    d.advantage = 2.0
    batch = make_micro_batch([d], algorithm.row_weights, temperature, torch.device("cpu"), 0.3)
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.25, 0.25]])
    scale = torch.tensor([[temperature], [1.0]])
    hidden = (scale * torch.log(p)).requires_grad_()
    heads = Heads(hidden, torch.eye(3))
    result = algorithm.loss(heads, batch.rows)
    # Importance weight .5/.4, ratio 1, advantage 2; and 0.3 of the cross-entropy of 1/4.
    assert result.loss.item() == pytest.approx(-(1.25 * 2.0) + 0.3 * math.log(4), rel=1e-6)
    result.loss.backward()
    wanted = torch.stack(
        [2.5 * (p[0] - torch.tensor([1.0, 0, 0])), 0.3 * (p[1] - torch.tensor([0, 1.0, 0]))]
    )
    assert torch.allclose(scale * hidden.grad, wanted, atol=1e-6)
    assert result.sums["sampled_rows"] == 1
    assert result.sums["abs_logprob_diff"].item() == pytest.approx(math.log(0.5 / 0.4), rel=1e-5)
    metrics = loss_metrics({k: float(v) for k, v in result.sums.items()})
    assert metrics["world_model"] == pytest.approx(math.log(4), rel=1e-6)


def test_the_world_model_has_its_own_denominator(
    make_policy: Callable[..., Policy], world: World
) -> None:
    """Twice as many student's tokens: the world model's share of the loss stays what it is."""
    from test_step import config_with

    algorithm = RL2F(RL2FConfig(world_model_coef=0.3))
    losses = []
    for extra in (0, 7):
        dialogues = [dataclasses.replace(d, advantage=0.0) for d in make_dialogues(6)]
        for d in dialogues:
            d.append("student", [3] * extra, [-1.0] * extra)
        sums, signal = accumulate_gradients(
            make_policy(), algorithm, dialogues, config_with(500), world
        )
        assert signal
        assert sums["loss"] == pytest.approx(0.3 * sums["world_model"] / sums["teacher_rows"])
        losses.append(sums["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_annotate_spreads_a_dialogue_s_advantage_and_counts() -> None:
    group = [dialogue(), dialogue()]
    group[0].reward = 1.0
    group[0].answers = [Answer("a", 0.0, "wrong"), Answer("b", 1.0, "right")]
    group[1].answers = [Answer("a", 0.0, "wrong"), Answer("a", 0.0, "wrong")]
    group[0].guidance = [Guidance("g", ("leak", "g"), 1)]
    group[1].guidance = [Guidance("n", ("l", "l"), 2, True)]
    context = StepContext((), lambda *_: None, lambda *_: 0)
    counts = RL2F(RL2FConfig(normalize_std=True)).annotate([group], context)
    assert [d.advantage for d in group] == [1.0, -1.0]
    assert counts["right_at_once"] == 0
    assert counts["turns"] == 4
    assert counts["guidance/messages"] == 2
    assert counts["guidance/drafts"] == 4
    assert counts["guidance/leaks"] == 3
    assert counts["guidance/neutral"] == 1
    assert counts["guidance/tokens"] == 4


def test_scores_count_turn_by_turn() -> None:
    def with_answers(*scores: float, status: str = "wrong") -> Trajectory:
        d = dialogue()
        d.answers = [Answer(f"{n if n != 1 else 0}", s, "x") for n, s in enumerate(scores)]
        d.status = status
        return d

    group = [with_answers(0, 0, 1), with_answers(1), with_answers(0, 0, status="truncated")]
    assert _by_turn(group, 4) == [1 / 3, 1 / 3, 2 / 3, 2 / 3]
    assert _by_turn([], 2) == [0.0, 0.0]  # a prompt that was too long is wrong
    means, errors = _curve([[0.0, 1.0], [1.0, 1.0]])
    assert means == [0.5, 1.0]
    assert errors == pytest.approx([0.5, 0.0])
    tally = _tally(group)
    assert (tally["turns"], tally["second_answers"], tally["repeats"]) == (6, 3, 2)
    shares = _shares({**tally, "seconds_per_turn": 0.5, "too_long": 0})
    assert shares["repeated"] == pytest.approx(2 / 3)
    assert shares["truncated"] == 1


SMALL = {
    "steps": 1,
    "data.test-problems-per-domain": 3,
    "data.validation-problems-per-domain": 1,
    "rollout.questions-per-step": 2,
    "rollout.samples-per-question": 4,
    "dialogue.max-turns": 2,
    "evaluation.samples": 1,
    "baselines": "grpo,sft",
}


@pytest.mark.slow
def test_a_run_scores_dialogues_and_its_baselines(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "trainer/main.py", "--algo", "rl2f", "--out", str(out)]
    command += [f"--{name}={value}" for name, value in SMALL.items()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    for found in (summary, *summary["baselines"].values()):
        for setting in ("teacher", "self"):
            record = found["dialogues"]["pupil"][setting]
            assert record["start"] == summary["dialogues"]["pupil"][setting]["start"]
            for when in ("start", "end"):
                curve = record[when]["accuracy"]
                assert len(curve) == 2
                assert 0 <= curve[0] <= curve[1] <= 1
    assert set(summary["baselines"]) == {"grpo", "sft"}
    lines = (out / "rollouts/step_000000.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 8
    for rollout in rollouts:
        trained = [turn["role"] for turn in rollout["turns"] if turn["trained"]]
        assert set(trained) == {"student"}
        assert len(rollout["answers"]) == len(trained)
        assert len(rollout["guidance"]) == len(trained) - 1
    assert "Dialogues: right answers" in (out / "report.md").read_text()
    assert "within 2 answers" in done.stdout
