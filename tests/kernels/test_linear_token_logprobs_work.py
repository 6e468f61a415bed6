"""linear_token_logprobs: what is multiplied, counted."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cotutor.kernels.linear_token_logprobs import _backward, _forward
from cotutor.kernels.logprob_rows import Rows

ROWS, VOCAB, WIDTH = 40, 300, 24


def step(device, backend, trained: int, keep: int, wanted: tuple[bool, bool]) -> None:
    """Forward and backward with `trained` of the rows in a turn and `keep` rows of p kept."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, device=device)
    weight = torch.randn(VOCAB, WIDTH, device=device)
    place = torch.arange(ROWS, device=device)
    rows = Rows(place, place.lt(ROWS - trained).long().neg(), 1.0, None)
    kept = torch.empty(keep, VOCAB, device=device)
    common = (torch.float32, 8)  # dtype, rows of a chunk
    found = _forward(hidden, weight, rows, True, *common, kept, trained, backend)
    upstream = torch.ones(2, ROWS, device=device)
    _backward(hidden, weight, rows, *common, trained, found, kept, *upstream, wanted, backend)


def flops(*arguments) -> int:
    with FlopCounterMode(display=False) as counter:
        step(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_products_follow_the_trained_rows(device, backend):
    """10 % of the rows cost 10 % of the products, and an unused gradient or a kept p none."""
    one = 2 * ROWS * VOCAB * WIDTH
    assert flops(device, backend, ROWS, ROWS, (True, True)) == 3 * one
    assert flops(device, backend, ROWS, 0, (True, True)) == 4 * one
    assert flops(device, backend, ROWS, ROWS, (True, False)) == 2 * one
    assert flops(device, backend, ROWS, ROWS, (False, True)) == 2 * one
    assert flops(device, backend, ROWS // 10, ROWS, (True, True)) == 3 * one // 10
    assert flops(device, backend, 0, ROWS, (True, True)) == 0
