"""The selection and exclusion kernels by themselves, on rows made to break them."""

import math

import pytest
import torch
from test_topk_jsd_selection import adversarial_rows, by_sorting

from cotutor.kernels import common

if not common.TRITON_INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)

from cotutor.kernels.triton_select import select
from cotutor.kernels.triton_topk import block_statistics, exclude


def rest(statistics: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """log Σ exp(z) of what the statistics describe."""
    return (statistics[0].double() + statistics[1].double().log()).logsumexp(1)


# 2500 columns are 20 blocks: few blocks hold all of 5, some of 19, and are too few for 100
@pytest.mark.parametrize("k", [1, 5, 19, 100])
def test_adversarial_rows(device, k):
    rows = adversarial_rows(2500)
    z = torch.stack(list(rows.values())).to(device)
    wanted = by_sorting(z, k).sort(dim=1).values
    left = z.double().scatter(1, wanted, -math.inf).logsumexp(1)
    statistics = block_statistics(z, 1.0)
    ids, values = select(z, statistics, k, 1.0)
    for name, mine, true in zip(rows, ids, wanted, strict=True):
        assert torch.equal(mine, true), name
    assert torch.equal(values, z.gather(1, wanted))
    torch.testing.assert_close(rest(statistics), left, rtol=1e-6, atol=1e-6)
    again = block_statistics(z, 1.0)
    assert torch.equal(exclude(z, again, wanted, 1.0), values)
    torch.testing.assert_close(rest(again), left, rtol=1e-6, atol=1e-6)


def test_bfloat16_columns_and_temperatures(device):
    z = torch.randn(700, 3, generator=torch.Generator().manual_seed(1)).bfloat16().to(device).t()
    tau = torch.tensor([0.5, 1.0, 2.0], device=device)
    statistics = block_statistics(z, tau)
    ids, values = select(z, statistics, 3, tau)
    wanted = by_sorting(z, 3).sort(dim=1).values
    assert torch.equal(ids, wanted)
    assert torch.equal(values, z.float().gather(1, wanted))
    left = (z.double().scatter(1, wanted, -math.inf) / tau[:, None]).logsumexp(1)
    got = (statistics[0].double() / tau[:, None] + statistics[1].double().log()).logsumexp(1)
    torch.testing.assert_close(got, left, rtol=1e-6, atol=1e-6)
