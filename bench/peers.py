"""Whether another library's implementation can run here."""

import importlib.util

import pytest
from harness import Bench


def skip_unless_possible(bench: Bench, package: str | None, needs_gpu: bool) -> None:
    """Skip, with the reason, when a package is missing or a GPU is needed."""
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (extra: bench)")
    if needs_gpu and bench.device.type != "cuda":
        pytest.skip("needs a GPU")
