"""Shared by all kernel tests: interpreter switch, NaN-filled empties, the error bound."""

import importlib.util
import os

import pytest
import torch

# Triton reads the variable when a kernel is decorated: before anything imports triton or cotutor.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# cuBLAS refuses deterministic mode (below) without a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    """Every test that takes this runs both ways: PyTorch, and Triton (interpreted on a CPU)."""
    return request.param


@pytest.fixture(autouse=True)
def nan_filled_empties():
    """Whatever torch would leave uninitialised is NaN (largest integer), for every kernel test."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


@pytest.fixture(autouse=True)
def quiet_interpreter():
    """Triton's interpreter computes with numpy, which warns where a GPU just says inf or NaN."""
    if importlib.util.find_spec("numpy") is None:  # a GPU needs none
        yield
        return
    import numpy

    with numpy.errstate(all="ignore"):
        yield


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest deviation, as a share of the truth's largest entry (or of 1 for tiny truths)."""
    if truth.numel() == 0:
        return 0.0
    got, truth = got.detach().double(), truth.detach().double()
    assert torch.isfinite(got).all(), "not finite"
    scale = truth.abs().max().clamp_min(1e-30)
    return float((got - truth).abs().max() / scale)


@pytest.fixture
def assert_as_exact_as():
    """Bound of every comparison: error <= 2 x PyTorch's own error in that dtype + floor x eps."""

    def check(got, truth, plain, dtype=None, floor=4.0, name=""):
        """`truth` float64; `plain` the same quantity by plain PyTorch in the working dtype."""
        assert got.shape == truth.shape, f"{name}: shape {got.shape}, not {truth.shape}"
        dtype = got.dtype if dtype is None else dtype
        error, allowed = relative_error(got, truth), relative_error(plain, truth)
        bound = 2 * allowed + floor * torch.finfo(dtype).eps
        assert error <= bound, f"{name}: error {error:.3e} > {bound:.3e} (PyTorch {allowed:.3e})"

    return check
