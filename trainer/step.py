"""The gradient of one step over all micro-batches of all ranks, and what it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cotutor.rollout.trajectory import Trajectory
from cotutor.trainer.algos.base import MAX, Algorithm, Heads, LossSums
from cotutor.trainer.batch import (
    MicroBatch,
    empty_micro_batch,
    make_micro_batch,
    plan_micro_batches,
)
from cotutor.trainer.config import Config
from cotutor.trainer.policy import Policy
from cotutor.trainer.world import World

# Mean |Δ log-prob| between engine and trainer above which a step's rollouts are not believed; one
# token may be off by so many times as much.
_CANARY_THRESHOLD = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
_CANARY_MAX_FACTOR = 100


def accumulate_gradients(
    policy: Policy,
    algorithm: Algorithm,
    rollouts: Sequence[Trajectory],
    config: Config,
    world: World,
) -> tuple[dict[str, float], bool]:
    """Add the gradient of the step's loss to the policy, over all micro-batches of all ranks.

    The denominator counts every rollout (or token) of every rank before the first micro-batch, so
    that neither their number nor their cut changes the gradient. All ranks run equally many. A
    world model's tokens have a denominator of their own: all tokens of the teacher's turns.
    Returns metric sums over all ranks, and False if no token of any rank is trained.
    """
    weights = [algorithm.row_weights(r) for r in rollouts]
    counts = world.sum(
        {
            "sequences": len(rollouts),
            "tokens": sum(r.n_tokens("student") for r in rollouts),
            "teacher_tokens": sum(r.n_tokens("teacher") for r in rollouts),
        }
    )
    denominator = max(1.0, counts[algorithm.denominator])
    # Divided by the one denominator, the teacher's tokens come to their own mean × coefficient.
    turn_weight = algorithm.world_model_coef * denominator / max(1.0, counts["teacher_tokens"])
    packed = policy.packs
    plan = plan_micro_batches(
        rollouts, weights, config.policy.micro_batch_tokens, turn_weight, packed=packed
    )
    n_micro_batches = max(world.gather(len(plan)))
    has_teacher = algorithm.teacher is not None
    temperature = config.rollout.temperature if algorithm.on_policy else 1.0
    chunk_rows = config.policy.logits_chunk_rows or None
    # FSDP averages gradients over the ranks; the loss is a sum over them.
    scale = world.size / denominator
    sums: dict[str, torch.Tensor] = {}
    for n in range(n_micro_batches):
        if n < len(plan):
            members = [rollouts[i] for i in plan[n]]
            batch = make_micro_batch(
                members,
                algorithm.row_weights,
                temperature,
                world.device,
                turn_weight,
                packed=packed,
            )
        else:
            batch = empty_micro_batch(has_teacher, temperature, world.device)
        teacher_hidden = teacher_weight = None
        if batch.teacher_ids is not None and batch.teacher_row_index is not None:
            teacher_hidden, teacher_weight = policy.teach(
                batch.teacher_ids, batch.teacher_row_index, batch.teacher_position_ids
            )

        def loss(
            hidden: torch.Tensor,
            weight: torch.Tensor,
            batch: MicroBatch = batch,
            teacher_hidden: torch.Tensor | None = teacher_hidden,
            teacher_weight: torch.Tensor | None = teacher_weight,
        ) -> LossSums:
            heads = Heads(hidden, weight, teacher_hidden, teacher_weight, chunk_rows)
            found = algorithm.loss(heads, batch.rows)
            total = found.loss.detach() / denominator
            return LossSums(found.loss * scale, {**found.sums, "loss": total})

        result = policy.score(batch.ids, batch.row_index, loss, batch.position_ids)
        result.loss.backward()
        for name, value in result.sums.items():
            before = sums.get(name, torch.zeros((), device=world.device))
            greatest = name.startswith(MAX)
            sums[name] = torch.maximum(before, value) if greatest else before + value
    local = {name: float(value) for name, value in sums.items()}
    return _over_ranks(local, world), n_micro_batches > 0


def _over_ranks(local: Mapping[str, float], world: World) -> dict[str, float]:
    """The sums over all ranks, and the greatest of what is called so."""
    greatest = {name: value for name, value in local.items() if name.startswith(MAX)}
    total = world.sum({k: v for k, v in local.items() if k not in greatest})
    for part in world.gather(greatest):
        for name, value in part.items():
            total[name] = max(total.get(name, value), value)
    return total


def check_canary(metrics: Mapping[str, float], policy: Policy, step: int) -> None:
    """The engine's log-probs of this step's rollouts must be the trainer's own.

    Raises RuntimeError: the engine samples from other weights than those that are trained.
    """
    threshold = policy.config.canary_max_mean_diff or _CANARY_THRESHOLD[policy.compute_dtype]
    for kind, limit in (("mean", threshold), ("max", _CANARY_MAX_FACTOR * threshold)):
        difference = metrics[f"canary_{kind}_abs_diff"]
        if not difference <= limit:
            raise RuntimeError(
                f"canary: engine and trainer disagree on step {step}'s rollouts: {kind}"
                f" |Δ log-prob| {difference:.3g} is above {limit:.3g}"
                " (--policy.canary-max-mean-diff); the engine's weights are stale or broken"
            )


def loss_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Means of the summed metrics over the tokens they were summed over."""
    sampled = max(1.0, sums.get("sampled_rows", 0.0))
    taught = max(1.0, sums.get("rows_with_teacher", 0.0))
    metrics = {"loss": sums.get("loss", 0.0)}
    for name, denominator, label in (
        ("abs_logprob_diff", sampled, "canary_mean_abs_diff"),
        ("k3", sampled, "canary_k3"),
        ("entropy", sampled, "entropy"),
        ("importance_truncated", sampled, "importance_truncated"),
        ("world_model", max(1.0, sums.get("teacher_rows", 0.0)), "world_model"),
        ("jsd", taught, "jsd"),
        ("student_topk_mass", taught, "student_topk_mass"),
        ("teacher_topk_mass", taught, "teacher_topk_mass"),
    ):
        if name in sums:
            metrics[label] = sums[name] / denominator
    if "max_abs_logprob_diff" in sums:
        metrics["canary_max_abs_diff"] = sums["max_abs_logprob_diff"]
    return metrics


def rollout_counts(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "rollouts": len(rollouts),
        "right": sum(r.reward for r in rollouts),
        "truncated": sum(r.finish_reason == "length" for r in rollouts),
        "no_answer": sum(r.status == "no_answer" for r in rollouts),
        "timed_out": sum(r.status == "timed_out" for r in rollouts),
        "response_tokens": sum(r.n_tokens("student") for r in rollouts),
        "prompt_tokens": sum(r.turns[0].stop for r in rollouts),
    }
