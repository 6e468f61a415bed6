"""Whether another library's implementation can run here."""

import importlib.util

import pytest
from harness import Bench


def skip_unless_possible(
    bench: Bench, operation: str, name: str, package: str | None, needs_gpu: bool
) -> None:
    """Skip, and keep the reason for the record, when a package is missing or a GPU is needed."""
    why = None
    if package is not None and importlib.util.find_spec(package) is None:
        why = f"{package} is not installed (extra: bench)"
    elif needs_gpu and bench.device.type != "cuda":
        why = "needs a GPU"
    if why is not None:
        bench.absent.setdefault(operation, []).append({"implementation": name, "why": why})
        pytest.skip(why)
