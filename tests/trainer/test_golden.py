"""The first steps of the embedded run, against recorded figures: nothing may change them unseen.

Rounding differs between processors, and a rounding can change a sampled token; so figures are
compared loosely, but far more narrowly than any change of loss, mask, prompt or seed would pass.
To record them anew after a change that is meant: COTUTOR_RECORD_GOLDEN=1 pytest <this file>.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden_tiny.json")
FIGURES = ("loss", "jsd", "entropy", "reward", "grad_norm", "response_tokens")
TOLERANCE = 0.02


def run_tiny(out: Path) -> list[dict[str, float]]:
    command = [sys.executable, "trainer/main.py", "--algo", "opcod", "--baselines", "none"]
    command += ["--out", str(out), "--steps", "2", "--opcod.rounds", "1", "--opcod.gate", "always"]
    command += ["--evaluation.samples", "1", "--evaluation.validation-samples", "1"]
    command += [
        "--data.test-problems-per-domain",
        "4",
        "--data.validation-problems-per-domain",
        "4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"]
    return [{"student": r["student"], **{name: r[name] for name in FIGURES}} for r in steps]


def test_the_embedded_run_s_first_steps(tmp_path: Path) -> None:
    found = run_tiny(tmp_path / "run")
    if os.environ.get("COTUTOR_RECORD_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert [s["student"] for s in found] == [s["student"] for s in golden]
    for step, expected in zip(found, golden, strict=True):
        for name in FIGURES:
            assert step[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-6), name
