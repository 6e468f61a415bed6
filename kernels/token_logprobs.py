"""Log-probability of one target per row, its entropy, and their sums per turn of a dialogue.

With z = logits / τ, lse = log Σ_v e^{z_v}, p = e^{z − lse}, for rows with turn_ids >= 0:

    logprob = z_target − lse          entropy H = −Σ_v p_v log p_v = lse − Σ_v p_v z_v
    turn_sums[r] = Σ logprob of turn r,  turn_counts[r] = its rows

Row n's logits score targets[n]: the shift by one happens once, in the caller's batch.

Gradient, for upstream g of logprob and h of entropy (each row its own):

    ∂/∂logits_v = (g ([v = target] − p_v) − h p_v (log p_v + H)) / τ

Numerics: float32 inside, the maximum is subtracted first. p log p is 0 where p = 0, so −inf logits
give finite values and gradients. The target's own component uses expm1(logprob): 1 − p_target
keeps its digits when p_target is close to 1.

Bytes per trained row: forward V·b (one read), backward 2·V·b (one read, one write), b the item
size; a row that isn't trained is not read, and its gradient costs V·b of zeros.

Source: online softmax, Milakov & Gimelshein, arXiv 1805.02867.

Not supported: double backward (raises), class weights, label smoothing.
"""

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
    split_temperature,
)
from .logprob_rows import (
    PART_ELEMENTS,
    Rows,
    chunk_gradient,
    chunk_statistics,
    fake_statistics,
    row_chunks,
    trained_index,
)
from .segments import ID_DTYPES, check_id_tensor, segment_sums


class TokenLogprobs(NamedTuple):
    """What `token_logprobs` and `linear_token_logprobs` return.

    Attributes:
        logprobs: (...) float32, exactly 0 where the row isn't trained. Differentiable.
        entropy: (...) float32 in nats, likewise, or None unless asked for. Differentiable.
        turn_sums: (R,) float32 sums of logprobs over each turn, or None without turn_ids.
            Differentiable.
        turn_counts: (R,) int32 rows of each turn, or None without turn_ids.
    """

    logprobs: Tensor
    entropy: Tensor | None
    turn_sums: Tensor | None
    turn_counts: Tensor | None


def token_logprobs_reference(
    logits: Tensor,
    targets: Tensor,
    *,
    turn_ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    backend: str = "auto",
    num_turns: int | None = None,
) -> TokenLogprobs:
    """The definition in float64, differentiable by autograd; arguments as `token_logprobs`."""
    trained = torch.ones_like(targets, dtype=torch.bool) if turn_ids is None else turn_ids >= 0
    tau = torch.as_tensor(temperature, dtype=torch.float64).expand(targets.shape)
    z = logits[trained].double() / tau[trained][:, None]
    log_p = z - z.logsumexp(-1, keepdim=True)
    picked = log_p.gather(-1, targets[trained].long()[:, None])[:, 0]
    p_log_p = torch.where(log_p == -torch.inf, 0, log_p) * log_p.exp()

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(targets.shape).masked_scatter(trained, values)

    logprobs = spread(picked)
    entropies = spread(-p_log_p.sum(-1)) if entropy else None
    if turn_ids is None:
        return TokenLogprobs(logprobs, entropies, None, None)
    size = targets.numel() if num_turns is None else num_turns
    member = turn_ids.reshape(-1)[None] == torch.arange(size)[:, None]
    sums = (member * logprobs.reshape(-1)[None]).sum(1)
    return TokenLogprobs(logprobs, entropies, sums, member.sum(1).int())


