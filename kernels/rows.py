"""Which rows are trained, and their per-row arguments, in the order in which they are worked on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import common


@dataclass(frozen=True)
class Rows:
    """The rows with a weight other than 0, compacted where their number is known.

    On a CPU the number is read from the weights. Elsewhere that would wait for the device, so the
    caller must give it; without it all rows are worked on, those of weight 0 as blanks.
    """

    count: int
    index: Tensor | None  # (count,) int64 places in the caller's N rows; None means all in order
    blank: Tensor | None  # (N, 1) bool rows to work on as zeros; None means none
    weights: Tensor | None  # (count, 1) float32
    ids: Tensor | None  # (count, K) int64
    tau: float | Tensor  # number or (count, 1)
    teacher_tau: float | Tensor

    @staticmethod
    def select(
        function: str,
        total: int,
        row_weights: Tensor | None,
        trained_rows: int | None,
        ids: Tensor | None,
        tau: float | Tensor,
        teacher_tau: float | Tensor,
    ) -> "Rows":
        """Compact the (N,) weights, (N, K) ids and (N,) temperatures."""
        if row_weights is None:
            if trained_rows not in (None, total):
                wanted = f"N = {total} where row_weights is None"
                raise common.invalid(function, "trained_rows", wanted, trained_rows)
            return Rows(total, None, None, None, ids, _column(tau), _column(teacher_tau))
        live = row_weights != 0
        if row_weights.device.type == "cpu" or trained_rows is not None:
            index = _places(function, live, trained_rows)
            row_weights = row_weights[index]
            ids = None if ids is None else ids[index]
            tau, teacher_tau = (
                t[index] if isinstance(t, Tensor) else t for t in (tau, teacher_tau)
            )
            count, blank = index.numel(), None
            return Rows(
                count, index, blank, row_weights[:, None], ids, _column(tau), _column(teacher_tau)
            )
        blank = ~live[:, None]
        if ids is not None:
            ids = torch.where(blank, torch.arange(ids.shape[1], device=ids.device), ids)
        tau, teacher_tau = (
            torch.where(live, t, 1.0) if isinstance(t, Tensor) else t for t in (tau, teacher_tau)
        )
        return Rows(
            total, None, blank, row_weights[:, None], ids, _column(tau), _column(teacher_tau)
        )

    def scales(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(count,) weights, and what they were divided by: small ones would be 0 in float16."""
        if self.weights is None:
            return torch.ones(self.count, device=device), None
        weights = self.weights[:, 0]
        if dtype != torch.float16 or self.count == 0:
            return weights, None
        largest = weights.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        return weights / largest, largest

    def of(self, states: Tensor, start: int, stop: int) -> Tensor:
        """Rows start ... stop of the caller's (N, ...) tensor."""
        if self.index is not None:
            return states[self.index[start:stop]]
        part = states[start:stop]
        return part if self.blank is None else part.masked_fill(self.blank[start:stop], 0)

    def put(self, target: Tensor, start: int, stop: int, values: Tensor) -> None:
        """Write rows start ... stop of the result into the caller's (N, ...) tensor."""
        if self.index is not None:
            target[self.index[start:stop]] = values.to(target.dtype)
            return
        if self.blank is not None:
            values = values.masked_fill(
                self.blank[start:stop].view(-1, *[1] * (values.dim() - 1)), 0
            )
        target[start:stop] = values


def _places(function: str, live: Tensor, trained_rows: int | None) -> Tensor:
    if trained_rows is None:
        return live.nonzero()[:, 0]
    fits = live.sum() == trained_rows
    common.check_values(function, "trained_rows", "the number of row weights that are not 0", fits)
    return live.to(torch.int8).argsort(descending=True, stable=True)[:trained_rows]


def _column(tau: float | Tensor) -> float | Tensor:
    return tau[:, None] if isinstance(tau, Tensor) else tau


def part_of(value: float | Tensor, start: int, stop: int) -> float | Tensor:
    """Rows start ... stop of a per-row column; a number as it is."""
    return value[start:stop] if isinstance(value, Tensor) else value
