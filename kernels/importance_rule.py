"""What importance weights are made of, on PyTorch and on Triton: rule, weights, statistics.

The definitions stand in importance_weights.py.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .segments import segment_sums_torch

LEVELS = ("token", "turn", "sequence", "geometric")
ACTIONS = ("truncate", "clip", "mask", "reject")

# A sum over tokens, or over sequences (the last two), each with its count.
TOKEN_STATS = (
    "weight",
    "weight_squared",
    "keep",
    "above",
    "below",
    "abs_log_ratio",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "chi2_token",
    "logprob",
    "rollout_logprob",
)
SEQUENCE_STATS = ("chi2_sequence", "dropped_sequences")
STATS = TOKEN_STATS + SEQUENCE_STATS

# Cap on log r inside the statistics: exp(2 · 40) times a million tokens is finite in float64.
MAX_LOG_RATIO = 40.0


class Rule(NamedTuple):
    """The call's scalars; the bounds in log space, where they are compared."""

    level: str
    action: str
    upper: float
    lower: float
    veto: float | None
    num_turns: int
    num_sequences: int

    @property
    def log_upper(self) -> float:
        return math.log(self.upper)

    @property
    def log_lower(self) -> float:
        return math.log(self.lower) if self.lower > 0 else -math.inf

    @property
    def log_veto(self) -> float:
        return -math.inf if self.veto is None else math.log(self.veto)

    @property
    def drops(self) -> bool:
        return self.action == "reject" or self.veto is not None


def _level_values(d: Tensor, turns: Tensor, per_sequence: Tensor, here: Tensor, rule: Rule):
    """v (N,) float32 of every token; `turns` has −1 and `here` any slot where masked."""
    if rule.level == "token":
        return d
    if rule.level == "turn":
        sums = segment_sums_torch(d, turns, rule.num_turns)
        return sums[turns.clamp_min(0).long()].float()
    v = per_sequence[0]
    if rule.level == "geometric":
        v = v / per_sequence[1].clamp_min(1)
    return v[here].float()


def _weigh(v: Tensor, rule: Rule) -> Tensor:
    """exp(v) within the bounds; exactly `upper` or `lower` at and beyond them."""
    if rule.action not in ("truncate", "clip"):
        return v.exp()
    weights = v.clamp_max(rule.log_upper).exp().clamp_max(rule.upper)
    weights = torch.where(v >= rule.log_upper, rule.upper, weights)
    if rule.action == "clip" and rule.lower > 0:
        weights = torch.where(v <= rule.log_lower, rule.lower, weights.clamp_min(rule.lower))
    return weights


def _statistics_torch(
    d: Tensor,
    v: Tensor,
    weights: Tensor,
    keep: Tensor,
    trained: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    rule: Rule,
) -> list[Tensor]:
    """Per-token terms in the order of `TOKEN_STATS`, (N,) each; masked tokens have d = 0."""
    r = d.clamp_max(MAX_LOG_RATIO).exp()
    return [
        weights,
        weights * weights,
        keep,
        trained & (v > rule.log_upper),
        trained & (v < rule.log_lower),
        d.abs(),
        -d,
        d * d / 2,
        r - 1 - d,
        r * r - 1,
        logprobs,
        rollout_logprobs,
    ]


