"""Each Triton kernel moves at most 1.1 times the bytes that its docstring says it has to."""

import sys
from pathlib import Path

import kernel_registry
import pytest

from cotutor.kernels.common import TRITON_INTERPRETED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

pytestmark = pytest.mark.skipif(not TRITON_INTERPRETED, reason="counts in Triton's interpreter")

FLOORED = [case for case in kernel_registry.CASES if case.floor is not None]


@pytest.mark.parametrize("case", FLOORED, ids=lambda case: case.name)
def test_bytes_moved(case):
    from count_bytes import ROWS, TOKENS, count

    entry = count(case, ROWS if case.by_vocab else TOKENS, 49_152)
    assert 1.0 <= entry["ratio"] <= 1.1, entry


def test_a_second_read_is_noticed(monkeypatch):
    """A floor without the write of the kept probabilities must fail."""
    from count_bytes import ROWS, count

    keeps = next(case for case in FLOORED if "keeps p" in case.name)
    entry = count(keeps._replace(floor=lambda n, v: n * v * 4), ROWS, 49_152)
    assert entry["ratio"] == pytest.approx(2.5, rel=0.01)


def test_masked_rows_are_not_loaded():
    import torch
    from count_bytes import Traffic

    from cotutor.kernels.logprob_rows import Rows
    from cotutor.kernels.triton_logprobs import chunk_statistics

    logits = torch.randn(10, 5000)
    turns = torch.full((10,), -1)
    turns[4] = 0
    with Traffic() as traffic:
        chunk_statistics(logits, Rows(torch.zeros(10).long(), turns, 1.0, None), entropy=True)
    assert traffic.total() < 1.1 * 5000 * 4
