"""Top-K Jensen-Shannon divergence from hidden states: LM heads, loss and gradients, chunk by chunk.

    loss = Σ_n w_n · topk_jsd(h_n W_student, h'_n W_teacher)

The row weights are known before the forward pass, so the gradient with respect to the logits is
too: the forward pass overwrites each chunk of student logits with it and multiplies at once, four
GEMMs a chunk (student, teacher, dH, dW) where a backward pass that recomputes needs five.

Memory: two float32 [chunk, V] buffers, dW in float32 and dH; flat in N but for O(N (D + K)).
Numerics: float32 logits from the working dtype's product, dW accumulated in float32 over chunks.
Source: SDPO, arXiv 2601.20802; OPCoD, arXiv 2606.14368, Table 4. Mathematics: topk_jsd.py.
Not supported: double backward, gradients to the teacher or to the row weights, float64.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import buckets, common, gemm
from .rows import Rows, part_of
from .topk_jsd import check_row_values, check_support, topk_jsd_reference

NAME = "linear_topk_jsd"
GATHER_ELEMENTS = 1 << 24  # tail="drop": weight entries gathered at a time, 64 MiB in float32


class TopKJSD(NamedTuple):
    """What `linear_topk_jsd` returns; all float32, and only `loss` carries a gradient."""

    loss: Tensor  # () sum over rows of row_weights x per_row
    per_row: Tensor  # (N,) divergence; 0 where the row's weight is 0
    student_topk_mass: Tensor  # (N,) student probability of the K ids; 0 where the weight is 0
    teacher_topk_mass: Tensor  # (N,) teacher probability of the K ids; 0 where the weight is 0


def linear_topk_jsd_reference(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    row_weights: Tensor | None = None,
    k: int = 100,
    alpha: float = 0.5,
    tail: str = "exact",
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    ids: Tensor | None = None,
    chunk_rows: int | None = None,
    trained_rows: int | None = None,
    backend: str = "auto",
) -> TopKJSD:
    """The definition of `linear_topk_jsd` in float64 and plain PyTorch, differentiable."""
    if teacher_temperature is None:
        teacher_temperature = temperature
    if row_weights is None:
        row_weights = student_hidden.new_ones(student_hidden.shape[0])
    live = row_weights.detach().double() != 0
    z_s = student_hidden.double().masked_fill(~live[:, None], 0) @ student_weight.double().T
    z_t = teacher_hidden.double().masked_fill(~live[:, None], 0) @ teacher_weight.double().T
    if ids is None:
        ids = z_s.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    per_row = live * topk_jsd_reference(
        z_s, z_t, alpha=alpha, tail=tail, ids=ids,
        temperature=temperature, teacher_temperature=teacher_temperature,
    )  # fmt: skip
    loss = (row_weights.detach().double() * per_row).sum()

    def mass(z: Tensor, tau: float | Tensor) -> Tensor:
        tau = tau[:, None] if isinstance(tau, Tensor) and tau.dim() else tau
        return live * (z.detach() / tau).softmax(1).gather(1, ids.long()).sum(1)

    return TopKJSD(loss, per_row.detach(), mass(z_s, temperature), mass(z_t, teacher_temperature))


def linear_topk_jsd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    row_weights: Tensor | None = None,
    k: int = 100,
    alpha: float = 0.5,
    tail: str = "exact",
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    ids: Tensor | None = None,
    chunk_rows: int | None = None,
    trained_rows: int | None = None,
    backend: str = "auto",
) -> TopKJSD:
    """Weighted sum of `topk_jsd` over rows, from hidden states, with no [N, V] tensor kept.

    Args:
        student_hidden: (N, D) float32, bfloat16 or float16, any strides.
        student_weight: (V, D) LM head; its dtype may differ (autocast decides, or the wider one).
        teacher_hidden: (N, D') states of the teacher, a constant; D' may differ from D.
        teacher_weight: (V, D') LM head of the teacher, a constant, over the same V tokens.
        row_weights: (N,) weight of each row in the loss, a constant; None means 1. Rows of weight
            0 may hold anything, NaN included: they contribute nothing and return 0.
        k, alpha, tail, temperature, teacher_temperature, ids: as for `topk_jsd`, with N rows.
        chunk_rows: rows whose logits are held at once; None chooses.
        trained_rows: how many row weights are not 0, where the caller knows: on a GPU the other
            rows are then left out of the GEMMs. On a CPU they always are.
        backend: "auto", "triton" or "torch".

    Returns:
        TopKJSD(loss, per_row, student_topk_mass, teacher_topk_mass).

    Raises:
        ValueError: for arguments outside of the above.

    Gradients: `loss` to `student_hidden` and `student_weight`, in their dtypes; once
    differentiable. One that needs no gradient costs no GEMM.
    Source: SDPO, arXiv 2601.20802; OPCoD, arXiv 2606.14368, Table 4.
    """
    rows = _check_shapes(
        student_hidden, student_weight, teacher_hidden, teacher_weight, row_weights
    )
    vocab, device = student_weight.shape[0], student_hidden.device
    k = check_support(NAME, k, alpha, tail, ids, (rows,), vocab, device)
    chosen = common.resolve_backend(NAME, backend, device)
    # two buffers share an accelerator's budget, so that they and dW fit into 4 GB
    width = vocab if device.type == "cpu" else 2 * vocab
    chunk = common.choose_chunk_rows(NAME, chunk_rows, rows, width, device)
    if trained_rows is not None and not 0 <= trained_rows <= rows:
        raise common.invalid(NAME, "trained_rows", f"between 0 and N = {rows}", trained_rows)
    if teacher_temperature is None:
        teacher_temperature = temperature
    tau, taus = common.split_temperature(NAME, "temperature", temperature, (rows,), device)
    teacher_tau, teacher_taus = common.split_temperature(
        NAME, "teacher_temperature", teacher_temperature, (rows,), device
    )
    recording = torch.is_grad_enabled()
    loss, per_row, student_mass, teacher_mass, _, _ = torch.ops.cotutor.linear_topk_jsd(
        student_hidden, student_weight, teacher_hidden.detach(), teacher_weight.detach(),
        None if row_weights is None else row_weights.detach().float(),
        None if ids is None else ids.long(), taus, teacher_taus, tau, teacher_tau,
        k, float(alpha), tail, chunk, trained_rows,
        common.compute_dtype(student_hidden, student_weight),
        common.compute_dtype(teacher_hidden, teacher_weight),
        recording and student_hidden.requires_grad, recording and student_weight.requires_grad,
        chosen,
    )  # fmt: skip
    return TopKJSD(loss, per_row.detach(), student_mass.detach(), teacher_mass.detach())


def _check_shapes(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    row_weights: Tensor | None,
) -> int:
    device = student_hidden.device
    for name, tensor in (
        ("student_hidden", student_hidden),
        ("student_weight", student_weight),
        ("teacher_hidden", teacher_hidden),
        ("teacher_weight", teacher_weight),
    ):
        common.check_float(NAME, name, tensor, dim=2)
        common.check_device(NAME, name, tensor, device)
    rows, width = student_hidden.shape
    vocab = student_weight.shape[0]
    common.check_shape(NAME, "student_weight", student_weight, (vocab, width))
    common.check_shape(NAME, "teacher_hidden", teacher_hidden, (rows, teacher_hidden.shape[1]))
    if teacher_weight.shape[0] != vocab:
        wanted = f"over the student's V = {vocab} tokens (slice padded rows off: weight[:{vocab}])"
        raise common.invalid(NAME, "teacher_weight", wanted, f"{teacher_weight.shape[0]} rows")
    common.check_shape(NAME, "teacher_weight", teacher_weight, (vocab, teacher_hidden.shape[1]))
    if row_weights is not None:
        common.check_shape(NAME, "row_weights", row_weights, (rows,))
        common.check_device(NAME, "row_weights", row_weights, device)
        if row_weights.dtype.is_complex:
            raise common.invalid(NAME, "row_weights", "real", row_weights.dtype)
    return rows


@torch.library.custom_op("cotutor::linear_topk_jsd", mutates_args=())
def _linear_topk_jsd_op(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
    row_weights: Tensor | None, ids: Tensor | None, taus: Tensor | None,
    teacher_taus: Tensor | None, tau: float, teacher_tau: float, k: int, alpha: float, tail: str,
    chunk: int, trained_rows: int | None, student_dtype: torch.dtype, teacher_dtype: torch.dtype,
    need_dh: bool, need_dw: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, per_row, student mass, teacher mass, dH, dW); a gradient not needed has 0 elements."""
    rows = Rows.select(
        NAME, student_hidden.shape[0], row_weights, trained_rows, ids,
        tau if taus is None else taus, teacher_tau if teacher_taus is None else teacher_taus,
    )  # fmt: skip
    check_row_values(NAME, rows.ids, student_weight.shape[0], rows.tau, rows.teacher_tau)
    per_row, student_mass, teacher_mass, dh = (
        x.zero_() for x in _outputs(student_hidden, student_weight, need_dh, False)[1:5]
    )
    total_dw = torch.empty(student_weight.shape if need_dw else (0,), device=per_row.device)
    if rows.count == 0 or tail == "drop":
        total_dw.zero_()
    scales, unit = rows.scales(total_dw.device, student_dtype)
    with common.autocast_off(total_dw.device):
        _run_chunks(
            rows, scales, (student_hidden, student_weight, student_dtype),
            (teacher_hidden, teacher_weight, teacher_dtype), k, alpha, tail, chunk, backend,
            need_dh, need_dw, per_row, student_mass, teacher_mass, dh, total_dw,
        )  # fmt: skip
    if unit is not None:
        dh.mul_(unit)
        total_dw.mul_(unit)
    loss = (per_row if row_weights is None else per_row * row_weights).sum()
    dw = total_dw.to(_gradient_dtype(student_weight))
    return loss, per_row, student_mass, teacher_mass, dh, dw


def _run_chunks(
    rows: Rows, scales: Tensor, student: tuple[Tensor, Tensor, torch.dtype],
    teacher: tuple[Tensor, Tensor, torch.dtype], k: int, alpha: float, tail: str, chunk: int,
    backend: str, need_dh: bool, need_dw: bool, per_row: Tensor, student_mass: Tensor,
    teacher_mass: Tensor, dh: Tensor, total_dw: Tensor,
) -> None:  # fmt: skip
    """Fill the last five; the logits of both sides live in two buffers that every chunk reuses."""
    hidden, weight, dtype = student
    teacher_hidden, teacher_weight, teacher_dtype = teacher
    buffers = common.scratch((2, min(chunk, rows.count), weight.shape[0]), weight.device)
    weight = gemm.prepare_weight(weight, dtype)
    teacher_weight = gemm.prepare_weight(teacher_weight, teacher_dtype)
    sides = _sides(backend)
    for i in range(0, rows.count, chunk):
        j = min(i + chunk, rows.count)
        z, z_teacher = buffers[:, : j - i]
        tau, scale, states = part_of(rows.tau, i, j), scales[i:j], rows.of(hidden, i, j)
        gemm.logits_into(z, states, weight, dtype)
        ids = None if rows.ids is None else rows.ids[i:j]
        ids, s = sides.student_side(z, k, ids, tau)
        gemm.logits_into(z_teacher, rows.of(teacher_hidden, i, j), teacher_weight, teacher_dtype)
        t = sides.teacher_side(z_teacher, ids, part_of(rows.teacher_tau, i, j))
        result = sides.compare(s, t, alpha, tail)
        rows.put(per_row, i, j, result.loss[:, 0])
        rows.put(student_mass, i, j, result.student_mass[:, 0])
        rows.put(teacher_mass, i, j, result.teacher_mass[:, 0])
        if not (need_dh or need_dw):
            continue
        if tail == "drop":
            grads = _LogitGradient(ids, result.at_ids * scale[:, None] / tau, None)
        else:
            dense = sides.gradient(z, z_teacher, ids, result, scale, tau, dtype)
            grads = _LogitGradient(ids, result.at_ids, dense)
        if need_dh:
            rows.put(dh, i, j, grads.to_hidden(weight, dtype))
        if need_dw:
            grads.add_to_weight(total_dw, states, dtype, first=i == 0)


def _sides(backend: str) -> Any:
    """The module that compares the two sides; a machine without Triton does without it."""
    if backend == "triton":
        from . import triton_jsd

        return triton_jsd
    return buckets


class _LogitGradient(NamedTuple):
    """Gradient to one chunk's logits: dense, or only at the ids (tail="drop")."""

    ids: Tensor  # (rows, K)
    at_ids: Tensor  # (rows, K) float32
    dense: Tensor | None  # (rows, V) float32

    def to_hidden(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if self.dense is not None:
            return gemm.hidden_gradient(self.dense, weight, dtype)
        return torch.cat([
            torch.bmm(grads[:, None], weight[ids].to(dtype).float())[:, 0]
            for ids, grads in self._pieces(weight.shape[1])
        ])  # fmt: skip

    def add_to_weight(self, total: Tensor, hidden: Tensor, dtype: torch.dtype, first: bool) -> None:
        if self.dense is not None:
            gemm.add_weight_gradient(total, self.dense, hidden, dtype, first)
            return
        hidden, done = hidden.to(dtype).float(), 0
        for ids, grads in self._pieces(hidden.shape[1]):
            rows = hidden[done : done + len(ids), None]
            outer = (grads[:, :, None] * rows).flatten(0, 1)
            # sorts by id on CUDA, so that equal ids are added in a fixed order
            total.index_put_((ids.flatten(),), outer, accumulate=True)
            done += len(ids)

    def _pieces(self, width: int):
        step = max(1, GATHER_ELEMENTS // (self.ids.shape[1] * width))
        return zip(self.ids.split(step), self.at_ids.split(step), strict=True)


def _outputs(
    hidden: Tensor, weight: Tensor, need_dh: bool, need_dw: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, device = hidden.shape[0], hidden.device

    def gradient(like: Tensor, needed: bool) -> Tensor:
        shape = like.shape if needed else (0,)
        return torch.empty(shape, dtype=_gradient_dtype(like), device=device)

    loss, per_row, student_mass, teacher_mass = (
        torch.empty(shape, device=device) for shape in ((), rows, rows, rows)
    )
    dh, dw = gradient(hidden, need_dh), gradient(weight, need_dw)
    return loss, per_row, student_mass, teacher_mass, dh, dw


def _gradient_dtype(like: Tensor) -> torch.dtype:
    """float16 waits for the upstream gradient (loss scaling) in float32: it could underflow."""
    return torch.float32 if like.dtype == torch.float16 else like.dtype


@_linear_topk_jsd_op.register_fake
def _fake_outputs(student_hidden, student_weight, *others):
    return _outputs(student_hidden, student_weight, *others[-3:-1])


@torch.library.custom_op("cotutor::scale_gradient", mutates_args=())
def _scale_gradient_op(upstream: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """upstream () x a gradient from the forward pass. An operator, so that a second derivative
    through it, which would be wrong, raises."""
    return (gradient * upstream).to(dtype)


@_scale_gradient_op.register_fake
def _fake_scaled(upstream, gradient, dtype):
    return torch.empty(gradient.shape, dtype=dtype, device=gradient.device)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # or the unused dW output gets a gradient of zeros
    ctx.save_for_backward(*output[4:])
    ctx.dtypes = (inputs[0].dtype, inputs[1].dtype)


def _backward(ctx, upstream: Tensor | None, *unused: Tensor):
    """Saved: dH and dW, in the dtypes of hidden and weight (float32 for float16).

    They are scaled where they lie unless the graph may be walked again: dW is as large as the head.
    """
    again = torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()

    def scaled(saved: Tensor, dtype: torch.dtype, needed: bool) -> Tensor | None:
        if upstream is None or not needed:
            return None
        if again or saved.dtype != dtype:
            return torch.ops.cotutor.scale_gradient(upstream, saved, dtype)
        return saved.detach().mul_(upstream)

    grads = [
        scaled(saved, dtype, needed)
        for saved, dtype, needed in zip(
            ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True
        )
    ]
    return (*grads, *[None] * 18)


_linear_topk_jsd_op.register_autograd(_backward, setup_context=_save_for_backward)