def weigh_torch(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    turn_ids: Tensor | None,
    sequence_ids: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return weights, keep (N,), sums, counts (len(STATS),) and the extremes (2,)."""
    trained = torch.ones_like(logprobs, dtype=torch.bool)
    for ids in (turn_ids, sequence_ids):
        if ids is not None:
            trained = trained & (ids >= 0)
    logprobs = torch.where(trained, logprobs.float(), 0)
    rollout_logprobs = torch.where(trained, rollout_logprobs.float(), 0)
    d = logprobs - rollout_logprobs
    turns = torch.where(trained, 0 if turn_ids is None else turn_ids, -1)
    sequences = torch.where(trained, 0 if sequence_ids is None else sequence_ids, -1)
    here = sequences.clamp_min(0).long()

    size = rule.num_sequences
    per_sequence = d.new_zeros((2, size), dtype=torch.float64)
    if sequence_ids is not None:
        per_sequence[0] = segment_sums_torch(d, sequences, size)
        per_sequence[1] = segment_sums_torch(torch.ones_like(d), sequences, size)
    v = _level_values(d, turns, per_sequence, here, rule)
    outside = (v > rule.log_upper) | (v < rule.log_lower)
    dropped = torch.zeros(size, dtype=torch.bool, device=d.device)
    keep = trained
    if rule.drops:
        bad = d < rule.log_veto
        if rule.action == "reject":
            bad = bad | outside
        dropped = segment_sums_torch(bad.float(), sequences, size) > 0
        keep = keep & ~dropped[here]
    if rule.action == "mask":
        keep = keep & ~outside
    weights = torch.where(keep, _weigh(v, rule), 0)

    terms = _statistics_torch(d, v, weights, keep, trained, logprobs, rollout_logprobs, rule)
    sums = [term.double().sum() for term in terms]
    inf = torch.full((1,), torch.inf, device=d.device)
    low = torch.cat([inf, torch.where(trained, weights, torch.inf)]).amin()
    high = torch.cat([inf.new_zeros(1), weights]).amax()
    tokens = trained.double().sum()
    groups = None if sequence_ids is None else (*per_sequence, dropped)
    return weights, keep, *_totals(torch.stack(sums), tokens, groups), torch.stack([low, high])


def _totals(
    sums: Tensor, tokens: Tensor, groups: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Sums and counts (len(STATS),) float64 from the tokens' and the sequences' own.

    `groups` holds Σ d, the trained tokens and whether it was dropped, of every sequence.
    """
    more = sums.new_zeros(2, len(SEQUENCE_STATS))
    if groups is not None:
        log_ratio, lengths, dropped = groups
        present = lengths > 0
        chi2 = (2 * log_ratio.double()).clamp_max(2 * MAX_LOG_RATIO).exp() - 1
        more[0, 0] = torch.where(present, chi2, 0).sum()
        more[0, 1] = dropped.sum()
        more[1] = present.sum()
    return torch.cat([sums, more[0]]), torch.cat([tokens.expand(len(TOKEN_STATS)), more[1]])


def weigh_triton(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    turn_ids: Tensor | None,
    sequence_ids: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `weigh_torch`: one launch for the weights, two more for each kind of segment."""
    from . import triton_segments

    logprobs, rollout_logprobs = logprobs.contiguous(), rollout_logprobs.contiguous()
    turn_ids = None if turn_ids is None else turn_ids.contiguous()
    sequence_ids = None if sequence_ids is None else sequence_ids.contiguous()
    turn_sums = groups = None
    if rule.level == "turn" and turn_ids is not None:
        turn_sums, _, _ = triton_segments.segment_sums(
            logprobs, turn_ids, rule.num_turns, minus=rollout_logprobs, other_ids=sequence_ids
        )
    if sequence_ids is not None:
        groups = triton_segments.segment_sums(
            logprobs,
            sequence_ids,
            rule.num_sequences,
            minus=rollout_logprobs,
            other_ids=turn_ids,
            turn_sums=turn_sums,
            level=rule.level,
            reject=rule.action == "reject",
            bounds=(rule.log_upper, rule.log_lower, rule.log_veto) if rule.drops else None,
        )
    weights, keep, partials = triton_segments.importance_weights(
        logprobs,
        rollout_logprobs,
        turn_ids,
        sequence_ids,
        turn_sums,
        groups,
        level=rule.level,
        action=rule.action,
        drops=rule.drops,
        limits=(rule.upper, rule.lower, rule.log_upper, rule.log_lower, MAX_LOG_RATIO),
    )
    sums = partials[:, : len(TOKEN_STATS) + 1].double().sum(0)
    low, high = partials[:, 13].amin(), partials[:, 14].amax()
    if groups is not None:
        groups = groups[0], groups[1], groups[2] > 0
    totals = _totals(sums[:-1], sums[-1], groups)
    return weights, keep, *totals, torch.stack([low, high])
