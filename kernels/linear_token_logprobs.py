"""Token log-probabilities and entropies straight from hidden states, without the [N, V] logits.

    logits = hidden · weightᵀ, then as `token_logprobs`; only rows with turn_ids >= 0 are multiplied

Gradient: with dz the gradient towards the logits as in `token_logprobs`,

    ∂/∂hidden = dz · weight          ∂/∂weight = dzᵀ · hidden

The upstream gradients are unknown in the forward pass, and logprob and entropy pull in different
directions, so dz can't be made there. The forward pass therefore leaves the probabilities p of as
many rows as `keep_bytes` holds, in the working dtype: those rows take three GEMMs (forward,
∂hidden, ∂weight) and one read and write of dz. The other rows are multiplied again: four GEMMs and
no memory. The default of `keep_bytes` is 2.5 GiB on CUDA (8192 rows of 151,936 in bfloat16) and
256 MiB on a CPU.

Numerics: logits, statistics and the sum of ∂weight over chunks are float32. log p of a
kept p above ½ is taken from the row's statistics: bfloat16 has no digits left for a p close to 1.

Bytes per trained row beyond the GEMMs' own: forward 4·V (one read), and where p is kept 4·V + b·V
more (one read, one write); backward b·V + b·V kept, 4·V + b·V recomputed; b the item size of the
working dtype. A row that isn't trained costs nothing.

Memory beyond inputs and results: chunk_rows · V · (4 + b) + keep_bytes + 4·V·D for ∂weight.

Not supported: double backward (raises), a bias.
"""

import torch
from torch import Tensor

from . import logprob_rows
from .common import (
    autocast_off,
    check_device,
    check_float,
    check_shape,
    choose_chunk_rows,
    compute_dtype,
    invalid,
    resolve_backend,
    split_temperature,
)
from .gemm import add_weight_gradient, hidden_gradient, logits_into, prepare_weight
from .logprob_rows import Rows, fake_statistics, row_chunks, trained_index
from .token_logprobs import TokenLogprobs, check_rows, collect, token_logprobs_reference

KEEP_BYTES_CUDA = 5 << 29
KEEP_BYTES_CPU = 1 << 28


def linear_token_logprobs_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    turn_ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_rows: int | None = None,
    backend: str = "auto",
    num_turns: int | None = None,
    trained_rows: int | None = None,
    keep_bytes: int | None = None,
) -> TokenLogprobs:
    """The definition in float64; arguments as `linear_token_logprobs`."""
    trained = torch.ones_like(targets, dtype=torch.bool) if turn_ids is None else turn_ids >= 0
    clean = torch.where(trained[..., None], hidden, 0)
    return token_logprobs_reference(
        clean.double() @ weight.double().t(),
        targets,
        turn_ids=turn_ids,
        temperature=temperature,
        entropy=entropy,
        num_turns=num_turns,
    )


def _hidden_rows(hidden: Tensor, here: slice | Tensor, rows: Rows) -> Tensor:
    """A chunk of hidden states (c, D), zero where the row isn't trained."""
    chunk = hidden[here]
    return chunk if rows.trained is None else torch.where(rows.trained[:, None], chunk, 0)


def _chunk_functions(backend: str):
    """`chunk_statistics` and `chunk_gradient` of the backend; they take the same arguments."""
    if backend == "torch":
        return logprob_rows.chunk_statistics, logprob_rows.chunk_gradient
    from . import triton_logprobs

    return triton_logprobs.chunk_statistics, triton_logprobs.chunk_gradient


def _forward(
    hidden: Tensor,
    weight: Tensor,
    rows: Rows,
    entropy: bool,
    dtype: torch.dtype,
    chunk_rows: int,
    kept: Tensor,
    trained_rows: int | None,
    backend: str,
) -> Tensor:
    """Return the (4, N) statistics; fill `kept` with the first rows' p."""
    count, vocab = hidden.shape[0], weight.shape[0]
    chunk_statistics, _ = _chunk_functions(backend)
    found = hidden.new_zeros((4, count), dtype=torch.float32)
    index = trained_index("linear_token_logprobs", rows.turn_ids, trained_rows)
    buffer = hidden.new_empty((min(chunk_rows, count), vocab), dtype=torch.float32)
    head = prepare_weight(weight, dtype)
    for start, here in row_chunks(index, count, chunk_rows):
        part = rows.take(here, vocab)
        size = len(part.targets)
        logits = buffer[:size]
        logits_into(logits, _hidden_rows(hidden, here, part), head, dtype)
        keep = kept[start : start + size] if start < len(kept) else None
        found[:, here] = chunk_statistics(logits, part, entropy=entropy, kept=keep)
    return found


