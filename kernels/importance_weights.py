"""Importance weights between the policy that sampled and the policy that is trained.

Per trained token n, in float32 and only where the mask is on:

    d_n = logprobs_n − rollout_logprobs_n
    v_n = d_n (token) | Σ d over n's turn (turn) | Σ d over n's sequence (sequence)
        | (Σ d over n's sequence) / its trained tokens (geometric)
    r_n = exp(v_n)
    w_n = min(r_n, upper)                         truncate
          min(max(r_n, lower), upper)             clip
          r_n [lower <= r_n <= upper]             mask
          r_n, or 0 for the whole sequence when
          any of its r is outside [lower, upper]  reject

`veto` drops every sequence with a token whose exp(d) is below it. `normalize` divides by the mean
weight of the tokens that stay. Masked tokens get exactly 0 whatever they hold.

Gradient: none; weights multiply a loss and are constants in it.

Numerics: bounds are compared with v in log space, so exp never overflows into a product with 0.
The sums of the statistics cap their exponents at 40 per ratio, which keeps every sum finite.

Bytes per token (Triton, token level): 4 + 4 for both log-probs (2 + 2 in half precision), the
item sizes of turn_ids and sequence_ids where given, 4 + 1 for weight and keep. Other levels read
the log-probs and ids once more for each of turn and sequence.

Source: truncated importance sampling, the sequence and geometric variants, masking, rejection and
veto as verl's rollout-correction documentation describes them; OPCoD (arXiv 2606.14368, Table 4)
uses token, truncate, upper = 2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .common import (
    autocast_off,
    check_device,
    check_float,
    check_shape,
    invalid,
    resolve_backend,
)
from .importance_rule import (
    ACTIONS,
    LEVELS,
    MAX_LOG_RATIO,
    SEQUENCE_STATS,
    STATS,
    TOKEN_STATS,
    Rule,
    weigh_torch,
    weigh_triton,
)
from .segments import check_id_tensor, check_ids


class ImportanceStats(NamedTuple):
    """Statistics of one call as sums and counts, so that ranks and micro-batches can add them.

    Attributes:
        sums: (len(STATS),) float64, in the order of `STATS`. Add over ranks.
        counts: (len(STATS),) float64, trained tokens (sequences for `SEQUENCE_STATS`). Add.
        weight_min: () float32 smallest weight of a trained token, +inf when there is none. Min.
        weight_max: () float32 largest weight of a trained token, 0 when there is none. Max.

    Per token: the weight before normalisation and its square; `keep` the share that stays in the
    loss; `above` and `below` the share of exp(v) outside [lower, upper]; |d|; the estimates
    k1 = −d, k2 = d²/2, k3 = e^d − 1 − d of KL(rollout ‖ trainer); chi2 = e^{2d} − 1; both
    log-probs. Per sequence: chi2 of the whole sequence and the share that was dropped.
    """

    sums: Tensor
    counts: Tensor
    weight_min: Tensor
    weight_max: Tensor

    def summary(self) -> dict[str, float]:
        """Means and what follows from them, as floats; waits for the device; zeros if empty.

        Returns:
            "mean", "std", "min", "max" of the weights; "effective_sample_size" =
            1/mean((w/mean w)²), in (0, 1]; "perplexity" and "rollout_perplexity"; and the mean of
            every other name in `STATS`.
        """
        sums = dict(zip(STATS, self.sums.tolist(), strict=True))
        counts = dict(zip(STATS, self.counts.tolist(), strict=True))
        means = {name: sums[name] / counts[name] if counts[name] else 0.0 for name in STATS}
        mean, square = means.pop("weight"), means.pop("weight_squared")
        logprob, rollout = means.pop("logprob"), means.pop("rollout_logprob")
        empty = not counts["weight"]
        return {
            "tokens": counts["weight"],
            "mean": mean,
            "std": math.sqrt(max(square - mean * mean, 0.0)),
            "min": 0.0 if empty else self.weight_min.item(),
            "max": self.weight_max.item(),
            "effective_sample_size": mean * mean / square if square else 0.0,
            "perplexity": 0.0 if empty else math.exp(-logprob),
            "rollout_perplexity": 0.0 if empty else math.exp(-rollout),
            **means,
        }


class ImportanceWeights(NamedTuple):
    """What `importance_weights` returns.

    Attributes:
        weights: (...) float32, no gradient; exactly 0 where masked, dropped or rejected.
        keep: (...) bool, true where the token is trained and stays in the loss.
        stats: `ImportanceStats` of this call.
    """

    weights: Tensor
    keep: Tensor
    stats: ImportanceStats


def importance_weights_reference(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    turn_ids: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    level: str = "token",
    action: str = "truncate",
    upper: float = 2.0,
    lower: float = 0.0,
    veto: float | None = None,
    normalize: bool = False,
    backend: str = "auto",
    num_turns: int | None = None,
    num_sequences: int | None = None,
) -> ImportanceWeights:
    """The definition in float64, one Python loop over tokens; arguments as `importance_weights`."""
    shape = logprobs.shape
    if sequence_ids is None and logprobs.dim() == 2:
        sequence_ids = torch.arange(shape[0])[:, None].expand(shape)
    size = logprobs.numel()
    turn = [0] * size if turn_ids is None else turn_ids.reshape(-1).tolist()
    sequence = [0] * size if sequence_ids is None else sequence_ids.reshape(-1).tolist()
    trained = [n for n in range(size) if turn[n] >= 0 and sequence[n] >= 0]
    own, other = logprobs.reshape(-1).tolist(), rollout_logprobs.reshape(-1).tolist()
    d = {n: own[n] - other[n] for n in trained}

    def over(ids: list[int], n: int) -> list[float]:
        return [d[i] for i in trained if ids[i] == ids[n]]

    def value(n: int) -> float:
        if level == "token":
            return d[n]
        terms = over(turn if level == "turn" else sequence, n)
        return math.fsum(terms) / (len(terms) if level == "geometric" else 1)

    log_upper = math.log(upper)
    log_lower = math.log(lower) if lower > 0 else -math.inf
    v = {n: value(n) for n in trained}
    outside = {n: not log_lower <= v[n] <= log_upper for n in trained}
    dropped = set()
    for n in trained:
        vetoed = veto is not None and d[n] < math.log(veto)
        if vetoed or (action == "reject" and outside[n]):
            dropped.add(sequence[n])
    weights, keep = [0.0] * size, [False] * size
    for n in trained:
        keep[n] = sequence[n] not in dropped and not (action == "mask" and outside[n])
        ceiling = log_upper if action in ("truncate", "clip") else math.inf
        floor = log_lower if action == "clip" else -math.inf
        weights[n] = math.exp(max(min(v[n], ceiling), floor)) if keep[n] else 0.0

    tokens = [
        (own[n], other[n], weights[n], keep[n], v[n] > log_upper, v[n] < log_lower) for n in trained
    ]
    groups = {sequence[n]: math.fsum(over(sequence, n)) for n in trained}
    if sequence_ids is None:
        groups = {}
    stats = _reference_statistics(tokens, groups, dropped)
    kept = [weights[n] for n in range(size) if keep[n]]
    if normalize and sum(kept) > 0:
        weights = [w * len(kept) / math.fsum(kept) for w in weights]
    return ImportanceWeights(
        torch.tensor(weights, dtype=torch.float64).reshape(shape),
        torch.tensor(keep, dtype=torch.bool).reshape(shape),
        stats,
    )


def _reference_statistics(
    tokens: list[tuple[float, float, float, bool, bool, bool]],
    groups: dict[int, float],
    dropped: set[int],
) -> ImportanceStats:
    """Statistics of (own, other, weight, keep, above, below) per token and Σ d per sequence."""

    def capped(x: float) -> float:
        return math.exp(min(x, MAX_LOG_RATIO))

    sums = dict.fromkeys(STATS, 0.0)
    for own, other, weight, keep, above, below in tokens:
        d = own - other
        terms = (
            *(weight, weight**2, keep, above, below, abs(d), -d, d**2 / 2),
            *(capped(d) - 1 - d, capped(d) ** 2 - 1, own, other),
        )
        for name, term in zip(TOKEN_STATS, terms, strict=True):
            sums[name] += term
    for sequence, total in groups.items():
        sums["chi2_sequence"] += capped(total) ** 2 - 1
        sums["dropped_sequences"] += sequence in dropped
    present = [token[2] for token in tokens]
    counts = [len(tokens)] * len(TOKEN_STATS) + [len(groups)] * len(SEQUENCE_STATS)
    return ImportanceStats(
        torch.tensor([sums[name] for name in STATS], dtype=torch.float64),
        torch.tensor(counts, dtype=torch.float64),
        torch.tensor(min(present, default=math.inf), dtype=torch.float64),
        torch.tensor(max(present, default=0.0), dtype=torch.float64),
    )


@torch.library.custom_op("cotutor::importance_weights", mutates_args=())
def _importance_op(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    turn_ids: Tensor | None,
    sequence_ids: Tensor | None,
    level: str,
    action: str,
    upper: float,
    lower: float,
    veto: float | None,
    num_turns: int,
    num_sequences: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    for name, ids, size in (
        ("turn_ids", turn_ids, num_turns),
        ("sequence_ids", sequence_ids, num_sequences),
    ):
        if ids is not None:
            check_ids("importance_weights", name, ids, size)
    rule = Rule(level, action, upper, lower, veto, num_turns, num_sequences)
    weigh = weigh_triton if backend == "triton" else weigh_torch
    with autocast_off(logprobs.device):
        return weigh(logprobs, rollout_logprobs, turn_ids, sequence_ids, rule)


@_importance_op.register_fake
def _(logprobs, rollout_logprobs, turn_ids, sequence_ids, level, action, *scalars):
    stats = logprobs.new_empty(len(STATS), dtype=torch.float64)
    return (
        logprobs.new_empty(logprobs.shape, dtype=torch.float32),
        logprobs.new_empty(logprobs.shape, dtype=torch.bool),
        stats,
        torch.empty_like(stats),
        logprobs.new_empty(2, dtype=torch.float32),
    )


def _check_options(level: str, action: str, upper: float, lower: float, veto: float | None) -> None:
    """Raise unless the options are known and the bounds make an interval."""
    for name, got, known in (("level", level, LEVELS), ("action", action, ACTIONS)):
        if got not in known:
            wanted = "one of " + ", ".join(map(repr, known))
            raise invalid("importance_weights", name, wanted, repr(got))
    if not upper > 0:
        raise invalid("importance_weights", "upper", "greater than 0", upper)
    if not 0 <= lower <= upper:
        raise invalid("importance_weights", "lower", f"from 0 to upper = {upper}", lower)
    if veto is not None and not 0 < veto < math.inf:
        raise invalid("importance_weights", "veto", "greater than 0 and finite, or None", veto)


def importance_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    turn_ids: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    level: str = "token",
    action: str = "truncate",
    upper: float = 2.0,
    lower: float = 0.0,
    veto: float | None = None,
    normalize: bool = False,
    backend: str = "auto",
    num_turns: int | None = None,
    num_sequences: int | None = None,
) -> ImportanceWeights:
    """Weights that correct for the sampler's policy not being the trainer's; see the module.

    Args:
        logprobs: (...) float32, bfloat16 or float16, the trainer's log-probs of the sampled
            tokens, at the sampler's temperature.
        rollout_logprobs: same shape, the sampler's log-probs of the same tokens.
        turn_ids: same shape, integer, −1 for tokens that are not trained; needed for level "turn".
        sequence_ids: same shape, integer, −1 for tokens that are not trained. Without them the rows
            of a 2-D input are the sequences; other inputs need them for the levels "sequence" and
            "geometric", for "reject" and for `veto`.
        level: "token", "turn", "sequence" or "geometric".
        action: "truncate", "clip", "mask" or "reject".
        upper: largest ratio, greater than 0; may be inf.
        lower: smallest ratio, 0 to `upper`.
        veto: a ratio greater than 0; a token below it drops its sequence.
        normalize: divide the weights by their mean over the tokens that stay in this call.
        backend: "auto", "triton" or "torch".
        num_turns: turn ids are below it; default: the number of tokens.
        num_sequences: sequence ids are below it; default: the number of tokens (of rows in 2-D).

    Returns:
        `ImportanceWeights(weights, keep, stats)`; nothing in it carries a gradient.

    Raises:
        ValueError: shapes, devices or dtypes that don't match, an unknown option, bounds that make
            no interval, ids out of range, or missing ids that the level or action needs.

    Source: verl's rollout-correction documentation (definitions); OPCoD, arXiv 2606.14368, Table 4.
    """
    name = "importance_weights"
    check_float(name, "logprobs", logprobs)
    check_float(name, "rollout_logprobs", rollout_logprobs)
    shape, size = tuple(logprobs.shape), logprobs.numel()
    default_sequences = 1 if sequence_ids is None else size
    if sequence_ids is None and logprobs.dim() == 2:
        sequence_ids = torch.arange(shape[0], device=logprobs.device)[:, None].expand(shape)
        num_sequences = shape[0]
    check_shape(name, "rollout_logprobs", rollout_logprobs, shape)
    check_device(name, "rollout_logprobs", rollout_logprobs, logprobs.device)
    for argument, ids in (("turn_ids", turn_ids), ("sequence_ids", sequence_ids)):
        if ids is not None:
            check_id_tensor(name, argument, ids, shape, logprobs.device)
    _check_options(level, action, upper, lower, veto)
    if level == "turn" and turn_ids is None:
        raise invalid(name, "turn_ids", "given for level 'turn'", None)
    by_sequence = level in ("sequence", "geometric") or action == "reject" or veto is not None
    if by_sequence and sequence_ids is None:
        raise invalid(
            name,
            "sequence_ids",
            "given for this level, action or veto unless logprobs is 2-D",
            None,
        )
    weights, keep, sums, counts, extremes = _importance_op(
        logprobs.detach().reshape(-1),
        rollout_logprobs.detach().reshape(-1),
        None if turn_ids is None else turn_ids.reshape(-1),
        None if sequence_ids is None else sequence_ids.reshape(-1),
        level,
        action,
        float(upper),
        float(lower),
        None if veto is None else float(veto),
        size if num_turns is None else num_turns,
        default_sequences if num_sequences is None else num_sequences,
        resolve_backend(name, backend, logprobs.device),
    )
    if normalize:
        total = weights.double().sum()
        scale = torch.where(total > 0, keep.sum() / total, 1)
        weights = (weights * scale).float()
    stats = ImportanceStats(sums, counts, extremes[0], extremes[1])
    return ImportanceWeights(weights.reshape(shape), keep.reshape(shape), stats)
