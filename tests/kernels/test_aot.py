"""Every Triton kernel compiles for compute capability 8.0, 9.0 and 10.0 and spills no register.

A subprocess compiles, because this process runs Triton's interpreter.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kernel_registry
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_compiler(*arguments: str, tmp_path: Path) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_all_kernels_compile_without_local_memory(tmp_path):
    out = tmp_path / "aot.json"
    run = run_compiler("bench/aot_record.py", "--out", str(out), tmp_path=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    entries = json.loads(out.read_text())["entries"]
    assert all(entry["local"] == 0 and entry["stack"] == 0 for entry in entries)
    assert all(0 < entry["reg"] <= 255 for entry in entries)
    assert {entry["arch"] for entry in entries} == set(kernel_registry.ARCHITECTURES)
    assert {entry["vocab"] for entry in entries} >= set(kernel_registry.VOCABS)
    written = {
        name
        for path in (ROOT / "kernels").glob("*.py")
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert {entry["kernel"] for entry in entries} == written


def test_a_spilling_kernel_is_noticed(tmp_path):
    """With 24 registers a thread the gradient has to spill, and the record has to say so."""
    script = (
        "import sys; sys.path.insert(0, 'bench')\n"
        "import aot_record\n"
        "from cotutor.kernels import triton_logprobs\n"
        "triton_logprobs.FUSION['maxnreg'] = 24\n"
        "entries = aot_record.record([65536], [90], 'logprob gradient/kept')\n"
        "print([entry['local'] + entry['stack'] for entry in entries])"
    )
    run = run_compiler("-c", script, tmp_path=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)[0] > 0