def _backward(
    hidden: Tensor,
    weight: Tensor,
    rows: Rows,
    dtype: torch.dtype,
    chunk_rows: int,
    trained_rows: int | None,
    found: Tensor,
    kept: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    wanted: tuple[bool, bool],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return ∂hidden and ∂weight in their dtypes; an empty tensor for what isn't wanted."""
    count, vocab = hidden.shape[0], weight.shape[0]
    _, chunk_gradient = _chunk_functions(backend)
    index = trained_index("linear_token_logprobs", rows.turn_ids, trained_rows)
    total = count if index is None else len(index)
    grad_hidden = hidden.new_zeros(hidden.shape if wanted[0] else 0)
    grad_weight = weight.new_empty(weight.shape if wanted[1] else 0, dtype=torch.float32)
    if total == 0:
        grad_weight.zero_()
    shape = (min(chunk_rows, total), vocab)
    logits = hidden.new_empty(shape if len(kept) < total else (0, vocab), dtype=torch.float32)
    # The GEMMs take dz in the working dtype; a CPU widens it to float32 for them anyway.
    narrow = torch.float32 if hidden.device.type == "cpu" else dtype
    dz = logits if narrow == logits.dtype and len(logits) else hidden.new_empty(shape, dtype=narrow)
    head = prepare_weight(weight, dtype)
    for start, here in row_chunks(index, count, chunk_rows):
        part = rows.take(here, vocab)
        size = len(part.targets)
        chunk = _hidden_rows(hidden, here, part)
        is_kept = start < len(kept)
        source = kept[start : start + size] if is_kept else logits[:size]
        if not is_kept:
            logits_into(source, chunk, head, dtype)
        upstream = grad_logprobs[here], None if grad_entropy is None else grad_entropy[here]
        chunk_gradient(source, part, found[:, here], *upstream, dz[:size], kept=is_kept)
        if wanted[0]:
            grad_hidden[here] = hidden_gradient(dz[:size], head, dtype).to(hidden.dtype)
        if wanted[1]:
            add_weight_gradient(grad_weight, dz[:size], chunk, dtype, first=start == 0)
    return grad_hidden, grad_weight.to(weight.dtype)


@torch.library.custom_op("cotutor::linear_token_logprobs", mutates_args=())
def _linear_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    turn_ids: Tensor | None,
    temperature: float,
    temperatures: Tensor | None,
    entropy: bool,
    dtype: torch.dtype,
    chunk_rows: int,
    trained_rows: int | None,
    keep_rows: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = Rows(targets, turn_ids, temperature, temperatures)
    rows.check("linear_token_logprobs", weight.shape[0])
    kept = _kept(weight, dtype, keep_rows)
    with autocast_off(hidden.device):
        found = _forward(
            hidden, weight, rows, entropy, dtype, chunk_rows, kept, trained_rows, backend
        )
    return found[0].clone(), found[1].clone(), found[2:].clone(), kept


def _kept(weight: Tensor, dtype: torch.dtype, keep_rows: int) -> Tensor:
    """Room for kept probabilities; float16 would flush the small ones to 0."""
    dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    return weight.new_empty((keep_rows, weight.shape[0]), dtype=dtype)


@_linear_op.register_fake
def _(hidden, weight, targets, turn_ids, tau, taus, entropy, dtype, chunk, trained, keep, backend):
    return *fake_statistics(hidden), _kept(weight, dtype, keep)


@torch.library.custom_op("cotutor::linear_token_logprobs_backward", mutates_args=())
def _linear_backward_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    turn_ids: Tensor | None,
    temperature: float,
    temperatures: Tensor | None,
    dtype: torch.dtype,
    chunk_rows: int,
    trained_rows: int | None,
    logprobs: Tensor,
    entropies: Tensor,
    norms: Tensor,
    kept: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    want_hidden: bool,
    want_weight: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    rows = Rows(targets, turn_ids, temperature, temperatures)
    with autocast_off(hidden.device):
        return _backward(
            hidden,
            weight,
            rows,
            dtype,
            chunk_rows,
            trained_rows,
            torch.cat([logprobs[None], entropies[None], norms]),
            kept,
            grad_logprobs,
            grad_entropy,
            (want_hidden, want_weight),
            backend,
        )


@_linear_backward_op.register_fake
def _(hidden, weight, *others):
    want_hidden, want_weight = others[-3:-1]
    return (
        hidden.new_empty(hidden.shape if want_hidden else 0),
        weight.new_empty(weight.shape if want_weight else 0),
    )


def _setup_context(ctx, inputs, output) -> None:
    hidden, weight, targets, turn_ids, ctx.temperature, temperatures, ctx.entropy = inputs[:7]
    ctx.dtype, ctx.chunk_rows, ctx.trained_rows, _, ctx.backend = inputs[7:]
    ctx.save_for_backward(hidden, weight, targets, turn_ids, temperatures, *output)
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx, grad_logprobs: Tensor, grad_entropy: Tensor, *_unused: Tensor):
    hidden, weight, targets, turn_ids, temperatures, *saved = ctx.saved_tensors
    want_hidden, want_weight = ctx.needs_input_grad[:2]
    grad_hidden, grad_weight = _linear_backward_op(
        hidden,
        weight,
        targets,
        turn_ids,
        ctx.temperature,
        temperatures,
        ctx.dtype,
        ctx.chunk_rows,
        ctx.trained_rows,
        *saved,
        grad_logprobs,
        grad_entropy if ctx.entropy else None,
        want_hidden,
        want_weight,
        ctx.backend,
    )
    return (
        grad_hidden if want_hidden else None,
        grad_weight if want_weight else None,
        *[None] * 10,
    )