def _forward_torch(logits: Tensor, rows: Rows, entropy: bool) -> Tensor:
    """(4, N) statistics; a CPU gathers the trained rows, chunk by chunk."""
    count, vocab = logits.shape
    found = logits.new_zeros((4, count), dtype=torch.float32)
    index = trained_index("token_logprobs", rows.turn_ids, None)
    for _, here in row_chunks(index, count, max(1, 8 * PART_ELEMENTS // vocab)):
        found[:, here] = chunk_statistics(logits[here], rows.take(here, vocab), entropy=entropy)
    return found


def _backward_torch(
    logits: Tensor, rows: Rows, found: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    count, vocab = logits.shape
    index = trained_index("token_logprobs", rows.turn_ids, None)
    make = torch.empty if index is None else torch.zeros
    grad = make((count, vocab), dtype=logits.dtype, device=logits.device)
    for _, here in row_chunks(index, count, max(1, 8 * PART_ELEMENTS // vocab)):
        source = logits[here]
        out = grad[here] if isinstance(here, slice) else source  # indexing made a copy
        chunk_gradient(
            source,
            rows.take(here, vocab),
            found[:, here],
            grad_logprobs[here],
            None if grad_entropy is None else grad_entropy[here],
            out,
        )
        if out is source:
            grad[here] = out
    return grad


@torch.library.custom_op("cotutor::token_logprobs", mutates_args=())
def _token_logprobs_op(
    logits: Tensor,
    targets: Tensor,
    turn_ids: Tensor | None,
    temperature: float,
    temperatures: Tensor | None,
    entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = Rows(targets, turn_ids, temperature, temperatures)
    rows.check("token_logprobs", logits.shape[1])
    with autocast_off(logits.device):
        if backend == "triton":
            from .triton_logprobs import chunk_statistics as on_device

            every = rows.take(slice(None), logits.shape[1])
            found = on_device(logits, every, entropy=entropy)
        else:
            found = _forward_torch(logits, rows, entropy)
    return found[0].clone(), found[1].clone(), found[2:].clone()


@_token_logprobs_op.register_fake
def _(logits, targets, turn_ids, temperature, temperatures, entropy, backend):
    return fake_statistics(logits)


@torch.library.custom_op("cotutor::token_logprobs_backward", mutates_args=())
def _token_logprobs_backward_op(
    logits: Tensor,
    targets: Tensor,
    turn_ids: Tensor | None,
    temperature: float,
    temperatures: Tensor | None,
    logprobs: Tensor,
    entropies: Tensor,
    norms: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    backend: str,
) -> Tensor:
    rows = Rows(targets, turn_ids, temperature, temperatures)
    found = torch.cat([logprobs[None], entropies[None], norms])
    with autocast_off(logits.device):
        if backend == "torch":
            return _backward_torch(logits, rows, found, grad_logprobs, grad_entropy)
        from .triton_logprobs import chunk_gradient as on_device

        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        every = rows.take(slice(None), logits.shape[1])
        on_device(logits, every, found, grad_logprobs, grad_entropy, grad)
        return grad


@_token_logprobs_backward_op.register_fake
def _(logits, *others):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output) -> None:
    logits, targets, turn_ids, ctx.temperature, temperatures, ctx.entropy, ctx.backend = inputs
    ctx.save_for_backward(logits, targets, turn_ids, temperatures, *output)
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor, _grad_norms: Tensor):
    logits, targets, turn_ids, temperatures, logprobs, entropies, norms = ctx.saved_tensors
    grad = _token_logprobs_backward_op(
        logits,
        targets,
        turn_ids,
        ctx.temperature,
        temperatures,
        logprobs,
        entropies,
        norms,
        grad_logprobs,
        grad_entropy if ctx.entropy else None,
        ctx.backend,
    )
    return grad, None, None, None, None, None, None


_token_logprobs_op.register_autograd(_backward, setup_context=_setup_context)


def check_rows(
    function: str,
    targets: Tensor,
    turn_ids: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """Raise unless targets and turn ids are integers, one per row, on the device."""
    if targets.dtype not in ID_DTYPES:
        raise invalid(function, "targets", "int32 or int64", targets.dtype)
    check_shape(function, "targets", targets, shape)
    check_device(function, "targets", targets, device)
    if turn_ids is not None:
        check_id_tensor(function, "turn_ids", turn_ids, shape, device)


def collect(
    function: str,
    logprobs: Tensor,
    entropies: Tensor | None,
    turn_ids: Tensor | None,
    num_turns: int | None,
    backend: str,
) -> TokenLogprobs:
    """Add the turn sums to per-row results; `turn_ids` is flat, the results have any shape."""
    if turn_ids is None:
        return TokenLogprobs(logprobs, entropies, None, None)
    size = turn_ids.numel() if num_turns is None else num_turns
    sums, counts = segment_sums(logprobs.reshape(-1), turn_ids, size, function, backend)
    return TokenLogprobs(logprobs, entropies, sums, counts)


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    turn_ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    backend: str = "auto",
    num_turns: int | None = None,
) -> TokenLogprobs:
    """Log-probs of the targets, and on request entropies, of the rows that are trained.

    Args:
        logits: (..., V) float32, bfloat16 or float16, any strides. Row n scores targets[n].
        targets: (...) integer, 0 to V − 1 where trained; anything elsewhere.
        turn_ids: (...) integer; −1: not trained, never read; 0 to R − 1: the row's turn.
        temperature: a number greater than 0, or a tensor (...) with one per row.
        entropy: whether to compute the entropies too.
        backend: "auto", "triton" or "torch".
        num_turns: R; default: the number of rows, which bounds any numbering from 0.

    Returns:
        `TokenLogprobs`.

    Raises:
        ValueError: shapes, devices or dtypes that don't match, temperature not above 0, targets or
            turn ids out of range (on CUDA the last two are device-side assertions).

    Gradients: to `logits`, from logprobs, entropy and turn_sums.
    """
    name = "token_logprobs"
    check_float(name, "logits", logits)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise invalid(name, "logits", "(..., V) with V >= 1", f"shape {tuple(logits.shape)}")
    shape, vocab = tuple(logits.shape[:-1]), logits.shape[-1]
    check_rows(name, targets, turn_ids, shape, logits.device)
    number, per_row = split_temperature(name, "temperature", temperature, shape, logits.device)
    backend = resolve_backend(name, backend, logits.device)
    flat_turns = None if turn_ids is None else turn_ids.reshape(-1)
    logprobs, entropies, _ = _token_logprobs_op(
        logits.reshape(-1, vocab),
        targets.reshape(-1),
        flat_turns,
        number,
        per_row,
        entropy,
        backend,
    )
    found = entropies.reshape(shape) if entropy else None
    return collect(name, logprobs.reshape(shape), found, flat_turns, num_turns, backend)
