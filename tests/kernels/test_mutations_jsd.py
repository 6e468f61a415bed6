"""Tests of the tests: a copy of the library with one planted fault must fail a check.

Each fault is one change of the source text. The copy is imported under a name of its own, its
operators in a namespace of their own.
"""

import importlib
import shutil
import sys
from pathlib import Path

import jsd_checks
import pytest
import torch

import cotutor.kernels

SOURCE = Path(cotutor.kernels.__file__).parent
FAR = 1 << 30  # elements between two rows


def mutant(name: str, file: str, old: str, new: str, folder: Path):
    """The package with `old` replaced by `new` in one file."""
    package = folder / name
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.glob("*.py"):
        text = path.read_text()
        if path.name == file:
            assert text.count(old) >= 1, f"{file} no longer contains {old!r}"
            text = text.replace(old, new)
        text = text.replace('"cotutor::', f'"{name}::').replace("ops.cotutor.", f"ops.{name}.")
        path.write_text(text)
    return importlib.import_module(name)


@pytest.fixture
def import_mutant(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(file: str, old: str, new: str):
        name = f"mutant_{abs(hash((file, old, new)))}"
        made.append(name)
        return mutant(name, file, old, new, tmp_path)

    yield make
    for module in [m for m in sys.modules if m.split(".")[0] in made]:
        del sys.modules[module]


def logits_check(kernels, bound, device, backend, **options):
    jsd_checks.check_against_float64(
        kernels.topk_jsd, bound, device=device, backend=backend, alpha=0.3, tau=0.7, **options
    )


def many_blocks_check(kernels, bound, device, backend):
    """More blocks than K, so that the list is used."""
    logits_check(kernels, bound, device, backend, vocab=1300, k=5)


def linear_check(kernels, bound, device, backend):
    jsd_checks.check_linear_against_float64(
        kernels.linear_topk_jsd, bound, device=device, backend=backend, alpha=0.3
    )


def ties_check(kernels, bound, device, backend):
    """Half of the row is one plateau: the lower ids of it belong to the support."""
    z = (torch.arange(300, device=device) % 2).float().expand(2, 300)
    t = jsd_checks.logits(2, 300, seed=3).to(device)
    truth = cotutor.kernels.topk_jsd_reference(z, t, k=9)
    got = kernels.topk_jsd(z, t, k=9, backend=backend)
    bound(got, truth, truth)


def far_rows_check(kernels, bound, device, backend):
    """Row 2 starts 2^31 elements into the tensor; pages that nothing touches cost no memory."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        storage = torch.empty(4 * FAR + 300, dtype=torch.float16, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    # starting in the middle, so that an offset that wraps to -2^31 still reads this tensor
    far = storage.as_strided((3, 300), (FAR, 1), 2 * FAR)
    near, teacher = jsd_checks.pair(3, 300, torch.float16, device)
    storage[:300].zero_()
    far.copy_(near)
    for z in (far, near):
        z.requires_grad_()
    loss = kernels.topk_jsd(far, teacher, k=7, backend=backend)
    truth = cotutor.kernels.topk_jsd_reference(near, teacher, k=7)
    bound(loss, truth, truth, floor=8)
    (g,) = torch.autograd.grad(loss.sum(), far)
    (g_near,) = torch.autograd.grad(truth.sum(), near)
    bound(g, g_near, g_near)


FAULTS = {
    "wrong tail": (
        "buckets.py", "log_rest - log_total, unit", "log_rest, unit", "torch", logits_check),
    "wrong mixture weight": (
        "buckets.py", "torch.log1p(alpha * torch", "torch.log1p((1 - alpha) * torch", "torch",
        logits_check),
    "missing 1/τ": (
        "topk_jsd.py", "upstream[:, None] / temperature", "upstream[:, None]", "torch",
        logits_check),
    "missing 1/τ, linear": (
        "buckets.py", "scale[:, None] / tau", "scale[:, None]", "torch", linear_check),
    "gradient without H outside": (
        "buckets.py", "slope, 0.0) - total)", "slope, 0.0))", "torch", logits_check),
    "gradient without H at the ids": (
        "buckets.py", "h[:, :-1] - S[:, :-1] * total", "h[:, :-1]", "torch", logits_check),
    "higher id first": (
        "buckets.py", "LOW_BITS - ", "", "torch", ties_check),
    "row weights lost": (
        "rows.py", "weights = self.weights[:, 0]", "weights = self.weights[:, 0] * 0 + 1", "torch",
        linear_check),
    "last chunk of dW only": (
        "linear_topk_jsd.py", "first=i == 0", "first=True", "torch", linear_check),
    "wrong tail, Triton": (
        "triton_jsd.py", "tail = log_rest - log_total", "tail = log_rest", "triton", logits_check),
    "wrong mixture weight, Triton": (
        "triton_jsd.py", "_log1p(alpha * _expm1", "_log1p((1.0 - alpha) * _expm1", "triton",
        logits_check),
    "missing 1/τ, Triton": (
        "triton_jsd.py", "tl.load(outside_ptr + row) * inverse_tau", "tl.load(outside_ptr + row)",
        "triton", logits_check),
    "block read twice, Triton": (
        "triton_topk.py", "(before // BLOCK != block)", "(before // BLOCK == block)", "triton",
        logits_check),
    "ids counted in the tail, Triton": (
        "triton_select.py", 'tl.where(high, float("-inf"), z)', "z", "triton", many_blocks_check),
    "unchosen lost from the tail, Triton": (
        "triton_select.py", "sums_ptr + blocks - 1, tl.sum", "sums_ptr + blocks - 1, 0 * tl.sum",
        "triton", many_blocks_check),
    "32-bit offset": (
        "triton_topk.py", "inner).to(tl.int64)", "inner).to(tl.int32)", "triton", far_rows_check),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault, device, import_mutant, assert_as_exact_as):
    file, old, new, backend, check = FAULTS[fault]
    broken = import_mutant(file, old, new)
    with pytest.raises(AssertionError):
        check(broken, assert_as_exact_as, device, backend)


@pytest.mark.parametrize(
    "check", dict.fromkeys(fault[-1] for fault in FAULTS.values()), ids=lambda c: c.__name__
)
def test_unbroken_copy_passes(check, backend, device, import_mutant, assert_as_exact_as):
    check(
        import_mutant("buckets.py", "k: 1 to V", "k: 1 to V"), assert_as_exact_as, device, backend
    )