_linear_op.register_autograd(_differentiate, setup_context=_setup_context)


def _choose_keep_rows(
    keep_bytes: int | None, rows: int, weight: Tensor, dtype: torch.dtype, chunk_rows: int
) -> int:
    """Rows whose probabilities fit: all of them, or else whole chunks."""
    if keep_bytes is None:
        keep_bytes = KEEP_BYTES_CPU if weight.device.type == "cpu" else KEEP_BYTES_CUDA
    elif isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int) or keep_bytes < 0:
        wanted = "a whole number of at least 0"
        raise invalid("linear_token_logprobs", "keep_bytes", wanted, repr(keep_bytes))
    fit = keep_bytes // (weight.shape[0] * (4 if dtype == torch.float32 else 2))
    return rows if fit >= rows else fit - fit % chunk_rows


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    turn_ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_rows: int | None = None,
    backend: str = "auto",
    num_turns: int | None = None,
    trained_rows: int | None = None,
    keep_bytes: int | None = None,
) -> TokenLogprobs:
    """`token_logprobs` of hidden · weightᵀ for the rows that are trained, in chunks of rows.

    Args:
        hidden: (..., D) float32, bfloat16 or float16. Row n scores targets[n].
        weight: (V, D) float32, bfloat16 or float16, the LM head; slice a padded one to the real V.
        targets: (...) integer, 0 to V − 1 where trained; anything elsewhere.
        turn_ids: (...) integer; −1: not trained, never read; 0 to R − 1: the row's turn.
        temperature: a number greater than 0, or a tensor (...) with one per row.
        entropy: whether to compute the entropies too.
        chunk_rows: rows of logits held at once; default: 2048 on CUDA, 128 on a CPU.
        backend: "auto", "triton" or "torch".
        num_turns: R; default: the number of rows, which bounds any numbering from 0.
        trained_rows: the number of rows with turn_ids >= 0. A CPU counts them itself; on CUDA the
            count can't be read without waiting, so without it every row is multiplied.
        keep_bytes: memory for probabilities kept for the backward pass; see the module.

    Returns:
        `TokenLogprobs`.

    Raises:
        ValueError: shapes, devices or dtypes that don't match, temperature not above 0, targets or
            turn ids out of range, a wrong trained_rows (on CUDA the last three are device-side
            assertions).

    Gradients: to `hidden` and `weight`, in their dtypes, from logprobs, entropy and turn_sums; an
    input that doesn't require one costs no GEMM.
    """
    name = "linear_token_logprobs"
    check_float(name, "hidden", hidden)
    check_float(name, "weight", weight, 2)
    shape, count = tuple(hidden.shape[:-1]), hidden.shape[:-1].numel()
    check_shape(name, "hidden", hidden, (*shape, weight.shape[1]))
    check_device(name, "weight", weight, hidden.device)
    if weight.shape[0] < 1:
        raise invalid(name, "weight", "(V, D) with V >= 1", f"shape {tuple(weight.shape)}")
    check_rows(name, targets, turn_ids, shape, hidden.device)
    number, per_row = split_temperature(name, "temperature", temperature, shape, hidden.device)
    backend = resolve_backend(name, backend, hidden.device)
    chunk_rows = choose_chunk_rows(name, chunk_rows, count, weight.shape[0], hidden.device)
    dtype = compute_dtype(hidden, weight)
    keep_rows = _choose_keep_rows(keep_bytes, count, weight, dtype, chunk_rows)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        keep_rows = 0
    flat_turns = None if turn_ids is None else turn_ids.reshape(-1)
    logprobs, entropies, _, _ = _linear_op(
        hidden.reshape(count, weight.shape[1]),
        weight,
        targets.reshape(-1),
        flat_turns,
        number,
        per_row,
        entropy,
        dtype,
        chunk_rows,
        trained_rows,
        keep_rows,
        backend,
    )
    found = entropies.reshape(shape) if entropy else None
    return collect(name, logprobs.reshape(shape), found, flat_turns, num_turns, backend)
