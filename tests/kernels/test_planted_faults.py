"""Tests of the tests: each of these mistakes, planted into a copy of the kernels, must turn red."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """A line of a kernel file, what to put in its place, and the tests that have to notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str


FAULTS = [
    Fault(
        "missing 1/τ in the gradient",
        "triton_logprobs.py",
        "stride_grad_logprob) * inverse_temperature",
        "stride_grad_logprob)",
        "test_token_logprobs.py",
        "equals_float64 and triton and 0.7",
    ),
    Fault(
        "off-by-one target",
        "triton_logprobs.py",
        "here == tl.load(targets_ptr + row)",
        "here == tl.load(targets_ptr + row) + 1",
        "test_token_logprobs.py",
        "equals_float64 and triton",
    ),
    Fault(
        "32-bit offset in the forward kernel",
        "triton_logprobs.py",
        "row = row.to(tl.int64)",
        "row = row.to(tl.int32)",
        "test_token_logprobs.py",
        "offsets_pass and statistics",
    ),
    Fault(
        "32-bit offset in the dense gradient",
        "triton_jsd.py",
        "out_ptr += row.to(tl.int64) * vocab",
        "out_ptr += row * vocab",
        "test_topk_jsd_triton.py",
        "dense_gradient_beyond",
    ),
    Fault(
        "plateau takes its last ids",
        "triton_select.py",
        "(rank < needed)",
        "(rank >= ties - needed)",
        "test_topk_jsd_triton.py",
        "adversarial_rows and 5",
    ),
    Fault(
        "bound of a plateau taken for the K-th largest of a sorted row",
        "triton_select.py",
        "tl.where(above < k, 0, 4)",
        "tl.where(above < k, 0, 0)",
        "test_topk_jsd_triton.py",
        "adversarial_rows and 5",
    ),
    Fault(
        "masked rows are read",
        "triton_logprobs.py",
        "HAS_MASK=rows.turn_ids is not None",
        "HAS_MASK=False",
        "test_token_logprobs.py",
        "masked_rows_are_not_read and triton",
    ),
    Fault(
        "entropy gradient without + H, PyTorch",
        "logprob_rows.py",
        ".add_(entropies[part, None])",
        "",
        "test_token_logprobs.py",
        "equals_float64 and torch",
    ),
    Fault(
        "kept p of a certain token is rounded",
        "logprob_rows.py",
        "torch.where(p > 0.5, -log_total, p.log())",
        "p.log()",
        "test_linear_token_logprobs.py",
        "hold_both_ends",
    ),
    Fault(
        "last chunk's ∂weight overwrites the others",
        "linear_token_logprobs.py",
        "first=start == 0",
        "first=True",
        "test_linear_token_logprobs.py",
        "equals_float64 and torch",
    ),
    Fault(
        "veto compares the wrong way",
        "triton_segments.py",
        "d < log_veto",
        "d > log_veto",
        "test_importance_weights.py",
        "equals_definition and triton and 0.3",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_turns_red(fault, tmp_path):
    package = tmp_path / "cotutor" / "kernels"
    shutil.copytree(ROOT / "kernels", package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / fault.file).read_text()
    assert fault.old in source, f"{fault.file} has no {fault.old!r} any more: plant it elsewhere"
    (package / fault.file).write_text(source.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/{fault.tests}", "-k", fault.select]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    red = run.returncode == 1 and " failed" in run.stdout
    # What an offset or a count that is wrong may do: write where it must not.
    crashed = run.returncode in (-signal.SIGSEGV, -signal.SIGABRT)
    assert red or crashed, f"exit code {run.returncode}\n{run.stdout}{run.stderr}"
